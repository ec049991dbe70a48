"""`ft.accumulate(keys=, carry=, gather=)`: what pieces get beside the batch, and what they hand
on."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jaxtyping import Float

import functree as ft
from tests.lib.checks import raises, warns

P = ft.P
STEPS = 4
KEY = jax.random.key(3)
W, X = jnp.ones(4), jax.random.normal(jax.random.key(0), (8, 4))
DROPOUT = ft.nn.Dropout(0.5)


def traced(fun: Callable[..., Any], *args: Any) -> None:
    """Trace a call, without running it."""
    jax.eval_shape(lambda: jax.tree.leaves(fun(*args)))


# Keys


def masked(w: Array, x: Array, key: Array) -> Array:
    """A loss whose gradient at `w[i]` is the mask of piece `i`: `x[:, i]` is 1 in this piece, and 0
    in the others."""
    return jnp.sum(jnp.einsum("bp,pbe->be", x, w) * DROPOUT(jnp.ones((2, 4)), key=key))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))])
def test_each_piece_has_a_mask_of_its_own(key: Any, jit: bool):
    x = jnp.tile(jnp.eye(STEPS), (2, 1))
    step = ft.accumulate(ft.grad(masked), STEPS, keys="key")
    found = (ft.jit(step) if jit else step)(jnp.zeros((STEPS, 2, 4)), x, key)
    keys = jax.random.split(key, STEPS)
    masks = [DROPOUT(jnp.ones((2, 4)), key=one) for one in keys]
    np.testing.assert_array_equal(STEPS * found, masks)
    assert len({mask.tobytes() for mask in map(np.asarray, masks)}) == STEPS


def test_keys_in_a_tree_and_by_keyword():
    def loss(w: Array, x: Array, *, rng: Any, **more: Any) -> Array:
        return jnp.sum(w) * jax.random.normal(rng["a"]) + jax.random.normal(more["other"])

    step = ft.accumulate(ft.value_and_grad(loss), STEPS, keys=("rng", "other"))
    other = jax.random.key(7)
    value, gradient = step(jnp.ones(1), X, rng={"a": KEY, "none": None}, other=other)
    first = jnp.mean(jax.vmap(jax.random.normal)(jax.random.split(KEY, STEPS)))
    second = jnp.mean(jax.vmap(jax.random.normal)(jax.random.split(other, STEPS)))
    np.testing.assert_allclose(gradient, [first], rtol=1e-6)
    np.testing.assert_allclose(value, first + second, rtol=1e-5)


@pytest.mark.parametrize("keys", [(), "key"])
def test_an_array_of_keys_is_batch(keys: Any):
    def loss(w: Array, x: Array, key: Array) -> Array:
        return jnp.mean(jax.vmap(lambda x, key: jax.random.normal(key) * x @ w)(x, key))

    each = jax.random.split(KEY, 8)
    gradient = ft.grad(loss)
    for one in (each, jax.random.key_data(each)):
        found = ft.accumulate(gradient, STEPS, keys=keys)(W, X, one)
        np.testing.assert_allclose(found, gradient(W, X, one), rtol=1e-5)


def test_no_key_at_all():
    def loss(w: Array, x: Array, key: Array | None = None) -> Array:
        return jnp.mean(DROPOUT(x * w[None], key=key, inference=key is None))

    found = ft.accumulate(ft.grad(loss), STEPS, keys="key")(W, X)
    np.testing.assert_allclose(found, ft.grad(loss)(W, X), rtol=1e-5)


# A key that is the same in each piece


def dropped(x: Array, key: Array) -> Array:
    return jnp.mean(DROPOUT(x, key=key))


def in_layers(x: Array, key: Array) -> Array:
    keys = jax.random.split(key, 3)
    return jnp.mean(jax.lax.scan(lambda x, key: (DROPOUT(x, key=key), None), x, keys)[0])


def in_turn(x: Array, key: Array) -> Array:
    """A loop that hands its key on."""

    def run(i: Array, carry: Any) -> Any:
        x, key = carry
        key, own = jax.random.split(key)
        return DROPOUT(x, key=own), key

    return jnp.mean(jax.lax.fori_loop(0, 3, run, (x, key))[0])


def sometimes(x: Array, key: Array) -> Array:
    return jax.lax.cond(x[0, 0] > 0, lambda: dropped(x, key), lambda: jnp.mean(x))


# A loss of `(model, x, key)`, in which the key comes from somewhere, and where that is by the text.
SAME: dict[str, tuple[Callable[[Any, Array, Array], Array], str]] = {
    "closed over": (lambda m, x, key: dropped(m["w"] * x, KEY), "a key that"),
    "made": (lambda m, x, key: dropped(m["w"] * x, jax.random.key(5)), "makes of a constant"),
    "in the model": (lambda m, x, key: dropped(m["w"] * x, m["key"]), "`m.key`"),
    "folded": (lambda m, x, key: dropped(m["w"] * x, jax.random.fold_in(m["key"], 1)), "`m.key`"),
    "raw": (
        lambda m, x, key: dropped(m["w"] * x, jax.random.key_data(m["key"])), "`m.key`",
    ),
    "in layers": (lambda m, x, key: in_layers(m["w"] * x, m["key"]), "`m.key`"),
    "in turn": (lambda m, x, key: in_turn(m["w"] * x, m["key"]), "`m.key`"),
    "sometimes": (lambda m, x, key: sometimes(m["w"] * x, m["key"]), "`m.key`"),
    "recomputed": (
        lambda m, x, key: jax.checkpoint(dropped)(m["w"] * x, m["key"]), "`m.key`",
    ),
    "jitted": (lambda m, x, key: ft.jit(dropped)(m["w"] * x, m["key"]), "`m.key`"),
    "one of two": (
        lambda m, x, key: dropped(m["w"] * x, key) + dropped(m["w"] * x, m["key"]), "`m.key`",
    ),
}  # fmt: skip
DIFFERENT: dict[str, Callable[[Any, Array, Array], Array]] = {
    "split": lambda m, x, key: dropped(m["w"] * x, key),
    "split in layers": lambda m, x, key: in_layers(m["w"] * x, key),
    "split in turn": lambda m, x, key: in_turn(m["w"] * x, key),
    "folded with an example": lambda m, x, key: dropped(
        m["w"] * x, jax.random.fold_in(m["key"], jnp.int32(1000 * x[0, 0]))
    ),
    "folded with the split one": lambda m, x, key: dropped(
        m["w"] * x, jax.random.fold_in(m["key"], jax.random.bits(key))
    ),
    "not drawn from": lambda m, x, key: (
        jnp.mean(m["w"] * x)
        + 0 * jnp.float32(jax.random.key_data(jax.random.split(m["key"])[0])[0])
    ),
    "without random numbers": lambda m, x, key: jnp.mean(m["w"] * x),
}


def run_pieces(loss: Callable[[Any, Array, Array], Array], steps: int = STEPS) -> None:
    def named(m: Any, x: Array, key: Array) -> Array:
        return loss(m, x, key)

    model = {"w": jnp.ones((1, 4)), "key": jax.random.key(1)}
    traced(ft.accumulate(ft.grad(named, wrt="w"), steps, keys="key"), model, X, KEY)


@pytest.mark.parametrize("name", SAME)
def test_a_key_that_all_pieces_share(name: str):
    loss, where = SAME[name]
    with pytest.warns(ft.FunctreeWarning) as caught:
        run_pieces(loss)
    (text,) = [str(one.message) for one in caught]
    for fragment in (
        "accumulate: all 4 pieces draw the same random numbers from ",
        where,
        "pass the key as an argument of",
        '`ft.accumulate(..., 4, keys="key")`',
        'silence this: `warnings.filterwarnings("ignore", "accumulate: all", ft.FunctreeWarning)`',
    ):
        assert fragment in text
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", DIFFERENT)
def test_keys_that_differ_from_piece_to_piece(name: str):
    run_pieces(DIFFERENT[name])  # a warning is an error here


def test_the_warning_can_be_silenced_and_one_piece_has_none():
    loss, _ = SAME["closed over"]
    run_pieces(loss, steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "accumulate: all", ft.FunctreeWarning)
        run_pieces(loss)


# What is carried


NORM, STATE = ft.make_state(ft.nn.BatchNorm(4, momentum=0.9))


def of_norm(layer: Any, state: Any, x: Array) -> tuple[Array, Any]:
    y, state = layer(x, state)
    return jnp.mean(jnp.tanh(y) ** 3), state


def unknown_gradient(layer: Any, state: Any, x: Array) -> Any:
    """A function of which it is not known what it returns."""
    return ft.grad(of_norm, has_aux=True)(layer, state, x)


def separate(fn: Callable[..., Any], model: Any, state: Any, *more: Any) -> tuple[Any, Any]:
    """The mean gradient of separate steps, and the last state."""
    gradients = []
    for i in range(STEPS):
        gradient, state = fn(model, state, X[i::STEPS], *[one[i] for one in more])
        gradients.append(gradient)
    return jax.tree.map(lambda *each: sum(each) / STEPS, *gradients), state


def assert_close(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_running_statistics_are_those_of_separate_steps():
    gradient, state = separate(ft.grad(of_norm, has_aux=True), NORM, STATE)
    for step in (
        ft.accumulate(ft.grad(of_norm, has_aux=True), STEPS, carry="state"),
        ft.accumulate(unknown_gradient, STEPS, carry=("state",)),
        ft.jit(ft.accumulate(ft.grad(of_norm, has_aux=True), STEPS, carry=["state"])),
    ):
        assert_close(step(NORM, STATE, X), (gradient, state))
    (value, found), _ = ft.accumulate(
        ft.value_and_grad(of_norm, has_aux=True), STEPS, carry="state"
    )(NORM, STATE, X)
    assert_close(found, state)
    assert value.shape == ()
    assert not np.allclose(state[NORM.mean], STATE[NORM.mean])


@pytest.mark.filterwarnings("ignore:accumulate. gradients may:functree.FunctreeWarning")
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_running_statistics_on_a_mesh(explicit: bool):
    mesh = ft.make_mesh(data=2, explicit=explicit)
    step = ft.accumulate(ft.grad(of_norm, has_aux=True, layout=P()), STEPS, carry="state")
    norm, state = ft.shard((NORM, STATE), P(), mesh)
    x = ft.shard(X, P("data"), mesh)
    found = ft.jit(step, rules=ft.AxisRules({"batch": "data", ...: None}))(norm, state, x)
    assert_close(found, separate(ft.grad(of_norm, has_aux=True), NORM, STATE))


class Net(eqx.Module):
    """Equinox' own layers, with state and dropout."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key: Array):
        self.linear = eqx.nn.Linear(4, 3, key=key)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x: Array, state: Any, key: Array) -> Any:
        x, state = self.norm(self.linear(x), state)
        return self.dropout(x, key=key), state


