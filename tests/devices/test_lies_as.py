"""An array that is sharded as another one is: its values, its derivatives, and what a shard_map
returns."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import functree as ft
from functree.devices.constraint import lies_as
from tests.lib.meshes import MESH, assert_lies, lay

X, Y = jnp.arange(12.0).reshape(3, 4), jnp.ones((3, 4))

# A function with `same(x, y)` in the place of x.
FUNCTIONS: dict[str, Callable[[Callable[[Any, Any], Any]], Any]] = {
    "value": lambda same: same(X, Y),
    "jvp in both": lambda same: jax.jvp(lambda x, y: same(x, y) * y, (X, Y), (Y, X)),
    "grad": lambda same: jax.grad(lambda x: jnp.sum(same(x, Y) ** 3))(X),
    "grad of the other": lambda same: jax.grad(lambda y: jnp.sum(same(X, y) * y))(Y),
    "hessian": lambda same: jax.hessian(lambda x: jnp.sum(same(x, x) ** 3))(X[0]),
    "vmap": lambda same: jax.vmap(same)(X, Y),
    "vmap of the other": lambda same: jax.vmap(same, (None, 0))(X[0], Y),
    "vmap along others": lambda same: jax.vmap(same, (1, 0), 1)(X, Y.T),
    "vmap of grad": lambda same: jax.vmap(jax.grad(lambda x, y: jnp.sum(same(x, y) ** 2)))(X, Y),
    "scan": lambda same: jax.lax.scan(lambda c, x: (same(c, x), x), X[0], Y),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_values_are_those_of_the_array(name: str) -> None:
    found, wanted = FUNCTIONS[name](lies_as), FUNCTIONS[name](lambda x, _: x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


SPECS = [P(), P("data"), P("model"), P(None, "model")]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_it_lies_as_the_other(spec: P) -> None:
    y = lay(jnp.ones((8, 8)), *spec)
    for same in (lies_as, jax.jit(lambda x, y: lies_as(2 * x, y))):
        assert_lies(same(jnp.ones((8, 8)), y), *spec)


# The partitioner fails on what a shard_map returns if nothing stands between.
MANUAL: dict[str, tuple[set[str], P]] = {
    "all axes": ({"data", "model"}, P("data", "model")),
    "one axis, whole": ({"data"}, P()),
    "one axis, sharded": ({"data"}, P("data")),
}


@pytest.mark.parametrize(("manual", "spec"), list(itertools.product(MANUAL, SPECS)), ids=str)
def test_the_gradient_that_a_shard_map_returns(manual: str, spec: P) -> None:
    axes, inside = MANUAL[manual]
    double = jax.shard_map(
        lambda w: 2 * w, mesh=MESH, in_specs=inside, out_specs=inside, axis_names=axes
    )

    def loss(model: dict[str, Any]) -> Any:
        return jnp.sum(double(model["w"]) ** 2)

    w = jnp.arange(64.0).reshape(8, 8)
    one = ft.jit(ft.grad(loss), rules=P(), mesh=MESH)({"w": lay(w, *spec)})["w"]
    np.testing.assert_array_equal(one, 8 * w)
    assert_lies(one, *spec)
    several = ft.jit(jax.vmap(jax.jit(ft.grad(loss))), rules=P(), mesh=MESH)
    found = several({"w": lay(jnp.stack([w, w]), None, *spec)})["w"]
    np.testing.assert_array_equal(found[1], 8 * w)
    assert_lies(found, None, *spec)
