"""Gradients under `vmap` and in loops lie as their parameters do, and nothing moves for it."""

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import functree as ft
from tests.lib.covering import selected_cells
from tests.lib.meshes import EXPLICIT, MESH

P = ft.P


class Net(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


def loss(net: Net, x: Array) -> Array:
    """It multiplies elements only, so that no product over a sharded dimension is summed."""
    return jnp.mean(jnp.tanh(net.w * x) ** 2) + jnp.mean(jnp.sin(net.b * x))


ONE = Net(jnp.linspace(-1, 1, 128).reshape(8, 16), jnp.linspace(0, 1, 16))
MANY = jax.tree.map(lambda x: jnp.stack([x * (1 + i / 8) for i in range(8)]), ONE)
FSDP = ft.FSDP("data", min_size=0)
TABLE = {"agents": "data", "hidden": "model", "embed": None}
NAMES = ft.AxisRules(TABLE)
OF_MANY = ft.AxisRules(TABLE, names={Net: ft.names("agents")})
UNSHARDED_MANY = ft.AxisRules({...: None}, names={Net: ft.names("agents")})

# The layout, and the specs that it gives: to one net, and to many.
LAYOUTS: dict[str, tuple[Any, Any, Any, Any]] = {
    "P": (P("data"), P("data"), Net(P("data", None), P("data")), Net(P("data", None, None), P("data", None))),
    "FSDP": (FSDP, UNSHARDED_MANY | FSDP, Net(P(None, "data"), P("data")), Net(P(None, None, "data"), P(None, "data"))),
    "StateSharding": (
        ft.StateSharding({"w": P(None, "data"), ...: P()}),
        ft.StateSharding({"w": P("data", "model"), ...: P("data")}),
        Net(P(None, "data"), P(None)),
        Net(P("data", "model", None), P("data", None)),
    ),
    "composition": (
        NAMES | FSDP, OF_MANY | FSDP,
        Net(P("data", "model"), P("model")), Net(P("data", None, "model"), P("data", "model")),
    ),
}  # fmt: skip

GRADIENT = ft.grad(loss)
Gradient = Callable[[Net, Array], Net]


def steps(net: Net, x: Array) -> Net:
    def step(net: Net, _: None) -> tuple[Net, None]:
        return jax.tree.map(lambda p, g: p - g, net, GRADIENT(net, x)), None

    return jax.lax.scan(step, net, None, length=3)[0]


def averaged(net: Net, x: Array) -> Net:
    """A gradient inside of the one that is taken."""
    return ft.grad(lambda net: loss(GRADIENT(net, x), x))(net)


WAYS: dict[str, Gradient] = {
    "bare": GRADIENT,
    "scan over steps": steps,
    "remat": jax.checkpoint(GRADIENT),  # pyright: ignore
    "nested": averaged,
    "a jit inside": ft.jit(GRADIENT),
}
MAPPED: dict[str, Callable[[Gradient], Gradient]] = {
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None)),
    "vmap with spmd_axis_name": lambda f: jax.vmap(f, in_axes=(0, None), spmd_axis_name="data"),
    "filter_vmap": lambda f: eqx.filter_vmap(f, in_axes=(0, None)),
    "a jit outside of vmap": lambda f: ft.jit(jax.vmap(f, in_axes=(0, None))),
}


def check(f: Gradient, net: Net, layout: Any, specs: Any, mesh: Any) -> None:
    x = jnp.float32(0.7)
    placed = ft.shard(net, layout, mesh)
    compiled = ft.jit(f, rules=layout, mesh=mesh).lower(placed, x).compile()
    found = compiled(placed, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(f(net, x)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert compiled.ledger().collectives == ()
    lie = jax.tree.map(
        lambda g: P(*g.sharding.spec, *[None] * (g.ndim - len(g.sharding.spec))), found
    )
    assert (lie.w, lie.b) == (specs.w, specs.b)


MESHES = {"auto": MESH, "explicit": EXPLICIT}
OF_ONE = selected_cells(list(itertools.product(WAYS, LAYOUTS, MESHES)))
OF_MANY = selected_cells(list(itertools.product(MAPPED, WAYS, LAYOUTS, MESHES)))


@pytest.mark.parametrize(("way", "name", "mesh"), OF_ONE)
def test_of_one(way: str, name: str, mesh: str):
    layout, _, specs, _ = LAYOUTS[name]
    check(WAYS[way], ONE, layout, specs, MESHES[mesh])


@pytest.mark.parametrize(("mapped", "way", "name", "mesh"), OF_MANY)
def test_of_many(mapped: str, way: str, name: str, mesh: str):
    _, layout, _, specs = LAYOUTS[name]
    check(MAPPED[mapped](WAYS[way]), MANY, layout, specs, MESHES[mesh])
