"""Pipelines of stages: against the layers in float64, and as a scan that is not sharded."""

import dataclasses
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import functree as ft
from functree.errors import FunctreeValueError
from tests.lib.checks import raises
from tests.lib.covering import selected_cells

DEPTH, BATCH, EMBED, HIDDEN = 4, 32, 8, 16
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(BATCH, EMBED))
SCALES = RANDOM.uniform(0.5, 2, size=BATCH)
NAMES = {"batch": "data", "layers": "pipe", ...: None}
TENSOR = ft.AxisRules({"hidden": "model", **NAMES})
LAYOUTS: dict[str, tuple[ft.Layout, str]] = {
    "data": (ft.AxisRules(NAMES), "data"),
    "FSDP": (ft.AxisRules(NAMES) | ft.FSDP("data", min_size=0), "data"),
    "TP": (TENSOR, "model"),
    "FSDP + TP": (TENSOR | ft.FSDP("data", min_size=0), "model"),
}


class Layer(eqx.Module):
    up: ft.nn.Linear
    down: ft.nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key)
        self.up = ft.nn.Linear(EMBED, HIDDEN, axes="embed hidden", use_bias=False, key=keys[0])
        self.down = ft.nn.Linear(HIDDEN, EMBED, axes="hidden embed", use_bias=False, key=keys[1])

    def __call__(self, x: Any, scales: Any, shift: Any, name: str) -> Any:
        assert name == "a text"
        shift = jnp.broadcast_to(shift, x.shape)
        return x + self.down(jnp.tanh(self.up(x) + 0.5)) * scales[:, None] + shift


LAYERS = ft.stack(Layer, DEPTH, jax.random.key(0))


def oracle() -> Any:
    """The sum of squares behind all layers in float64, and its gradients."""
    up, down = (np.asarray(x, np.float64) for x in jax.tree.leaves(LAYERS))
    xs, scales = [X], SCALES[:, None]
    inner = []
    for i in range(DEPTH):
        inner.append(np.tanh(xs[-1] @ up[i] + 0.5))
        xs.append(xs[-1] + inner[-1] @ down[i] * scales + 0.25)
    g, d_up, d_down = 2 * xs[-1], np.zeros_like(up), np.zeros_like(down)
    for i in reversed(range(DEPTH)):
        d_down[i] = inner[i].T @ (g * scales)
        d_inner = (g * scales) @ down[i].T * (1 - inner[i] ** 2)
        d_up[i] = xs[i].T @ d_inner
        g = g + d_inner @ up[i].T
    return (xs[-1] ** 2).sum(), (d_up, d_down, g)


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=tolerance, atol=tolerance)


def loss(given: Any, scales: Any, pieces: int | None, remat: Any) -> Any:
    layers, x = given
    x = ft.constrain(x, "batch embed") if pieces else x
    # By name, with a text and a scalar among what is shared.
    shift = jnp.float32(0.25)
    y = layers.scan(x, scales, shift, "a text", remat=remat, microbatches=pieces, divided=(0,))
    return (y**2).sum()


CELLS = list(itertools.product((2, 4), (1, 2, 4, 8, 16), LAYOUTS, (None, "full"), (False, True)))


def possible(cell: Any) -> bool:
    stages, pieces, layout, _, _ = cell
    data = 8 // stages if LAYOUTS[layout][1] == "data" else 8 // stages // 2
    return BATCH % (pieces * max(data, 1)) == 0


