"""Experts: equal to an oracle on every mesh, by each dispatch; what they move; what is refused."""

import contextlib
import dataclasses
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from functree import nn
from functree.nn.moe import dispatch
from functree.nn.moe.dispatch import capacity_of
from functree.nn.moe.sharding import Shards, chosen_dispatch
from tests.lib.checks import raises
from tests.lib.covering import selected_cells
from tests.nn.moe_oracle import Result, mixture

KEY = jax.random.key(0)
EMBED, HIDDEN, EXPERTS, TOP_K = 6, 4, 4, 2
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 6, EMBED)).astype(np.float32)
COTANGENT = RANDOM.normal(size=X.shape).astype(np.float32)

# Rules, and the sizes of the mesh.
BOTH = ("data", "expert")
LAYOUTS: dict[str, dict[str, Any]] = {
    "unsharded": {},
    "data": {"batch": ("data", "expert", "model")},
    "EP": {"batch": "expert", "experts": "expert"},
    "EP, tokens replicated": {"experts": ("expert", "model")},
    "EP, TP": {"batch": BOTH, "experts": "expert", "hidden": "model"},
    "EP, FSDP": {"batch": BOTH, "experts": "expert", "embed": "data", "hidden": "model"},
    "EP, data": {"batch": "data", "experts": "expert"},
    "EP over the batch's axes": {"batch": BOTH, "experts": BOTH},
    "EP, TP, sequence": {"batch": BOTH, "experts": "expert", "hidden": "model", "seq": "model"},
}
# Into how many parts the batch and the sequence are sharded, where tokens are gathered; by an
# exchange every expert shard has its own.
PARTS = {
    "unsharded": (1, 1),
    "data": (8, 1),
    "EP": (2, 1),
    "EP, tokens replicated": (1, 1),
    "EP, data": (2, 1),
    "EP, TP, sequence": (4, 2),
}
EXCHANGED = {"EP, tokens replicated": (4, 1), "EP, data": (4, 1)}
CELLS = list(
    itertools.product(
        LAYOUTS,
        ["gather", "exchange"],
        [None, 1.0],
        ["balanced", "skewed"],
        ["auto", "explicit"],
    )
)


