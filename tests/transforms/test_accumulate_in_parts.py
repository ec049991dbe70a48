"""Sums over the batch that stay in parts on its devices: the values are those of the whole sums, and
they are moved once, behind the loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jaxtyping import Float

import functree as ft
from functree.transforms.accumulate.parts.plan import make_plan

P = ft.P
STEPS = 2
RULES = ft.AxisRules({"batch": "data", ...: None})
FSDP = ft.FSDP("data", min_size=0, otherwise=P())
X = jax.random.normal(jax.random.key(0), (32, 16))


def weights(*shape: int) -> Array:
    return jax.random.normal(jax.random.key(1), shape) / 4


def scanned(run: Callable[[Array, Array], Array], **options: Any) -> Callable[[Array, Array], Any]:
    def loss(w: Array, x: Array) -> Array:
        return jnp.mean(jax.lax.scan(lambda h, v: (run(h, v), None), x, w, **options)[0] ** 2)

    return loss


def layer(x: Array, w: Array) -> Array:
    return jnp.tanh(x @ w)


def convolved(w: Array, x: Array, groups: int = 1) -> Array:
    images = x.reshape(-1, groups, 4, 4)
    options = {"feature_group_count": groups}
    return jnp.mean(jax.lax.conv_general_dilated(images, w, (1, 1), "SAME", **options) ** 2)


def normalized(w: Array, x: Array) -> Array:
    y = x @ w
    return jnp.mean(jnp.tanh((y - y.mean(0)[None]) / y.std(0)[None]) ** 3)


def weighted(w: Array, x: Array) -> Array:
    return jnp.sum(layer(x, w).mean(1) * x[:, 0] ** 2) / jnp.sum(x[:, 0] ** 2)


def looked_up(w: Array, x: Array) -> Array:
    tokens = (jnp.abs(x[:, :4]) * 100).astype(jnp.int32) % 16
    return jnp.mean(w.at[tokens].get(out_sharding=jax.typeof(tokens).sharding) ** 2)


def branched(w: Array, x: Array) -> Array:
    return jax.lax.cond(
        jnp.sum(x) > 0, lambda: jnp.mean((x @ w) ** 2), lambda: jnp.mean((x @ w) ** 4)
    )


def in_half_precision(w: Array, x: Array) -> Array:
    y = layer(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    return jnp.mean(y.astype(jnp.float32) ** 2)


# Means over the batch, sums, and what is neither: the loss, its parameters, and whether the gradient
# is a sum over the batch that can stay in parts.
LOSSES: dict[str, tuple[Callable[[Any, Array], Array], Any, bool]] = {
    "mean": (lambda w, x: jnp.mean(layer(x, w) ** 2), weights(16, 16), True),
    "sum": (lambda w, x: jnp.sum(layer(x, w) ** 2), weights(16, 16), True),
    "and the weights'": (
        lambda w, x: jnp.mean(layer(x, w) ** 2) + jnp.sum(w**2), weights(16, 16), True,
    ),
    "the weights alone": (lambda w, x: jnp.sum(w**3), weights(16, 16), False),
    "divided by a norm": (
        lambda w, x: jnp.mean(layer(x, w / jnp.linalg.norm(w)) ** 2), weights(16, 16), True,
    ),
    "largest": (lambda w, x: jnp.max(layer(x, w)), weights(16, 16), True),
    "used twice": (lambda w, x: jnp.mean(layer(x, w) @ w), weights(16, 16), True),
    "transposed": (lambda w, x: jnp.mean(layer(x, w.T) ** 2), weights(16, 16), True),
    "in another shape": (
        lambda w, x: jnp.mean(jnp.einsum("bi,ihd->bhd", x, w.reshape(16, 4, 4)) ** 2),
        weights(16, 16), True,
    ),
    "a bias": (lambda w, x: jnp.mean(jnp.tanh(x + w[0][None]) ** 2), weights(16, 16), False),
    "batch norm": (normalized, weights(16, 16), True),
    "weighted": (weighted, weights(16, 16), True),
    "half precision": (in_half_precision, weights(16, 16), True),
    "scanned": (scanned(layer), weights(3, 16, 16), True),
    "scanned again": (scanned(jax.checkpoint(layer), unroll=2), weights(4, 16, 16), True),
    "scanned backwards": (
        scanned(lambda h, v: scan_inner(h, v), reverse=True), weights(2, 3, 16, 16), True,
    ),
    "one layer often": (
        lambda w, x: jnp.mean(jax.lax.fori_loop(0, 3, lambda i, h: layer(h, w), x) ** 2),
        weights(16, 16), True,
    ),
    "recomputed": (
        lambda w, x: jnp.mean(jax.checkpoint(lambda x: layer(x, w))(x) ** 2), weights(16, 16), True,
    ),
    "one of two": (branched, weights(16, 16), True),
    "looked up": (looked_up, weights(16, 8), True),
    "convolved": (convolved, weights(5, 1, 3, 3), True),
    "a list": (lambda w, x: jnp.mean(jnp.tanh(x @ w[0] + w[1][None])), [weights(16, 8), weights(8)],
               True),
}  # fmt: skip


def scan_inner(h: Array, w: Array) -> Array:
    return jax.lax.scan(lambda h, v: (layer(h, v), None), h, w)[0]


def over_pieces(loss: Callable[[Any, Array], Array], model: Any) -> Any:
    """The mean of the results for the pieces, without a mesh."""
    found = [jax.value_and_grad(loss)(model, X[i::STEPS]) for i in range(STEPS)]
    return jax.tree.map(lambda *each: sum(each) / STEPS, *found)


# Each loss with one of these: all of them meet with each kind of loss.
WAYS = [
    (shape, explicit, once)
    for shape in ({"data": 8}, {"data": 2, "model": 4})
    for explicit in (False, True)
    for once in (False, True)
]


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_exchanges(name: str):
    loss, model, in_parts = LOSSES[name]
    shape, explicit, once = WAYS[list(LOSSES).index(name) * 3 % len(WAYS)]
    mesh = ft.make_mesh(**shape, explicit=explicit)
    layout = FSDP if once else P()
    placed, x = ft.shard(model, layout, mesh), ft.shard(X, P("data"), mesh)

    def of_batch(model: Any, x: Float[Array, "batch embed"]) -> Array:
        return loss(model, x)

    gradient = ft.value_and_grad(of_batch, layout=layout)
    step = ft.accumulate(gradient, STEPS, gather="once" if once else "each")
    compiled = ft.jit(step, rules=RULES, mesh=mesh).lower(placed, x).compile()
    found, wanted = compiled(placed, x), over_pieces(loss, model)
    precision = 1e-2 if name == "half precision" else 1e-5
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=precision * np.abs(other).max())
    for one, own in zip(jax.tree.leaves(found[1]), jax.tree.leaves(placed), strict=True):
        assert one.sharding.is_equivalent_to(own.sharding, one.ndim)
    # All that is as large as a gradient is moved once.
    size = min(leaf.nbytes for leaf in jax.tree.leaves(model)) // mesh.size
    for moved in compiled.ledger().collectives:
        assert moved.count == 1 or moved.bytes < size, moved
    if in_parts and not once:
        kinds = {one.kind for one in compiled.ledger().collectives}
        assert kinds == {"all-reduce"}


# What stays in parts, without a device


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_stay_in_parts(name: str):
    loss, model, in_parts = LOSSES[name]
    leaves, structure = jax.tree.flatten(model)

    def gradients(*arrays: Array) -> list[Array]:
        model = structure.unflatten(arrays[:-1])
        return jax.tree.leaves(jax.grad(loss)(model, arrays[-1]))

    function = jax.make_jaxpr(gradients)(*leaves, X)
    plan = make_plan(function, [*[None] * len(leaves), 0], [True] * len(leaves), ("data",), 8)
    assert (plan is not None and all(plan.results)) == in_parts


def results_in_parts(fun: Callable[..., Any], *dims: int | None, number: int = 8) -> list[bool]:
    shapes = [(16, 8) if dim != 1 else (8, 16) for dim in dims]
    function = jax.make_jaxpr(fun)(*[jnp.ones(shape) for shape in shapes])
    outputs = len(function.out_avals)
    plan = make_plan(function, dims, [True] * outputs, ("data",), number)
    return [False] * outputs if plan is None else list(plan.results)


CASES: dict[str, tuple[Callable[..., Any], tuple[int | None, ...], list[bool]]] = {
    "a product over the batch": (lambda x, y: x.T @ y, (0, 0), [True]),
    "one that is not": (lambda x, y: x @ y.T, (0, None), [False]),
    "over what is no batch": (lambda x, y: x.T @ y, (None, None), [False]),
    "a sum": (lambda x: x.sum(0), (0,), [True]),
    "over another dimension": (lambda x: x.sum(1), (0,), [False]),
    "of a moved dimension": (lambda x: x.T.sum(1), (0,), [True]),
    "of one that was joined": (lambda x: x.reshape(-1).sum(), (0,), [True]),
    "of one that was divided": (lambda x: x.reshape(8, 2, 8).sum((0, 1)), (0,), [True]),
    "linear": (lambda x: 2 * x.sum(0) / 3 - x.mean(0), (0,), [True]),
    "with what is whole": (lambda x, w: x.sum(0) + w[0], (0, None), [True]),
    "not linear": (lambda x: x.sum(0) ** 2, (0,), [False]),
    "larger": (lambda x: jnp.broadcast_to(x.sum(0), (9, 8)), (0,), [False]),
    "to fewer digits": (lambda x: x.sum(0).astype(jnp.bfloat16), (0,), [False]),
    "some": (lambda x, w: (x.sum(0), w, jnp.exp(x.sum(0))), (0, None), [True, False, False]),
    "a part, and all of it": (lambda x: (x.sum(0), x.sum(0).max()), (0,), [True, False]),
    "added to examples": (lambda x: (x - x.mean(0)[None]).sum(0), (0,), [True]),
    "multiplied by examples": (lambda x: x @ x.sum(0), (0,), [False]),
    "a part of a larger array": (lambda x: jnp.pad(x.sum(0), (0, 8)), (0,), [False]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_stays_in_parts(name: str):
    fun, dims, wanted = CASES[name]
    assert results_in_parts(fun, *dims) == wanted


def test_a_batch_that_the_devices_do_not_divide_is_summed_whole():
    assert results_in_parts(lambda x: x.sum(0), 0, number=16) == [True]
    assert results_in_parts(lambda x: x.sum(0), 0, number=32) == [False]


def test_a_batch_that_devices_cannot_share_equally():
    """Pieces of 4 examples on 8 devices, which only the compiler can share out."""
    mesh = ft.make_mesh(data=8)
    loss, model, _ = LOSSES["mean"]

    def of_batch(model: Any, x: Float[Array, "batch embed"]) -> Array:
        return loss(model, x)

    step = ft.accumulate(ft.value_and_grad(of_batch, layout=P()), 8)
    found = ft.jit(step, rules=RULES, mesh=mesh)(
        ft.shard(model, P(), mesh), ft.shard(X, P("data"), mesh)
    )
    np.testing.assert_allclose(found[1], jax.grad(loss)(model, X), rtol=1e-4, atol=1e-6)


# With other transformations


@pytest.mark.parametrize("once", [False, True], ids=["each", "once"])
def test_composes(once: bool):
    mesh = ft.make_mesh(data=2, model=4)
    loss, model, _ = LOSSES["mean"]
    layout = FSDP if once else P()

    def of_batch(model: Any, x: Float[Array, "batch embed"]) -> Array:
        return loss(model, x)

    gradient = ft.value_and_grad(of_batch, layout=layout)
    step = ft.accumulate(gradient, 2, gather="once" if once else "each")

    def all_of_it(w: Array, x: Array) -> Any:
        mapped = jax.vmap(lambda s: step(s * w, x)[0])(jnp.arange(1.0, 3.0))
        twice = jax.grad(lambda w: jnp.sum(step(w, x)[1] ** 2))(w)
        return mapped, twice

    x = ft.shard(X, P("data"), mesh)
    mapped, twice = ft.jit(all_of_it, rules=RULES, mesh=mesh)(ft.shard(model, layout, mesh), x)
    np.testing.assert_allclose(mapped, [loss(model, X), loss(2 * model, X)], rtol=1e-5)
    wanted = jax.grad(lambda w: jnp.sum(jax.grad(loss)(w, X) ** 2))(model)
    np.testing.assert_allclose(twice, wanted, atol=1e-6)


def test_inside_of_shard_map_nothing_is_kept_in_parts():
    """There it is the function itself that sums over the mesh axes."""
    mesh = ft.make_mesh(data=8)
    loss, model, _ = LOSSES["mean"]

    def local(w: Array, x: Float[Array, "batch embed"]) -> Array:
        return jax.lax.pmean(loss(w, x), "data")

    step = ft.accumulate(ft.grad(local), 2, gather="once")
    mapped = ft.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    found = ft.jit(mapped, rules=RULES)(model, X)
    np.testing.assert_allclose(found, jax.grad(loss)(model, X), rtol=1e-4, atol=1e-6)