def test_equinox_layers_with_a_key():
    def loss(net: Net, state: Any, x: Array, key: Array) -> Any:
        mapped = jax.vmap(net, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))
        y, state = mapped(x, state, key)
        return jnp.mean(y**2), state

    net, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    fn = ft.grad(loss, has_aux=True)
    found = ft.jit(ft.accumulate(fn, STEPS, keys="key", carry="state"))(net, state, X, KEY)
    assert_close(found, separate(ft.jit(fn), net, state, jax.random.split(KEY, STEPS)))


def test_several_carried_beside_other_aux():
    def loss(w: Array, x: Array, count: Array, seen: Any, key: Array) -> Any:
        carried = (count + 1, {"sum": seen["sum"] + x.sum(), "text": "seen"})
        return jnp.mean(w * x), ({"norm": jnp.abs(x).mean(), "draw": jax.random.bits(key)}, carried)

    step = ft.accumulate(
        ft.value_and_grad(loss, has_aux=True), STEPS, carry=("count", "seen"), keys="key"
    )
    # 0 has a weak type, and 1 as well.
    (_, (aux, (count, seen))), _ = step(
        jnp.ones((1, 4)), X, jnp.asarray(0), {"sum": 0 * X.sum(), "text": "seen"}, KEY
    )
    assert count == STEPS and seen["text"] == "seen"
    np.testing.assert_allclose(seen["sum"], X.sum(), rtol=1e-5)
    np.testing.assert_allclose(aux["norm"], jnp.abs(X).mean(), rtol=1e-5)
    assert aux["draw"] == jax.random.bits(jax.random.split(KEY, STEPS)[-1])


