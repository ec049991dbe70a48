"""Types that vary along the mesh axes of a shard_map are taken from arrays, and given back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from functree.devices.make_mesh import make_mesh
from functree.devices.varying import unchecked, varying_axes, without_varying

P = PartitionSpec
MESH = make_mesh(data=2, model=4)
X = jax.random.normal(jax.random.key(1), (4, 8))
WEIGHTS = jax.random.normal(jax.random.key(2), (3, 8, 8)) / 3


def whole(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w.T), None), x, weights)[0].sum()


def nested(inner_check: bool, outer_check: bool) -> Callable[..., jax.Array]:
    """`whole`, with the rows of `x` over `data`, and inside of that a map over `model`."""

    def inner(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(jax.lax.psum(jnp.tanh(x @ w) @ w.T, "model"))

    def outer(weights: jax.Array, x: jax.Array) -> jax.Array:
        split = jax.shard_map(
            inner,
            in_specs=(P(), P(None, "model")),
            out_specs=P(),
            axis_names={"model"},
            check_vma=inner_check,
        )
        run = without_varying(split)
        # A loop: what does not change in it is computed before it, and kept.
        total = jax.lax.scan(lambda x, w: (run(x, w), None), x, weights)[0].sum()
        return jax.lax.psum(total, "data")

    return jax.shard_map(
        outer,
        mesh=MESH,
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=outer_check,
    )


def assert_close(found: jax.Array, expected: jax.Array) -> None:
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * largest)


MODES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "gradient": lambda fun: jax.grad(fun, (0, 1)),
    "gradient of a remat": lambda fun: jax.grad(jax.checkpoint(fun), (0, 1)),
    "gradient of a vmap": lambda fun: jax.grad(
        lambda w, x: jax.vmap(fun, (None, 0))(w, jnp.stack([x, 2 * x])).sum(), (0, 1)
    ),
    "jvp of a gradient": lambda fun: lambda *args: jax.jvp(jax.grad(fun), args, args)[1],
}


@pytest.mark.parametrize("mode", MODES)
def test_a_map_in_a_checked_map(mode: str) -> None:
    """JAX alone cannot lower its derivative."""
    expected = jax.jit(MODES[mode](whole))(WEIGHTS, X)
    for inner_check in (True, False):
        with jax.set_mesh(MESH):
            found = jax.jit(MODES[mode](nested(inner_check, True)))(WEIGHTS, X)
        jax.tree.map(assert_close, found, expected)


def test_in_an_unchecked_map() -> None:
    with jax.set_mesh(MESH):
        found = jax.jit(jax.grad(nested(True, False)))(WEIGHTS, X)
    assert_close(found, jax.grad(whole)(WEIGHTS, X))


def test_types() -> None:
    def body(x: jax.Array, i: jax.Array, w: jax.Array) -> jax.Array:
        assert (varying_axes(x), varying_axes(w)) == ({"data"}, set())

        def inside(x: jax.Array, i: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            assert not varying_axes(x) | varying_axes(i) | varying_axes(w)
            return w, i

        # By all arguments: what only some of them say, the function may have mixed.
        w, i = without_varying(inside)(x, i, w)
        assert varying_axes(w) == varying_axes(i) == {"data"}
        assert not varying_axes(unchecked(lambda x: 2 * x)(x))
        return w

    specs = P("data"), P("data"), P()
    mapped = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("data"))
    jax.eval_shape(mapped, X, jnp.arange(4), X)


def test_nothing_is_left_in_the_program() -> None:
    run = jax.shard_map(
        without_varying(lambda x: 2 * x), mesh=MESH, in_specs=P("data"), out_specs=P("data")
    )
    plain = jax.shard_map(lambda x: 2 * x, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    texts = [jax.jit(fun).lower(X).compile().as_text() for fun in (run, plain)]
    assert len({text.count(" = ") for text in texts if text}) == 1
