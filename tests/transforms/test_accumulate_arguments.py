"""The arguments of `ft.accumulate`: which parameters are divided, split, or carried, and what the
auxiliary result is."""

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
from functree.errors import FunctreeTypeError, FunctreeValueError
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
    """A loss whose gradient at `w[i]` is the mask of micro-batch `i`: `x[:, i]` is 1 in this one, and 0
    in the others."""
    return jnp.sum(jnp.einsum("bp,pbe->be", x, w) * DROPOUT(jnp.ones((2, 4)), key=key))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(3), np.asarray(jax.random.PRNGKey(3))])
def test_each_micro_batch_has_a_mask_of_its_own(key: Any, jit: bool):
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

    step = ft.accumulate(ft.value_and_grad(loss), STEPS, keys=("rng", "more"))
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


def test_a_key_that_all_micro_batches_share():
    def loss(w: Array, x: Array, key: Array) -> Array:
        return jnp.mean(DROPOUT(x * w[None], key=key))

    step = ft.accumulate(ft.grad(loss), 2, batch="x")
    with warns(
        "accumulate: `key` is a random key, and all 2 micro-batches draw the same numbers from it",
        "pass it as a separate argument and name it in `keys=`",
        'silence the warning: `warnings.filterwarnings("ignore", "accumulate: .* is a random key"',
    ):
        step(W, X, KEY)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "accumulate: .* is a random key", ft.FunctreeWarning)
        step(W, X, KEY)
    # A warning is an error here.
    ft.accumulate(ft.grad(loss), 1, batch="x")(W, X, KEY)
    ft.accumulate(ft.grad(lambda m, x: jnp.mean(m["w"] * x), wrt="w"), 2)(
        {"w": 1.0 + W[None], "key": KEY}, X
    )


@pytest.mark.parametrize("over", [None, "data"])
def test_each_shard_has_a_mask_of_its_own(over: Any):
    """With `over=`, a key is split for the shards too."""

    def loss(w: Array, x: Array, key: Array) -> Array:
        return jnp.mean(w * DROPOUT(jnp.ones((len(x), 64)), key=key).sum(0))

    mesh = ft.make_mesh(data=2)
    w, x, key = ft.shard((jnp.ones(64), jnp.ones((4, 1)), KEY), (P(), P("data"), P()), mesh)
    step = ft.accumulate(ft.grad(loss, layout=P()), 2, keys="key", over=over)
    found = 64 * ft.jit(step, mesh=mesh)(w, x, key)
    if over is None:
        keys = [(one, 2) for one in jax.random.split(KEY, 2)]
    else:
        keys = [(one, 1) for one in jax.random.split(KEY, (2, 2)).ravel()]
    masks = [DROPOUT(jnp.ones((rows, 64)), key=one).sum(0) for one, rows in keys]
    np.testing.assert_allclose(found, sum(masks) / len(masks), rtol=1e-6)


# Which parameters are divided


def scaled(a: Array, b: Array, x: Array, scale: Array) -> Array:
    return jnp.mean((x @ (a * b)) * jnp.mean(scale))


A, B = jnp.arange(1.0, 5), jnp.arange(2.0, 6)
# The arguments of the gradient and of `accumulate`: by `argnums=`, or by name.
DIVIDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the second": ({"argnums": 1}, {"batch": ("x", "scale")}),
    "both": ({"argnums": (0, 1)}, {}),
    "the last but two": ({"argnums": -3}, {"batch": ["x", "scale"]}),
    "a name": ({}, {"batch": "x"}),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_divided(name: str, jit: bool):
    of_gradient, options = DIVIDED[name]
    gradient = ft.value_and_grad(scaled, **of_gradient)
    arguments = (A, B, X, jnp.float32(3) if name == "a name" else jnp.full(8, 3.0))
    step = ft.accumulate(gradient, STEPS, **options)
    assert_close((ft.jit(step) if jit else step)(*arguments), gradient(*arguments))


def test_gradients_of_others_are_averaged():
    """The first argument counts as the differentiated one."""
    gradient = jax.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w)))
    assert_close(ft.accumulate(gradient, STEPS)(W, X), gradient(W, X))
    second = jax.grad(lambda x, w: jnp.mean(jnp.tanh(x @ w)), argnums=1)
    assert_close(ft.accumulate(lambda w, x: second(x, w), STEPS)(W, X), second(X, W))


def test_nothing_is_divided():
    with raises(
        "accumulate: no array of the call is divided into micro-batches",
        "`argnums=` selects the differentiated arguments, and `batch=` selects the divided ones",
        error=FunctreeTypeError,
    ):
        ft.accumulate(ft.grad(lambda w: jnp.sum(w)), 2)(W)


# The weights