def test_a_carried_key_is_handed_on():
    def loss(w: Array, x: Array, key: Array) -> Any:
        key, own = jax.random.split(key)
        return jnp.sum(w) * jax.random.normal(own), key

    gradient, last = ft.accumulate(ft.grad(loss, has_aux=True), 2, carry="key")(W, X, KEY)
    after, first = jax.random.split(KEY)
    end, second = jax.random.split(after)
    mean = (jax.random.normal(first) + jax.random.normal(second)) / 2
    np.testing.assert_allclose(gradient, jnp.full(4, mean), rtol=1e-6)
    assert last == end


def test_carried_in_shard_map_what_differs_between_shards():
    def loss(w: Array, x: Array, total: Array) -> Any:
        return jax.lax.pmean(jnp.mean(w * x), "data"), total + x.sum()

    def local(w: Array, x: Array) -> Array:
        step = ft.accumulate(ft.grad(loss, has_aux=True), 2, carry="total")
        return step(w, x, jnp.zeros(()))[1][None]

    mesh = ft.make_mesh(data=2)
    mapped = ft.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    np.testing.assert_allclose(mapped(jnp.ones((1, 4)), X), [X[:4].sum(), X[4:].sum()], rtol=1e-5)


def test_arguments_of_partials():
    def loss(w: Array, x: Array, scale: Array) -> Array:
        return jnp.mean(w * x) * jnp.mean(scale)

    bound = functools.partial(ft.grad(loss), scale=jnp.float32(3))
    whole = ft.grad(loss)(W[None], X, 3.0)
    assert_close(ft.accumulate(bound, STEPS)(W[None], X), whole)
    # One that a call gives again is a part of the batch, as without the partial.
    found = ft.accumulate(bound, STEPS)(W[None], X, scale=jnp.full(8, 6.0))
    assert_close(found, 2 * whole)


