"""`ft.accumulate`: a batch in micro-batches is the whole batch, and its examples stay where they are."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jaxtyping import Float

import functree as ft
from functree.errors import FunctreeValueError
from tests.lib.checks import raises
from tests.lib.covering import selected_cells

P = ft.P
DATA, TP = (
    ft.AxisRules({"batch": "data", ...: None}),
    ft.AxisRules({"batch": "data", "hidden": "model", ...: None}),
)
FSDP = ft.FSDP("data", min_size=0)
LAYOUTS: dict[str, tuple[ft.AxisRules, Any]] = {  # of activations, of parameters
    "data": (DATA, DATA),
    "tp": (TP, TP),
    "fsdp": (DATA, DATA | FSDP),
    "both": (TP, TP | FSDP),
}
MODEL = ft.nn.MLP(16, 32, key=jax.random.key(0))
X, Y = (jax.random.normal(jax.random.key(i), (16, 16)) for i in (1, 2))


def loss(model: Any, x: Array, y: Array) -> Array:
    return jnp.mean((model(x) - y) ** 2)


BOTH = ft.value_and_grad(loss)
WANT = jax.jit(BOTH)(MODEL, X, Y)


def assert_close(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


# The whole batch


@pytest.mark.parametrize("steps", [1, 2, 4, 16])
def test_equals_the_whole_batch(steps: int):
    assert_close(ft.accumulate(BOTH, steps)(MODEL, X, Y), WANT)
    assert_close(ft.accumulate(ft.grad(loss), steps)(MODEL, X, Y), WANT[1])


# On a mesh


def total(model: Any, seen: Any, x: Array, y: Array, mask: Array, key: Array, over: bool) -> Any:
    """The sum of the losses of the examples that are not masked, the number of these, and the
    numbers that are carried."""
    scale = 1 + jax.vmap(jax.random.uniform)(key)
    losses = jnp.mean((model(x) - y) ** 2, axis=1) * scale * mask
    tokens = jnp.sum(mask)
    of_all = jax.lax.psum(tokens, "data") if over else tokens
    return losses.sum(), (tokens, {"steps": seen["steps"] + 1, "tokens": seen["tokens"] + of_all})


def mean(model: Any, seen: Any, x: Array, y: Array, mask: Array, key: Array, over: bool) -> Any:
    """The same as a mean over all examples."""
    value, (_, seen) = total(model, seen, x, y, mask, key, over)
    return value / len(x), seen


MASK = jnp.asarray([1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1], jnp.float32)
SEEN = {"steps": jnp.int32(0), "tokens": jnp.float32(0)}
BATCH = (X, Y, MASK, jax.random.split(jax.random.key(4), 16))


@functools.cache
def of_the_whole_batch(weighted: bool) -> Any:
    """The value and the gradients, without devices."""
    if not weighted:
        (value, _), gradient = ft.value_and_grad(mean, has_aux=True)(MODEL, SEEN, *BATCH, False)
        return value, gradient
    both = ft.value_and_grad(total, has_aux=True)
    (value, (tokens, _)), gradient = both(MODEL, SEEN, *BATCH, False)
    return jax.tree.map(lambda one: one / tokens, (value, gradient))


CELLS = list(itertools.product((None, "data"), (False, True), (1, 2, 4), LAYOUTS, (False, True)))


@pytest.mark.parametrize(("over", "weighted", "steps", "name", "explicit"), selected_cells(CELLS))
def test_on_a_mesh(over: Any, weighted: bool, steps: int, name: str, explicit: bool):
    mesh = ft.make_mesh(data=2, model=4, explicit=explicit)
    rules, layout = LAYOUTS[name]
    model, batch = ft.shard(MODEL, layout, mesh), ft.shard(BATCH, P("data"), mesh)
    gradient = ft.value_and_grad(
        total if weighted else mean, has_aux=True, layout=None if explicit else layout
    )
    step = ft.accumulate(
        gradient, steps, keys="key", carry="seen", batch=("x", "y", "mask", "over"), weighted=weighted,
        over=over,
    )  # fmt: skip
    run = ft.jit(step, rules=rules, mesh=mesh)
    (value, aux), found = run(model, ft.shard(SEEN, P(), mesh), *batch, over is not None)
    assert_close((value, found), of_the_whole_batch(weighted))
    tokens, seen = aux if weighted else (MASK.sum(), aux)
    assert tokens == MASK.sum() and seen == {"steps": steps, "tokens": MASK.sum()}
    for one, parameter in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        assert one.sharding.is_equivalent_to(parameter.sharding, one.ndim)


FILTERS = ft.StateSharding({"up": P(None, "model"), ...: P()})


@pytest.mark.parametrize("over", [None, "data"])
def test_gradients_lie_as_their_parameters_by_the_ambient_layout(over: Any):
    """Of `down`, whole by the filters, the compiler would split the rows as those of `up`."""
    mesh = ft.make_mesh(data=2, model=4)
    model, batch = ft.shard(MODEL, FILTERS, mesh), ft.shard((X, Y), P("data"), mesh)
    step = ft.jit(ft.accumulate(BOTH, 4, over=over), rules=FILTERS, mesh=mesh)
    _, found = step(model, *batch)
    for one, parameter in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        assert one.sharding.is_equivalent_to(parameter.sharding, one.ndim)


def test_a_gradient_is_scattered_where_the_batch_is_not_the_first_of_two_mesh_axes():
    mesh = ft.make_mesh(data=2, model=4)
    layout = ft.StateSharding({"up": P(None, ("model", "data")), ...: P()})
    model, batch = ft.shard(MODEL, layout, mesh), ft.shard((X, Y), P("data"), mesh)
    both = ft.value_and_grad(loss, layout=layout)
    result = ft.jit(ft.accumulate(both, 2, over="data"), mesh=mesh)(model, *batch)
    assert_close(result, WANT)
    assert result[1].up.sharding == model.up.sharding


def named(model: Any, x: Float[Array, "batch embed"], y: Float[Array, "batch embed"]) -> Array:
    return loss(model, x, y)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("over", [None, "data"])
def test_what_is_moved(over: Any, name: str, explicit: bool):
    """No example, and with `over=` all that is as large as a gradient once."""
    mesh = ft.make_mesh(data=2, model=4, explicit=explicit)
    rules, layout = LAYOUTS[name]
    model, (x, y) = ft.shard(MODEL, layout, mesh), ft.shard((X, Y), P("data"), mesh)
    whole = ft.value_and_grad(named, layout=None if explicit else layout)
    once, step = (
        ft.jit(f, rules=rules, mesh=mesh).lower(model, x, y).compile()
        for f in (whole, ft.accumulate(whole, 4, over=over))
    )
    kinds = set(collectives(step))
    if over is None:
        assert kinds <= set(collectives(once))
        return
    assert not kinds & {"all-to-all", "collective-permute"}
    over_data = [one for one in step.ledger().collectives if "data" in one.mesh_axes]
    assert over_data and all(one.count == 1 for one in over_data)
    gathered = [one for one in over_data if one.kind == "all-gather"]
    scattered = [one for one in over_data if one.kind == "reduce-scatter"]
    sharded = name in ("fsdp", "both")
    assert bool(gathered) == sharded and bool(scattered) == sharded


def collectives(compiled: Any) -> list[str]:
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text())


def test_a_carried_array_of_a_weak_type_keeps_its_dtype():
    """That of a sum with a narrower array would be the narrower one."""

    def step(w: Array, x: Array, seen: Array) -> Any:
        return jnp.sum(w) * x.sum(), seen + x.sum()

    seen, x = jnp.asarray(0.0), jnp.ones(8, jnp.bfloat16)
    assert jax.typeof(seen).weak_type
    with jax.numpy_dtype_promotion("standard"):
        _, found = ft.accumulate(ft.grad(step, has_aux=True), 2, carry="seen")(jnp.ones(3), x, seen)
    assert found.dtype == jnp.float32 and found == 8


def test_micro_batches_are_strided():
    seen = ft.accumulate(lambda scale, x: x * scale, 2)(jnp.float32(1), jnp.arange(6.0))
    assert seen.tolist() == [0.5, 2.5, 4.5]  # the mean of (0, 2, 4) and (1, 3, 5)


def test_memory_is_that_of_a_micro_batch():
    x = jnp.ones((4096, 16))
    once, step = (jax.jit(f).lower(MODEL, x, x).compile() for f in (BOTH, ft.accumulate(BOTH, 16)))
    assert 8 * step.memory_analysis().temp_size_in_bytes < once.memory_analysis().temp_size_in_bytes


# Arguments and results


def test_keywords_and_integers_and_statics_and_trees():
    def of_tokens(table: Array, batch: Any, mask: None, *, scale: float, weights: Any) -> Array:
        assert mask is None
        return jnp.mean(table[batch["tokens"]].sum(-1) * weights) * scale

    batch = {"tokens": jnp.arange(8, dtype=jnp.int32) % 3}
    table, weights = jnp.arange(6.0).reshape(3, 2), np.arange(8, dtype=np.float32)
    one = ft.value_and_grad(of_tokens)
    found = ft.accumulate(one, 4)(table, batch, None, scale=2.0, weights=weights)
    assert_close(found, one(table, batch, None, scale=2.0, weights=weights))


AUX: dict[str, tuple[Callable[[Array], Any], Callable[[Any], bool]]] = {
    "a mean": (lambda x: x.mean(), lambda a: np.allclose(a, X.mean(), atol=1e-6)),
    "an integer, of the last micro-batch": (
        lambda x: x[0, 0] > X[2, 0],
        lambda a: bool(a) == bool(X[3, 0] > X[2, 0]),
    ),
    "nothing": (lambda x: None, lambda a: a is None),
    "a text": (lambda x: ("text", x.mean()), lambda a: a[0] == "text"),
    "a module": (
        lambda x: MODEL,
        lambda a: isinstance(a, ft.nn.MLP) and np.allclose(a.up, MODEL.up),
    ),
    "a key": (lambda x: jax.random.key(3), lambda a: a.dtype == jax.random.key(3).dtype),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", AUX)
def test_auxiliary_results(name: str, jit: bool):
    fn, holds = AUX[name]
    step = ft.accumulate(ft.value_and_grad(lambda m, x, y: (loss(m, x, y), fn(x)), has_aux=True), 4)
    (value, aux), gradient = (ft.jit(step) if jit else step)(MODEL, X, Y)
    assert_close((value, gradient), WANT)
    assert holds(aux)
    gradient, aux = ft.accumulate(ft.grad(lambda m, x, y: (loss(m, x, y), fn(x)), has_aux=True), 4)(
        MODEL, X, Y
    )
    assert_close(gradient, WANT[1])
    assert holds(aux)


def test_bfloat16_is_summed_in_float32():
    """A running sum in bfloat16 stands still as soon as a term is less than 1/256 of it."""
    x = jnp.ones((1024, 1), jnp.bfloat16)
    gradient = ft.accumulate(ft.grad(lambda w, x: jnp.mean(x @ w)), 1024)(
        jnp.ones(1, jnp.bfloat16), x
    )
    assert gradient.dtype == jnp.bfloat16 and gradient.tolist() == [1.0]


# Misuse


def test_every_array_at_fault_is_named():
    fn = ft.accumulate(ft.grad(lambda m, batch, *, key: loss(m, batch["x"], batch["y"])), 3)
    with raises(
        "accumulate: 2 arrays cannot be split into micro-batches",
        "batch.x   f32[16, 16]",
        "its leading dimension of size 16 cannot be split into 3 micro-batches",
        "key   key<fry>[]",
        "has no leading dimension to split into 3 micro-batches",
        "Try: use a batch whose size is a multiple of 3, or name the parameters to divide in `batch=`",
        error=FunctreeValueError,
    ):
        fn(MODEL, {"x": X, "y": jnp.ones((9, 16))}, key=jax.random.key(0))


def test_micro_batches_that_devices_do_not_share():
    mesh = ft.make_mesh(data=8, explicit=True)
    x = ft.shard(X, P("data"), mesh)
    told = "x, y   f32[16, 16]", "of size 16 cannot be split into 4 micro-batches on each of 8 dev"
    with raises(*told, error=FunctreeValueError):
        ft.jit(ft.accumulate(BOTH, 4), mesh=mesh)(ft.shard(MODEL, P(), mesh), x, x)


def test_in_shard_map_with_results_that_differ_between_shards():
    def loss(w: Any, x: Any) -> Any:
        whole = jnp.sum(jax.lax.all_gather(w, "data", tiled=True))
        return jax.lax.pmean(jnp.mean((x * whole) ** 2), "data"), x.sum()

    gradient = ft.value_and_grad(loss, has_aux=True)

    def run(step: Callable[..., Any]) -> Any:
        def local(w: Any, x: Any) -> Any:
            (value, aux), gradient = step(w, x)
            return value, aux[None], gradient

        specs = {"in_specs": P("data"), "out_specs": (P(), P("data"), P("data"))}
        mapped = ft.shard_map(local, mesh=ft.make_mesh(data=8), **specs)
        return mapped(jnp.arange(8.0), jnp.arange(32.0))

    (value, aux, found), (whole, sums, expected) = run(ft.accumulate(gradient, 2)), run(gradient)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(value, whole, rtol=1e-5)
    np.testing.assert_allclose(aux, sums / 2)  # the mean of the micro-batches