def test_a_weight_of_any_kind():
    """The sum of the weights comes back."""
    for weight, dtype in ((2, jnp.int32), (np.float32(2), jnp.float32), (jnp.int32(2), jnp.int32)):
        step = ft.accumulate(
            ft.value_and_grad(lambda w, x, n=weight: (jnp.sum(x @ w), n), has_aux=True),
            STEPS,
            weighted=True,
        )
        (value, total), gradient = step(W, X)
        assert total == 8 and total.dtype == dtype
        assert_close((value, gradient), (jnp.sum(X @ W) / 8, X.sum(0) / 8))


# What is carried


NORM, STATE = ft.make_state(ft.nn.BatchNorm(4, momentum=0.9))


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
    """And each micro-batch has a key of its own."""

    def loss(layer: Any, state: Any, x: Array, key: Array) -> Any:
        y, state = layer(DROPOUT(x, key=key), state)
        return jnp.mean(jnp.tanh(y) ** 3), state

    gradient = ft.grad(loss, has_aux=True)
    wanted = separate(gradient, NORM, STATE, jax.random.split(KEY, STEPS))
    for step in (
        ft.accumulate(gradient, STEPS, keys="key", carry="state"),
        ft.jit(ft.accumulate(gradient, STEPS, keys="key", carry=["state"])),
    ):
        assert_close(step(NORM, STATE, X, KEY), wanted)
    assert not np.allclose(wanted[1][NORM.mean], STATE[NORM.mean])


def test_several_carried():
    def loss(w: Array, x: Array, count: Array, seen: Any) -> Any:
        return jnp.mean(w * x), (count + 1, {"sum": seen["sum"] + x.sum(), "text": "seen"})

    step = ft.accumulate(ft.value_and_grad(loss, has_aux=True), STEPS, carry=("count", "seen"))
    # 0 has a weak type, and 1 as well.
    (_, (count, seen)), _ = step(
        jnp.ones((1, 4)), X, jnp.asarray(0), {"sum": 0 * X.sum(), "text": "seen"}
    )
    assert count == STEPS and seen["text"] == "seen"
    np.testing.assert_allclose(seen["sum"], X.sum(), rtol=1e-5)


def test_carried_in_shard_map_what_differs_between_shards():
    def loss(w: Array, x: Array, total: Array) -> Any:
        return jax.lax.pmean(jnp.mean(w * x), "data"), total + x.sum()

    def local(w: Array, x: Array) -> Array:
        step = ft.accumulate(ft.grad(loss, has_aux=True), 2, carry="total")
        return step(w, x, jax.lax.pcast(jnp.zeros(()), "data", to="varying"))[1][None]

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


# One loop for each shard


class Matrix(eqx.Module):
    weight: Float[Array, "embed hidden"]


def of_matrix(model: Matrix, x: Float[Array, "batch embed"]) -> Array:
    return jnp.mean(jnp.tanh(x @ model.weight) ** 2)


RULES = ft.AxisRules({"batch": "data", ...: None})
FSDP = RULES | ft.FSDP("data", min_size=0)
MATRIX = Matrix(jax.random.normal(jax.random.key(1), (4, 8)))
# The layout of the gradient, and the ambient one: either says how the parameters are sharded.
KNOWN: dict[str, tuple[Any, Any]] = {
    "by the ambient layout": (None, FSDP),
    "by layout=": (ft.FSDP("data", min_size=0), RULES),
    "by a spec": (P("data"), None),
    "by filters": (ft.StateSharding({"weight": ft.FSDP("data", min_size=0), ...: P()}), None),
}


def lowered(layout: Any, rules: Any, over: Any, mesh: Any, **options: Any) -> Any:
    step = ft.accumulate(ft.value_and_grad(of_matrix, layout=layout), 2, over=over, **options)
    x = jax.random.normal(jax.random.key(2), (16, 4))
    placed = ft.shard((MATRIX, x), (ft.FSDP("data", min_size=0), P("data")), mesh)
    compiled = ft.jit(step, rules=rules, mesh=mesh).lower(*placed).compile()
    return compiled, compiled(*placed)


@pytest.mark.parametrize("name", KNOWN)
def test_gathered_once(name: str):
    mesh = ft.make_mesh(data=4)
    compiled, found = lowered(*KNOWN[name], "data", mesh)
    _, each = lowered(*KNOWN[name], None, mesh)
    assert_close(found, each)
    moved = {
        (one.kind, one.count, str(one.path), one.phase) for one in compiled.ledger().collectives
    }
    assert moved == {
        ("all-gather", 1, "weight", "forward"),
        ("reduce-scatter", 1, "weight", "backward"),
        ("all-reduce", 1, "None", "forward"),  # the loss
    }