# Parameters that are gathered once


class Matrix(eqx.Module):
    weight: Float[Array, "embed hidden"]


def of_matrix(model: Matrix, x: Float[Array, "batch embed"]) -> Array:
    return jnp.mean(jnp.tanh(x @ model.weight) ** 2)


def without_axes(model: Matrix, x: Array) -> Array:
    return of_matrix(model, x)


RULES = ft.AxisRules({"batch": "data", ...: None})
FSDP = RULES | ft.FSDP("data", min_size=0)
MATRIX = Matrix(jax.random.normal(jax.random.key(1), (4, 8)))
# The loss, the layout of its gradient, and the ambient one: whatever says where parameters and batch
# are.
KNOWN: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "all by the ambient rules": (of_matrix, None, FSDP),
    "a layout for the gradient": (of_matrix, ft.FSDP("data", min_size=0), RULES),
    "the batch by FSDP": (without_axes, FSDP, None),
    "the batch by FSDP among filters": (
        without_axes, ft.StateSharding({"weight": ft.FSDP("data", min_size=0), ...: P()}), None,
    ),
    "specs and annotations": (of_matrix, P("data"), RULES),
}  # fmt: skip


def lowered(fn: Callable[..., Any], layout: Any, rules: Any, gather: str, mesh: Any) -> Any:
    step = ft.accumulate(ft.value_and_grad(fn, layout=layout), 2, gather=gather)  # pyright: ignore
    x = jax.random.normal(jax.random.key(2), (16, 4))
    placed = ft.shard((MATRIX, x), (ft.FSDP("data", min_size=0), P("data")), mesh)
    compiled = ft.jit(step, rules=rules, mesh=mesh).lower(*placed).compile()
    return compiled, compiled(*placed)