@pytest.mark.parametrize(
    ("stages", "pieces", "layout", "remat", "explicit"),
    selected_cells([cell for cell in CELLS if possible(cell)]),
)
def test_against_the_oracle(
    stages: int, pieces: int, layout: str, remat: Any, explicit: bool
) -> None:
    rules, axis = LAYOUTS[layout]
    sizes = {"pipe": stages, "data": 8 // stages, "model": 1}
    if axis == "model":
        sizes = {"pipe": stages, "data": 8 // stages // 2, "model": 2}
    mesh = ft.make_mesh(**sizes, explicit=explicit)
    with jax.set_mesh(mesh):
        given = (
            ft.shard(LAYERS, rules),
            ft.shard(jnp.asarray(X, jnp.float32), rules, axes="batch _"),
        )
        scales = ft.shard(jnp.asarray(SCALES, jnp.float32), rules, axes="batch")
        gradient = ft.jit(jax.value_and_grad(loss), rules=rules)
        found = gradient(given, scales, pieces, remat)
    assert_close(found, oracle())


def test_unsharded_it_is_a_scan() -> None:
    given, scales = (LAYERS, jnp.asarray(X, jnp.float32)), jnp.asarray(SCALES, jnp.float32)
    scanned = jax.make_jaxpr(lambda x: loss(x, scales, None, None))(given)
    in_pieces = jax.make_jaxpr(lambda x: loss(x, scales, 4, None))(given)
    assert str(scanned) == str(in_pieces)


@pytest.mark.parametrize("pieces", [2, 8])
def test_what_is_moved(pieces: int) -> None:
    rules, mesh = ft.AxisRules(NAMES), ft.make_mesh(pipe=4, data=2)

    def of_layers(layers: Any, x: Float[Array, "batch _"], scales: Float[Array, "batch"]) -> Any:
        return loss((layers, x), scales, pieces, "full")

    layers = ft.abstract(lambda: LAYERS, rules, mesh)()
    x = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32)
    scales = jax.ShapeDtypeStruct((BATCH,), jnp.float32)
    step = ft.jit(ft.value_and_grad(of_layers), mesh=mesh, rules=rules)
    totals = step.lower(layers, x, scales).compile().ledger().totals()
    ticks, piece = pieces + 3, BATCH // 2 // pieces * EMBED * 4
    # Of a stage: one layer.
    weights = 2 * EMBED * HIDDEN * 4
    assert totals == {
        ("collective-permute", ("pipe",)): 2 * ticks * piece,  # forward and backward
        ("all-reduce", ("pipe",)): pieces * piece,  # the results of the last stage
        ("all-reduce", ("data",)): weights + 4,  # the gradients, in whatever pieces, and the loss
    }


class Noisy(eqx.Module):
    scale: Float[Array, "embed"]

    def __call__(self, x: Any, key: Any) -> Any:
        return x * self.scale[None] + jax.random.normal(key, x.shape)


def test_keys_are_split_by_piece() -> None:
    layers = ft.Stacked(Noisy(jnp.full((2, EMBED), 0.5)))
    keys, x = jax.random.split(jax.random.key(1)), jnp.asarray(X, jnp.float32)
    rules, mesh = (
        ft.AxisRules({"layers": "pipe", ...: None}),
        ft.make_mesh(pipe=2, devices=jax.devices()[:2]),
    )
    run = ft.jit(lambda layers, x, keys: layers.scan(x, each={"key": keys}, microbatches=4))
    with jax.set_mesh(mesh), ft.axis_rules(rules):
        placed = ft.shard(keys, ft.P("pipe")), ft.shard(x, ft.P())
        found = run(ft.shard(layers, rules), placed[1], placed[0])
    for piece in range(4):
        rows = x[piece::4]
        for i in range(2):
            rows = rows * 0.5 + jax.random.normal(jax.random.split(keys[i], 4)[piece], rows.shape)
        np.testing.assert_allclose(found[piece::4], rows, rtol=1e-6)


CONFIG = ft.nn.TransformerConfig(64, 16, 4, 4, 2, 4, 32, remat="full")


def test_a_model_with_all_of_it() -> None:
    """Two stages, two parts of the sequence, and two of the heads; positions are not split as the
    batch, which has as many rows as a sequence has tokens."""
    text = jnp.asarray(RANDOM.integers(0, 64, (16, 17)))
    model = ft.nn.Transformer.create(CONFIG, key=jax.random.key(0))

    def of_model(model: Any, tokens: Any) -> Any:
        return ft.nn.cross_entropy(
            model, tokens[:, :-1], tokens[:, 1:], positions=jnp.arange(16), chunk=8
        )

    expected = jax.jit(jax.value_and_grad(of_model))(model, text)
    tensor = {name: "model" for name in ("heads", "kv_heads", "hidden", "vocab")}
    rules = ft.AxisRules({"layers": "pipe", "seq": "context", **tensor, ...: None})
    with jax.set_mesh(ft.make_mesh(pipe=2, context=2, model=2)):
        placed = ft.shard(dataclasses.replace(model, microbatches=2), rules)
        tokens = ft.shard(text, ft.P())
        found = ft.jit(ft.value_and_grad(of_model), rules=rules)(placed, tokens)
    assert_close(found, expected, 1e-5)


def scanned(rules: Any, sizes: Any, batch: int = BATCH, **options: Any) -> Any:
    x, scales = jnp.ones((batch, EMBED)), jnp.ones(batch)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    with jax.set_mesh(ft.make_mesh(**sizes, devices=devices)), ft.axis_rules(rules):
        options = {"divided": (0,), **options}
        fun = lambda layers, x: layers.scan(x, scales, 0.0, "a text", **options)  # noqa: E731
        return jax.eval_shape(fun, LAYERS, x)


@pytest.mark.parametrize("sizes", [{"pipe": 2, "one": 1}, {"pipe": 1, "one": 1}])
def test_explicit_axes_of_one_device(sizes: dict[str, int]) -> None:
    """A stage's weights are sharded over one, and so is a stack that is scanned: JAX refuses it."""
    devices = jax.devices()[: sizes["pipe"]]
    rules = ft.AxisRules({"layers": "pipe", "hidden": "one", ...: None})
    x, scales = jnp.asarray(X, jnp.float32), jnp.asarray(SCALES, jnp.float32)
    with jax.set_mesh(ft.make_mesh(**sizes, devices=devices, explicit=True)):
        given = ft.shard(LAYERS, rules), ft.shard(x, ft.P())
        gradient = ft.jit(jax.value_and_grad(loss), rules=rules)
        found = gradient(given, ft.shard(scales, ft.P()), 2, None)
    assert_close(found, oracle())


class Scaled(eqx.Module):
    """A layer with an array that all micro-batches share."""

    weight: Float[Array, "embed out"]

    def __call__(self, x: Any, table: Any) -> Any:
        return x + jnp.tanh(x @ self.weight) * table.sum(0, keepdims=True)


def test_what_is_divided_is_said_and_not_told_by_its_size() -> None:
    """An array with the size of the batch, and one of a micro-batch; a batch as large as a feature."""
    size = 8
    layers = ft.stack(
        lambda key: Scaled(jax.random.normal(key, (size, size)) / 3), 4, jax.random.key(0)
    )
    x, table = jax.random.normal(jax.random.key(1), (size, size)), jnp.linspace(0, 1, size * size)
    table = table.reshape(size, size)
    rules = ft.AxisRules({"layers": "pipe", "batch": "data", ...: None})
    with jax.set_mesh(ft.make_mesh(pipe=4, data=2)), ft.axis_rules(rules):
        placed = ft.shard(layers, rules)
        x, table = ft.shard((x, table), (ft.P("data"), ft.P()))
        found = ft.jit(lambda layers, x, t: layers.scan(x, t, microbatches=2))(placed, x, table)
        with raises(
            "Stacked.scan: arrays cannot be divided into micro-batches",
            "args.0   f32[4, 8]", "does not have a leading dimension of size 8",
            error=FunctreeValueError,
        ):  # fmt: skip
            ft.jit(lambda layers, x, t: layers.scan(x, t[:4], microbatches=2, divided=0))(
                placed, x, table
            )
    wanted = layers(np.asarray(x), np.asarray(table))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


BY_STAGE = ft.AxisRules(NAMES)
BOTH = ft.AxisRules({"batch": "pipe", "layers": "pipe", ...: None})
# The rules, the mesh, the options, and the error.
REFUSED: dict[str, tuple[Any, dict[str, int], dict[str, Any], tuple[str, ...]]] = {
    "no micro-batches": (
        BY_STAGE, {"pipe": 4, "data": 2}, {},
        ('Stacked.scan: the stack\'s axis "layers" is sharded over pipe', "gather the whole stack",
         "pass `microbatches=` to run the layers as a pipeline of 4 stages"),
    ),
    "a batch that is not divided": (
        BY_STAGE, {"pipe": 4, "data": 2}, {"microbatches": 3},
        ("Stacked.scan: microbatches=3: a batch of 32 cannot be divided equally on each of 2 devices",
         "use a batch whose size is a multiple of 6"),
    ),
    "layers that are not divided": (
        BY_STAGE, {"pipe": 8, "data": 1}, {"microbatches": 2},
        ("4 layers cannot be divided into 8 stages over pipe", "use a number of layers that is a multiple of 8"),
    ),
    "more than x": (
        BY_STAGE, {"pipe": 4, "data": 2}, {"microbatches": 2, "collect": True},
        ("Stacked.scan: with `microbatches=`, layers can return only `x`",
         "would each cover only one micro-batch",
         'leave the axis "layers" unsharded, or remove `collect=True`'),
    ),
    "one mesh axis for both": (
        BOTH, {"pipe": 4}, {"microbatches": 2},
        ("Stacked.scan: the mesh axis `pipe` shards both the batch and the stack", "over different mesh axes"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_messages(case: str) -> None:
    rules, sizes, options, told = REFUSED[case]
    with raises(*told, error=FunctreeValueError):
        scanned(rules, sizes, **options)


def test_what_is_no_position() -> None:
    """Even where nothing is sharded."""
    layers = ft.stack(lambda key: ft.nn.MLP(8, 8, key=key), 2, jax.random.key(0))
    for divided in (4, (0, -1), "0"):
        with raises("divided=", error=FunctreeValueError):
            layers.scan(jnp.ones((4, 8)), divided=divided)  # pyright: ignore


def test_a_cache_is_for_no_pipeline() -> None:
    model = ft.nn.Transformer.create(CONFIG, key=jax.random.key(0))
    model = dataclasses.replace(model, microbatches=2)
    with jax.set_mesh(ft.make_mesh(pipe=4, data=2)), ft.axis_rules(BY_STAGE):
        with raises("a cache", "collect=True", error=FunctreeValueError):
            ft.nn.generate(ft.shard(model, BY_STAGE), jnp.ones((4, 4), int), 2)


def test_rules_for_activations_alone_say_nothing_of_a_stack() -> None:
    rules = ft.AxisRules({"batch": "data", "embed": None, "hidden": None})
    assert scanned(rules, {"data": 2}).shape == (BATCH, EMBED)


def test_a_stack_that_is_sharded_by_its_type() -> None:
    mesh = ft.make_mesh(pipe=4, data=2, explicit=True)
    with jax.set_mesh(mesh):
        layers = ft.shard(LAYERS, ft.AxisRules(NAMES))
        x, scales = ft.shard((jnp.ones((BATCH, EMBED)), jnp.ones(BATCH)), ft.P("data"))

        def fun(layers: Any, x: Any, n: int | None) -> Any:
            return layers.scan(x, scales, 0.0, "a text", microbatches=n, divided=(0,))

        with raises('"layers" is sharded over pipe', "`microbatches=`"):
            jax.jit(fun, static_argnums=2)(layers, x, None)
        found = jax.jit(fun, static_argnums=2)(layers, x, 4)
    expected = LAYERS.scan(jnp.ones((BATCH, EMBED)), jnp.ones(BATCH), 0.0, "a text")
    np.testing.assert_allclose(found, expected, rtol=1e-5)