def weights_of(routing: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    shapes = {
        "router": (EMBED, EXPERTS),
        "gate": (EXPERTS, EMBED, HIDDEN),
        "up": (EXPERTS, EMBED, HIDDEN),
        "down": (EXPERTS, HIDDEN, EMBED),
    }
    found = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if routing == "skewed":
        # Of tokens whose first number is 1, all go to the last expert, and none to the first.
        found["router"][0] = [-30, 0, 0, 30]
    return found


def tokens_of(routing: str) -> np.ndarray:
    x = X.copy()
    if routing == "skewed":
        x[..., 0] = 1
    return x


def expected(routing: str, capacity: float | None, parts: tuple[int, int]) -> Result:
    numbers = np.arange(X.shape[0] * X.shape[1]).reshape(X.shape[:2])
    shards = []
    for rows in np.split(numbers, parts[0]):
        shards += [part.ravel() for part in np.split(rows, parts[1], axis=1)]
    flat = tokens_of(routing).reshape(-1, EMBED), COTANGENT.reshape(-1, EMBED)
    return mixture(weights_of(routing), *flat, TOP_K, capacity, shards)


def layer(routing: str = "balanced", **options: Any) -> nn.MoE:
    made = nn.MoE(EMBED, HIDDEN, EXPERTS, TOP_K, key=KEY, **options)
    given = {name: jnp.asarray(one) for name, one in weights_of(routing).items()}
    for name, one in given.items():
        made = eqx.tree_at(lambda moe, name=name: getattr(moe, name), made, one)
    return made


def loss(moe: nn.MoE, x: jax.Array) -> tuple[jax.Array, Any]:
    y, losses = moe(x)
    return jnp.sum(y * COTANGENT) + losses.balance + losses.z, (y, losses)


@contextlib.contextmanager
def placed(moe: nn.MoE, x: Any, rules: dict[str, Any], kind: str) -> Any:
    """The layer and the tokens on a mesh, with ambient rules on Auto axes."""
    mesh = ft.make_mesh(data=2, expert=2, model=2, explicit=kind == "explicit")
    layout = ft.AxisRules({**rules, ...: None})
    ambient = ft.axis_rules(layout) if kind == "auto" else contextlib.nullcontext()
    x = jax.device_put(x, jax.NamedSharding(mesh, layout.spec("batch seq embed")))
    with jax.set_mesh(mesh), ambient:
        yield ft.shard(moe, layout, mesh), x


def assert_as_oracle(found: Any, wanted: Result) -> None:
    (_, (y, losses)), (of_weights, of_x) = found
    assert_close(np.reshape(y, wanted.y.shape), wanted.y, 2e-6)
    assert_close(losses.balance, wanted.balance, 2e-6)
    assert_close(losses.z, wanted.z, 2e-6)
    assert losses.dropped == wanted.dropped
    of_tokens = np.reshape(of_x, wanted.y.shape)
    assert_close(of_tokens, wanted.gradient["x"], 5e-6)
    for name in ("router", "gate", "up", "down"):
        assert_close(getattr(of_weights, name), wanted.gradient[name], 5e-6)


def assert_close(found: Any, wanted: Any, rtol: float) -> None:
    """Equal, or within `rtol` of the largest value."""
    assert np.abs(np.asarray(found) - wanted).max() <= rtol * np.abs(wanted).max()


@pytest.mark.parametrize(("layout", "name", "capacity", "routing", "kind"), selected_cells(CELLS))
def test_as_the_oracle(
    layout: str, name: Any, capacity: float | None, routing: str, kind: str
) -> None:
    moe = layer(routing, capacity=capacity, dispatch=name)
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    parts = PARTS.get(layout, (4, 1))
    if name == "exchange":
        parts = EXCHANGED.get(layout, parts)
    with jax.default_matmul_precision("highest"):
        if layout == "unsharded":
            found = gradient(moe, tokens_of(routing))
        else:
            with placed(moe, tokens_of(routing), LAYOUTS[layout], kind) as given:
                found = gradient(*given)
    assert_as_oracle(found, expected(routing, capacity, parts))
    if routing == "skewed" and capacity is not None:
        assert found[0][1][1].dropped > 0


def test_weights_that_are_not_normalized() -> None:
    moe = layer(normalize=False)
    flat = X.reshape(-1, EMBED), COTANGENT.reshape(-1, EMBED)
    wanted = mixture(weights_of("balanced"), *flat, TOP_K, None, [], normalize=False)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(moe, X)
    assert_as_oracle(found, wanted)


def test_rows_behind_the_last_group_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a platform leaves there what was in memory, nothing of it comes out, or into a gradient."""

    def with_garbage(x: Any, weights: Any, sizes: Any) -> Any:
        found = jax.lax.ragged_dot(x, weights, sizes)
        return jnp.where(jnp.arange(len(x))[:, None] < sizes.sum(), found, jnp.nan)

    monkeypatch.setattr(dispatch, "product_of_groups", with_garbage)
    moe, sizes = layer(), jnp.array([2, 0, 1, 0])

    def summed(moe: nn.MoE, x: jax.Array) -> jax.Array:
        return dispatch.Experts(moe.gate, moe.up, moe.down).of_groups(x, sizes).sum()

    found = jax.jit(jax.value_and_grad(summed, (0, 1)))(moe, X[0])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert not np.any(found[1][1][3:])


def test_under_vmap() -> None:
    """The batch is hidden from the rules, and each row is computed as by itself."""
    mapped = lambda moe, x: jnp.sum(jax.vmap(lambda row: moe(row)[0])(x) * COTANGENT)  # noqa: E731
    whole = lambda moe, x: jnp.sum(moe(x)[0] * COTANGENT)  # noqa: E731
    moe = layer(capacity=float(EXPERTS))  # JAX cannot map the products without a capacity
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(jax.grad(whole, (0, 1)))(moe, X)
        with placed(moe, X, LAYOUTS["EP, TP"], "auto") as given:
            found = jax.jit(jax.grad(mapped, (0, 1)))(*given)
    with pytest.raises(NotImplementedError, match="ragged_dot vmap"):
        mapped(layer(), X)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(one, np.asarray(other), 5e-6)


# What moves


def bytes_of(moe: nn.MoE, rules: dict[str, Any], x: Any) -> dict[tuple[str, Any], int]:
    """The bytes of each kind of collective over mesh axes, in a gradient by weights and tokens."""
    with placed(moe, x, rules, "auto") as given:
        both = ft.jit(lambda moe, x: jax.grad(lambda *args: loss_of(*args), (0, 1))(moe, x))
        return dict(both.lower(*given).compile().ledger().totals())


def loss_of(moe: nn.MoE, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(moe(x)[0]))


def test_bytes_are_the_closed_form() -> None:
    # 4 shards of 256 tokens; 8 experts over 2, so that each has room for 1.25 * 2 * 256 / 8 = 80.
    rules = {"batch": BOTH, "experts": "expert"}
    x = np.ones((4, 256, 512), np.float32)
    row = 512 * 4
    exchange, gather = (
        nn.MoE(512, 8, 8, 2, capacity=1.25, dispatch=name, key=KEY)
        for name in ("exchange", "gather")
    )
    exchanged = bytes_of(exchange, rules, x)
    # Forward to the experts and back, and the gradients back and forth: rows of 8 experts each.
    assert exchanged["all-to-all", ("expert",)] == 4 * 8 * 80 * row
    gathered = bytes_of(gather, rules, x)
    # The tokens forward, with numbers and weights of two experts each; the gradients backward.
    numbers, router = 2 * 256 * 2 * (4 + 4), 512 * 8 * 4
    assert gathered["all-gather", ("expert",)] == 2 * 2 * 256 * row + numbers + router
    assert numbers + router < 0.05 * 2 * 2 * 256 * row
    # The sums of the tokens, and of their gradients and of those of their weights.
    assert gathered["reduce-scatter", ("expert",)] == 2 * 256 * row + 256 * 2 * 4
    for found in (exchanged, gathered):
        # The gradients of the experts, over `data`: once.
        weights = 3 * 4 * 512 * 8 * 4
        assert found["all-reduce", ("data",)] == weights
        assert not {kind for kind, axes in found if axes == ("model",)}


def test_nothing_moves_without_sharded_experts() -> None:
    moe = nn.MoE(8, 16, 4, 2, key=KEY)
    with placed(moe, np.ones((8, 4, 8), np.float32), {"batch": "data"}, "auto") as given:
        ledger = ft.jit(lambda moe, x: moe(x)[0]).lower(*given).compile().ledger()
    assert not ledger.collectives


# Which dispatch


@pytest.mark.parametrize(
    ("parts", "top_k", "capacity", "wanted"),
    [
        (4, 4, 1.25, "gather"),
        (4, 4, 1.0, "gather"),
        (8, 4, 1.25, "exchange"),
        (2, 1, 1.0, "exchange"),
        (8, 1, None, "gather"),
    ],
)
def test_auto(parts: int, top_k: int, capacity: float | None, wanted: str) -> None:
    mesh = ft.make_mesh(data=8 // parts, expert=parts)
    with jax.set_mesh(mesh):
        shards = Shards(("expert", None), experts=("expert",))
        assert chosen_dispatch("auto", shards, (8, 4, 2), top_k, capacity)[0] == wanted


def emulated(
    operand: Any, output: Any, starts: Any, sizes: Any, there: Any, received: Any, axes: Any
) -> Any:
    """`ragged_all_to_all` on any platform: all is gathered, and each takes what is sent to it."""
    given = [jax.lax.all_gather(one, axes) for one in (operand, starts, sizes, there)]
    own = jax.lax.axis_index(axes)
    row = jnp.arange(output.shape[0])
    for operands, start, size, place in zip(*given, strict=True):
        offset = row - place[own]
        is_sent = (offset >= 0) & (offset < size[own])
        rows = operands.at[offset + start[own]].get(mode="fill", fill_value=0)
        output = jnp.where(is_sent[:, None], rows, output)
    return output


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_the_ragged_exchange_on_an_emulated_collective(
    capacity: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "ragged_all_to_all", emulated)
    monkeypatch.setattr("functree.nn.moe.sharding.platform", lambda: "tpu")
    moe = layer("skewed", capacity=capacity, dispatch="ragged")
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    with jax.default_matmul_precision("highest"):
        with placed(moe, tokens_of("skewed"), LAYOUTS["EP, TP"], "auto") as given:
            found = gradient(*given)
    assert_as_oracle(found, expected("skewed", capacity, (4, 1)))


# What is refused


def test_a_dispatch_that_cannot_be_had() -> None:
    with placed(layer(dispatch="ragged"), X, LAYOUTS["EP"], "auto") as (moe, x):
        with raises(
            'dispatch="ragged"', "supported only on TPUs", "cpu", 'dispatch="auto"',
            error=ft.FunctreeError,
        ):  # fmt: skip
            moe(x)
    rules = {"experts": BOTH}
    with placed(layer(dispatch="exchange"), X[:1, :3], rules, "auto") as (moe, x):
        with raises(
            'dispatch="exchange"', "(1, 3)", "which have 4 devices", 'dispatch="gather"',
            error=ft.FunctreeError,
        ):  # fmt: skip
            moe(x)
    with placed(layer(), X[:1, :3], rules, "auto") as (moe, x):
        assert jax.jit(lambda: moe(x)[0])().shape == (1, 3, EMBED)  # "auto" gathers


REFUSED = {
    "too many": (dict(top_k=5), ["top_k=5", "there are only 4 experts"]),
    "dispatch": (
        dict(dispatch="all"),
        ["dispatch='all'", "'auto', 'gather', 'exchange', 'ragged'"],
    ),
    "dot_general": (
        dict(dot_general=jax.lax.dot_general),
        ["dot_general=", "which only a capacity ensures", "pass capacity="],
    ),
}


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(options: dict[str, Any], said: list[str]) -> None:
    given: dict[str, Any] = {"top_k": TOP_K, "key": KEY, **options}
    with raises("MoE: invalid arguments", *said, error=ft.FunctreeError):
        nn.MoE(EMBED, HIDDEN, EXPERTS, **given)


def test_configs_that_are_refused() -> None:
    with raises("top_k=None", "it must be a positive integer"):
        nn.Transformer.create(nn.TransformerConfig(16, 8, 2, 4, 2, 2, 16, experts=4), key=KEY)
    with raises(
        "TransformerConfig: invalid fields",
        "top_k=2",
        "it has no effect without `experts=`",
        "pass `experts=`",
    ):
        nn.TransformerConfig(16, 8, 2, 4, 2, 2, 16, top_k=2)


@pytest.mark.parametrize("capacity", [None, 1.5])
def test_derivatives_of_higher_order(capacity: float | None) -> None:
    moe = layer(capacity=capacity)

    def total(x: jax.Array) -> jax.Array:
        return (moe(x)[0] ** 2).sum()

    hessian = jax.jit(lambda x: jax.jvp(jax.grad(total), (x,), (x,))[1])(X)
    small = 1e-3 * X
    differences = (jax.grad(total)(X + small) - jax.grad(total)(X - small)) / 2e-3
    np.testing.assert_allclose(hessian, differences, rtol=0.05, atol=0.02 * np.abs(hessian).max())


def test_capacities() -> None:
    assert capacity_of(1.1, 1, 100, 10) == 11  # 11.000000000000002 in floating point
    assert capacity_of(0.01, 1, 8, 8) == 1 and capacity_of(100.0, 2, 8, 4) == 8
    assert capacity_of(1.25, 1, 10, 8) == 2 and capacity_of(1.25, 2, 10, 8) == 4  # rounded up


# In a model

CONFIG = nn.TransformerConfig(
    32, 8, 2, 4, 2, 2, 16, experts=4, top_k=2, expert_hidden=4, remat="dots"
)
TOKENS = RANDOM.integers(0, 32, (4, 9)).astype(np.int32)


def of_model(model: nn.Transformer, tokens: jax.Array) -> jax.Array:
    return nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:], balance=0.1, router_z=0.01)


@jax.jit
def with_losses(model: nn.Transformer, tokens: jax.Array) -> Any:
    return model.with_losses(tokens)


def test_a_model_with_experts() -> None:
    model = nn.Transformer.create(CONFIG, key=KEY)
    gradient = jax.jit(jax.value_and_grad(of_model))
    rules = {"batch": "data", "experts": "expert", "hidden": "model", "embed": "data"}
    with jax.default_matmul_precision("highest"):
        logits, losses = with_losses(model, TOKENS)
        plain = jax.jit(nn.cross_entropy)(model, TOKENS[:, :-1], TOKENS[:, 1:])
        wanted = gradient(model, TOKENS)
        assert_close(logits, jax.jit(lambda: model(TOKENS))(), 1e-6)
        of_loss = with_losses(model, TOKENS[:, :-1])[1]
        assert losses.balance >= 2 and losses.dropped == 0
        assert_close(wanted[0], plain + 0.1 * of_loss.balance + 0.01 * of_loss.z, 1e-6)
        with placed(model, np.zeros((8, 1, 1)), rules, "auto") as (sharded, _):
            found = gradient(sharded, jax.device_put(TOKENS, jax.P("data")))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(one, np.asarray(other), 1e-5)


def test_losses_of_tokens_in_another_order() -> None:
    """Every way to ask for the losses takes the order too."""
    model = nn.Transformer.create(CONFIG, key=KEY)
    tokens = TOKENS[:2, :8]
    moved, positions = nn.zigzag(tokens, 2)
    logits, losses = model.with_losses(tokens)
    found, of_moved = model.with_losses(moved, positions, in_order=False)
    assert_close(found, nn.zigzag(logits, 2)[0], 1e-5)
    assert_close(of_moved.balance, losses.balance, 1e-5)
    targets = nn.zigzag(TOKENS[:2, 1:9], 2)[0]
    wanted = nn.cross_entropy(model, tokens, TOKENS[:2, 1:9], balance=0.1)
    other = nn.cross_entropy(
        model, moved, targets, positions=positions, in_order=False, balance=0.1
    )
    assert_close(other, wanted, 1e-5)


def test_losses_of_a_pipeline_are_refused() -> None:
    config = dataclasses.replace(CONFIG, microbatches=2)
    model = nn.Transformer.create(config, key=KEY)
    rules = ft.AxisRules({"batch": "data", "layers": "pipe", ...: None})
    with jax.set_mesh(ft.make_mesh(pipe=2, data=4)), ft.axis_rules(rules):
        for call in (
            lambda: model.with_losses(TOKENS),
            lambda: nn.cross_entropy(model, TOKENS, TOKENS, router_z=0.1),
        ):
            with raises("layers can return only `x`", "losses"):
                call()


def test_losses_that_are_not_there() -> None:
    dense = nn.Transformer.create(nn.TransformerConfig(32, 8, 2, 4, 2, 2, 16), key=KEY)
    for call in (
        lambda: dense.with_losses(TOKENS),
        lambda: nn.cross_entropy(dense, TOKENS, TOKENS, balance=0.1),
    ):
        with raises(
            "the expert losses cannot be computed",
            "this layer has no experts",
            error=ft.FunctreeError,
        ):
            call()