@pytest.mark.parametrize("name", KNOWN)
def test_gathered_once(name: str):
    mesh = ft.make_mesh(data=4)
    fn, layout, rules = KNOWN[name]
    compiled, found = lowered(fn, layout, rules, "once", mesh)
    _, each = lowered(fn, layout, rules, "each", mesh)
    assert_close(found, each)
    moved = {
        (one.kind, one.count, str(one.path), one.phase) for one in compiled.ledger().collectives
    }
    assert moved == {
        ("all-gather", 1, "weight", "forward"),
        ("reduce-scatter", 1, "weight", "backward"),
        ("all-reduce", 1, "None", "forward"),  # the loss
    }


UNKNOWN: dict[str, tuple[Callable[..., Any], Any, Any, tuple[str, ...]]] = {
    "where the parameters are": (
        of_matrix, None, None,
        (
            "how the parameters are sharded on mesh", "(data=4)", "pass `layout=` to the gradient function, or use rules",
        ),
    ),
    "where the batch is": (
        without_axes, P("data"), None,
        (
            "over which mesh axes the batch (x) is sharded on mesh", "(data=4)", 'annotate its leading dimension (`x: Float[Array, "batch ..."]`)',
            "write a rule for this axis (`None` where it is not sharded), or use `ft.FSDP` in the",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_must_be_known_to_sum_once(name: str):
    fn, layout, rules, fragments = UNKNOWN[name]
    mesh = ft.make_mesh(data=4)
    start = 'accumulate: gather="once" does not know'
    with raises(f"{start} {fragments[0]}", *fragments[1:], error=ft.ShardingError):
        lowered(fn, layout, rules, "once", mesh)
    start = "accumulate: gradients may be summed over devices in each of the 2 pieces, since it is"
    with warns(f"{start} not known {fragments[0]}", *fragments[1:]):
        lowered(fn, layout, rules, "each", mesh)
    # Without a mesh there is nothing to gather, and arrays with values say where they are.
    step = ft.accumulate(ft.grad(fn, layout=layout), 2, gather="once")
    traced(step, MATRIX, X)
    placed = ft.shard((MATRIX, X), (P("data"), P("data")), mesh)
    assert_close(step(*placed), ft.grad(fn)(MATRIX, X))


# Misuse


def _loss(model: Array, x: Array, state: Any, key: Any = None) -> Any:
    return jnp.mean(model * x), state


GRADIENT = ft.grad(_loss, has_aux=True)
NAMES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "unknown": (
        lambda: ft.accumulate(GRADIENT, 2, keys=("kye",), carry="stat"),
        (
            "accumulate: parameters cannot be named so",
            "keys='kye'", "_loss has no such parameter; did you mean `key`?",
            "carry='stat'", "did you mean `state`?",
            "Try: name one of its parameters: model, x, state, key",
        ),
    ),
    "the model": (
        lambda: ft.accumulate(GRADIENT, 2, carry="model"),
        ("carry='model'", "is the model, which is the same in each piece"),
    ),
    "twice": (
        lambda: ft.accumulate(GRADIENT, 2, keys=["key", "key"]), ("keys='key'", "is named twice"),
    ),
    "in both": (
        lambda: ft.accumulate(GRADIENT, 2, keys="key", carry="key"),
        ("`key`", "is in `keys` and in `carry`: a key that is carried is not split"),
    ),
    "bound": (
        lambda: ft.accumulate(functools.partial(ft.grad(lambda key, m, x: 0.0), KEY), 2, keys="key"),
        ("keys='key'", "is bound to", "leave it out of the `functools.partial`"),
    ),
    "no names": (
        lambda: ft.accumulate(GRADIENT, 2, keys=3),  # pyright: ignore
        ("keys=3", "it must be the name of a parameter, or several in a tuple"),
    ),
    "gather": (
        lambda: ft.accumulate(GRADIENT, 2, gather="twice"),  # pyright: ignore
        ("gather='twice'", 'it must be "each" or "once"'),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str):
    make, fragments = NAMES[name]
    with raises(*fragments):
        make()


NO_KEYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a number": (3, ("key   3", "is no random key")),
    "an array": (jnp.ones(2), ("key   f32[2]", "is no random key")),
    "words of another size": (jnp.zeros(3, jnp.uint32), ("key   u32[3]", "is no random key")),
    "a few keys": (
        jax.random.split(KEY, 2),
        (
            "key   key<fry>[2]", "is an array of 2 keys, and the batch has the size 8",
            "pass one key, which is split, or one for each example",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_KEYS)
def test_what_is_no_key(name: str):
    key, fragments = NO_KEYS[name]
    step = ft.accumulate(ft.grad(lambda w, x, key: jnp.mean(w * x)), STEPS, keys="key")
    with raises("accumulate: 1 value in `keys` cannot be split", *fragments):
        step(W, X, key)


def _carries(next_value: Callable[[Any], Any], **options: Any) -> Callable[..., Any]:
    def _step(w: Array, x: Array, state: Any) -> Any:
        value = jnp.mean(w[None] * x)
        return (value, next_value(state)) if options.get("has_aux", True) else value

    return ft.accumulate(ft.grad(_step, **{"has_aux": True, **options}), 2, carry="state")


NOT_CARRIED: dict[str, tuple[Callable[..., Any], Any, tuple[str, ...]]] = {
    "no aux": (
        _carries(lambda s: s, has_aux=False), W,
        ("returns no next value of `state`: return it as aux, and write `has_aux=True`",),
    ),
    "another dtype": (
        _carries(lambda s: {"mean": s["mean"].astype(jnp.bfloat16)}), {"mean": W},
        (
            "accumulate: 1 array in `carry` would change from piece to piece",
            "state.mean   f32[4]", "is f32[4] in the first piece, and bf16[4] in the next",
            "Try: return it with the shape and dtype that it had",
        ),
    ),
    "another shape": (
        _carries(lambda s: s[None]), W, ("is f32[4] in the first piece, and f32[1, 4] in the next",),
    ),
    "another structure": (
        _carries(lambda s: (s,)), W,
        (
            "does not return the next value of `state` as its aux",
            "aux: a tuple of 1", "has another structure than `state`",
            "Try: return the next value as aux, or `(aux, it)`",
        ),
    ),
    "a static number": (
        _carries(lambda s: {**s, "n": s["n"] + 1}), {"n": 0, "a": W},
        ("`state` has the static value 0, and the next one 1: make it an array",),
    ),
    "nothing": (_carries(lambda s: None), W, ("aux: NoneType", "has another structure")),
    "not in the result of others": (
        ft.accumulate(jax.value_and_grad(lambda w, x, state: jnp.mean(x @ w)), 2, carry="state"), W,
        ("does not return the next value of `state` as its aux", "it returns a tuple of 2"),
    ),
    "several": (
        ft.accumulate(
            ft.grad(lambda w, x, a, b: (jnp.mean(x @ w), a), has_aux=True), 2, carry=("a", "b")
        ),
        (W, W),
        ("does not return a tuple of 2 next values of `a`, `b` as its aux",),
    ),
}  # fmt: skip


def test_names_of_keyword_arguments_that_are_not_passed():
    step = ft.accumulate(lambda *args, **more: args[0], 2, keys="key", carry="state")
    with raises(
        "accumulate: 2 keyword arguments cannot be found",
        "more.key", "is in `keys`, and the call passes no argument by this name",
        "more.state", "is in `carry`", "Try: pass it by its name",
    ):  # fmt: skip
        step(W, X, KEY)


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_what_is_not_carried(name: str):
    step, state, fragments = NOT_CARRIED[name]
    with raises(*fragments):
        traced(step, W, X, *state) if name == "several" else traced(step, W, X, state)


def test_carried_with_another_sharding():
    mesh = ft.make_mesh(data=4, explicit=True)

    def loss(w: Array, x: Array, state: Array) -> Any:
        return jnp.mean(x @ w), jax.sharding.reshard(state, P("data"))

    step = ft.accumulate(ft.grad(loss, has_aux=True), 2, carry="state")
    placed = ft.shard((W, X, W), P(), mesh)
    with raises("is f32[4] P(None) in the first piece, and f32[4] P('data') in the next"):
        ft.jit(step, mesh=mesh)(*placed)