def test_a_batch_over_two_mesh_axes():
    mesh = ft.make_mesh(data=2, model=4)
    x = jax.random.normal(jax.random.key(2), (32, 4))
    placed = ft.shard((MATRIX, x), (P("data", "model"), P(("data", "model"))), mesh)
    layout = P("data", "model")
    for over in (("data", "model"), ["model", "data"]):
        step = ft.accumulate(ft.grad(of_matrix, layout=layout), 2, over=over)
        found = ft.jit(step, mesh=mesh)(*placed)
        np.testing.assert_allclose(found.weight, ft.grad(of_matrix)(MATRIX, x).weight, atol=1e-6)
        assert found.weight.sharding.spec == layout


def test_without_a_mesh_or_with_an_axis_of_one_device_there_are_no_shards():
    step = ft.accumulate(ft.grad(of_matrix), 2, over="data")
    assert_close(step(MATRIX, X), ft.grad(of_matrix)(MATRIX, X))
    mesh = ft.make_mesh(data=1)
    placed = ft.shard((MATRIX, X), (P(), P("data")), mesh)
    assert_close(ft.jit(step, mesh=mesh)(*placed), ft.grad(of_matrix)(MATRIX, X))


@pytest.mark.parametrize("over", [None, "data"])
def test_eager_calls_of_all_kinds(over: Any):
    mesh = ft.make_mesh(data=4)
    placed = ft.shard((MATRIX, X), (P("data"), P("data")), mesh)
    gradient = ft.grad(of_matrix)
    step = ft.accumulate(ft.grad(of_matrix, layout=P("data")), 2, over=over)
    assert_close(step(*placed), gradient(MATRIX, X))
    twice = jax.vmap(step, in_axes=(None, 0))(MATRIX, jnp.stack([X, X]))
    assert_close(twice, jax.tree.map(lambda g: jnp.stack([g, g]), gradient(MATRIX, X)))

    def slope(of: Callable[..., Any]) -> Array:
        return jax.grad(lambda s: of(Matrix(s * MATRIX.weight), X).weight.sum())(1.0)

    np.testing.assert_allclose(slope(step), slope(gradient), rtol=1e-4)


def _counted(w: Array, x: Array, seen: Array) -> Any:
    return jnp.mean(x @ w), seen + x.sum()


NOT_OVER: dict[str, tuple[Callable[..., Any], type[Exception], tuple[str, ...]]] = {
    "an axis": (
        lambda f: ft.accumulate(f, 2, over="dat"), ft.ShardingError,
        (
            "accumulate: invalid arguments",
            "over='dat'", "mesh (data=4) has no such axis; did you mean `data`?",
        ),
    ),
    "an axis twice": (
        lambda f: ft.accumulate(f, 2, over=("data", "data")), ft.ShardingError,
        ("accumulate: invalid arguments", "over='data'", "is named twice", "name the mesh axis once"),
    ),
    "no layout": (
        lambda f: ft.accumulate(f, 2, over="data"), ft.ShardingError,
        (
            "accumulate: `over=` needs the sharding of the parameters on mesh",
            "(data=4): pass `layout=` to the gradient function, or use rules",
        ),
    ),
    "the size": (
        lambda f: ft.accumulate(ft.grad(of_matrix, layout=P()), 8, over="data"), FunctreeValueError,
        ("x   f32[8, 4]", "of size 8 cannot be split into 8 micro-batches on each of 4 devices"),
    ),
    "what is carried": (
        lambda f: lambda model, x: ft.accumulate(
            ft.grad(_counted, has_aux=True, layout=P()), 2, carry="seen", over="data"
        )(jnp.ones(4), x, jnp.zeros(())), FunctreeTypeError,
        (
            "accumulate: 1 array in `carry` would change type between micro-batches",
            "seen   f32[]", "is float32[] in the first micro-batch, but float32[]{V:data} in the",
            "average it over the shards",
        ),
    ),
    "an integer": (
        lambda f: lambda model, x: ft.accumulate(
            ft.grad(lambda w, x: (jnp.mean(x @ w), x[0, 0] > 0), has_aux=True, layout=P()),
            2, over="data",
        )(jnp.ones(4), x), ft.ShardingError,
        (
            "accumulate: 1 array cannot be returned with `over=`",
            'result.1   bool[]', 'differs between shards along "data"', "return a float",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_OVER)
def test_no_shards(name: str):
    make, error, fragments = NOT_OVER[name]
    mesh = ft.make_mesh(data=4)
    placed = ft.shard((MATRIX, X), (P(), P("data")), mesh)
    with raises(*fragments, error=error):
        ft.jit(make(ft.grad(of_matrix)), mesh=mesh)(*placed)


def test_inside_of_a_shard_map_it_is_an_error():
    mesh = ft.make_mesh(data=4)
    step = ft.accumulate(ft.grad(of_matrix, layout=P()), 2, over="data")
    with raises(
        "over='data'", "is a mesh axis of the shard_map around this call", "remove it from `over=`"
    ):
        ft.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(MATRIX, X)


# Misuse


def _loss(model: Array, x: Array, state: Any, key: Any = None) -> Any:
    return jnp.mean(model * x), state


GRADIENT = ft.grad(_loss, has_aux=True)
NAMES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "unknown": (
        lambda: ft.accumulate(GRADIENT, 2, keys=("kye",), carry="stat"), FunctreeValueError,
        (
            "accumulate: invalid parameter names",
            "keys='kye'", "_loss has no such parameter; did you mean `key`?",
            "carry='stat'", "did you mean `state`?",
            "Try: name one of its parameters: model, x, state, key",
        ),
    ),
    "the model": (
        lambda: ft.accumulate(GRADIENT, 2, carry="model"), FunctreeValueError,
        ("carry='model'", "is differentiated, so it is the same in each micro-batch"),
    ),
    "twice": (
        lambda: ft.accumulate(GRADIENT, 2, keys="key", carry="key"), FunctreeValueError,
        ("carry='key'", "`key` is already in `keys`", "name it once"),
    ),
    "carried by others": (
        lambda: ft.accumulate(jax.grad(_loss, has_aux=True), 2, carry="state"), FunctreeTypeError,
        ("accumulate: pass `has_aux=True` to `ft.grad`", "_loss", "returns no aux", "return as aux"),
    ),
    "over by others": (
        lambda: ft.accumulate(jax.grad(_loss, has_aux=True), 2, over="data"), FunctreeTypeError,
        ("accumulate: `over=` cannot find the gradients in the result of _loss: use `ft.grad`",),
    ),
    "no weight": (
        lambda: ft.accumulate(ft.grad(lambda w, x: 0.0), 2, weighted=True), FunctreeTypeError,
        ("pass `has_aux=True`", "returns no aux", "return as aux the weight of the micro-batch"),
    ),
    "no position": (
        lambda: ft.accumulate(ft.grad(_loss, argnums=7), 2), FunctreeTypeError,
        ("accumulate: _loss has no positional parameter 7 to differentiate",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str):
    make, error, fragments = NAMES[name]
    with raises(*fragments, error=error):
        make()


NO_KEYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a number": (3, ("key   3", "is not a random key")),
    "words of another size": (jnp.zeros(3, jnp.uint32), ("key   u32[3]", "is not a random key")),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_KEYS)
def test_what_is_no_key(name: str):
    key, fragments = NO_KEYS[name]
    step = ft.accumulate(ft.grad(lambda w, x, key: jnp.mean(w * x)), STEPS, keys="key")
    told = "accumulate: 1 value in `keys` cannot be split"
    with raises(told, *fragments, error=FunctreeTypeError):
        step(W, X, key)


def _carries(aux: Callable[[Any], Any], **options: Any) -> Callable[..., Any]:
    def _step(w: Array, x: Array, state: Any) -> Any:
        return jnp.mean(w[None] * x), aux(state)

    return ft.accumulate(ft.grad(_step, has_aux=True), 2, carry="state", **options)


NOT_CARRIED: dict[str, tuple[Callable[..., Any], Any, tuple[str, ...]]] = {
    "another dtype": (
        _carries(lambda s: {"mean": s["mean"].astype(jnp.bfloat16)}), {"mean": W},
        (
            "accumulate: 1 array in `carry` would change type between micro-batches",
            "state.mean   f32[4]", "is float32[4] in the first micro-batch, but bfloat16[4] in the",
            "Try: return it with its old shape and dtype",
        ),
    ),
    "another structure": (
        _carries(lambda s: (s,)), W,
        (
            "accumulate: ", "returns an invalid aux", "aux: tuple", "differs in structure",
            "Try: return as aux the weight of the micro-batch",
        ),
    ),
    "a static number": (
        _carries(lambda s: {**s, "n": s["n"] + 1}), {"n": 0, "a": W},
        ("differs in structure, or in values that are not arrays",),
    ),
    "no weight": (_carries(lambda s: s, weighted=True), W, ("aux: f32[4]", "differs in structure")),
    "no scalar": (
        _carries(lambda s: (s, s), weighted=True), W, ("aux: tuple", "has a weight that is not a scalar")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_CARRIED)
def test_what_is_not_carried(name: str):
    step, state, fragments = NOT_CARRIED[name]
    with raises(*fragments, error=FunctreeTypeError):
        traced(step, W, X, state)
