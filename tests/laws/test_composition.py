"""Whatever names a sharding, under every transform, on each kind of mesh axes, wherever the mesh
comes from.

Each cell of the table is compared with plain JAX, in which every sharding is a `NamedSharding` on a
concrete mesh. A run tests a covering of the table, `python -m tests.soak --tables` all of it.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

import functree as ft
from tests.laws.transforms import EAGER_GRADIENTS, GRADIENTS, SPEC, TRANSFORMS, Function
from tests.lib.covering import selected_cells
from tests.lib.meshes import EXPLICIT, MESH

P = PartitionSpec
RULES = ft.AxisRules({"rows": "data", "cols": "model"})

X = jnp.arange(64.0).reshape(8, 8)
ONE = jnp.ones((8, 8))


def put(x: Array, mesh: Mesh) -> Array:
    """The array, sharded by `SPEC`, in the words of plain JAX."""
    sharding = NamedSharding(mesh, SPEC)
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def annotated(x: Float[Array, "rows cols"]) -> Float[Array, "rows cols"]:
    return x * 2


def by_axes(x: Float[Array, "rows cols"]) -> Array:
    return ft.constrain(x * 2, "rows cols")


def square(x: Array) -> Array:
    return (x**2).sum()


def linear(x: Array) -> Array:
    return (x * 2).sum()


def layout(mesh: Mesh | None) -> Any:
    return SPEC if mesh is None else NamedSharding(mesh, SPEC)


# What names a sharding. Ours takes `mesh=`, or nothing; plain JAX takes the mesh.
OURS: dict[str, Callable[..., Any]] = {
    "constrain": lambda **mesh: ft.jit(lambda x: ft.constrain(x * 2, SPEC), **mesh),
    "constrain by axes": lambda **mesh: ft.jit(by_axes, rules=RULES, **mesh),
    "typed": lambda **mesh: ft.jit(ft.typed(annotated, constrain=True), rules=RULES, **mesh),
    "in_shardings": lambda **mesh: ft.jit(lambda x: x * 2, in_shardings=SPEC, **mesh),
    "in_shardings by rules": lambda **mesh: ft.jit(annotated, in_shardings=RULES, **mesh),
    "out_shardings": lambda **mesh: ft.jit(lambda x: x * 2, out_shardings=SPEC, **mesh),
    "out_shardings by rules": lambda **mesh: ft.jit(annotated, out_shardings=RULES, **mesh),
    "grad": lambda **mesh: ft.jit(ft.grad(square, layout=SPEC), **mesh),
    "grad of a linear function": lambda **mesh: ft.jit(ft.grad(linear, layout=SPEC), **mesh),
    "shard_map": lambda **mesh: ft.shard_map(
        lambda x: x * 2, in_specs=SPEC, out_specs=SPEC, **mesh
    ),
    "constrain alone": lambda mesh=None: (
        lambda x: ft.constrain(x * 2, SPEC if mesh is None else NamedSharding(mesh, SPEC))
    ),
    "grad alone": lambda mesh=None: ft.grad(
        linear, layout=SPEC if mesh is None else NamedSharding(mesh, SPEC)
    ),
}
# The argument is sharded, and its double.
DOUBLED = {"constrain by axes", "typed", "in_shardings", "in_shardings by rules"}
SQUARED = {"grad"}
ONES = {"grad of a linear function", "grad alone"}
LOCAL = {
    "in_shardings",
    "in_shardings by rules",
    "out_shardings",
    "out_shardings by rules",
    "shard_map",
}


def plain(construct: str, mesh: Mesh) -> Function:
    """The same in plain JAX."""
    if construct in DOUBLED:
        return jax.jit(lambda x: put(put(x, mesh) * 2, mesh))
    if construct in SQUARED:
        return jax.jit(lambda x: put(jax.grad(square)(x), mesh))
    if construct in ONES:
        return jax.jit(lambda x: put(jax.grad(linear)(x), mesh))
    return jax.jit(lambda x: put(x * 2, mesh))


MESHES = {"Auto": MESH, "Explicit": EXPLICIT}
SOURCES = ("mesh=", "set_mesh", "arguments")


def called(make: Callable[[], Any], transform: str, source: str, mesh: Mesh, ambient: bool) -> Any:
    """The result of a cell, or the error."""
    x = X
    if source == "arguments":
        x = jax.device_put(x, NamedSharding(mesh, SPEC))
    with jax.set_mesh(mesh) if ambient else nullcontext():
        try:
            return TRANSFORMS[transform](make(), x, mesh)
        except (ft.FunctreeError, ValueError, jax.errors.JaxRuntimeError) as error:
            return error


# What more than two values of a cell bring about together: arguments and cotangents without a
# sharding on Explicit axes, and the cell in which JAX itself fails on Auto ones.
SPECIAL = [
    *itertools.product(
        ["in_shardings", "in_shardings by rules"],
        ["Explicit"],
        ["mesh=", "set_mesh"],
        ["eager", "lower", "custom_vjp"],
    ),
    *itertools.product(["shard_map"], ["Explicit"], ["set_mesh"], ["vmap", "vmap in jit", "scan"]),
    ("shard_map", "Auto", "arguments", "grad of remat"),
]
CELLS = selected_cells(list(itertools.product(OURS, MESHES, SOURCES, TRANSFORMS)), SPECIAL)


@pytest.mark.parametrize(
    ("construct", "axes", "source", "transform"), CELLS, ids=map(" | ".join, CELLS)
)
def test_a_cell(construct: str, axes: str, source: str, transform: str):
    mesh, explicit, ambient = MESHES[axes], axes == "Explicit", source == "set_mesh"
    given = {"mesh": mesh} if source == "mesh=" else {}
    found = called(lambda: OURS[construct](**given), transform, source, mesh, ambient)
    if transform == "shard_map" and construct in LOCAL:
        assert isinstance(found, ft.ShardingError), found
        return
    unplaced = explicit and source != "arguments"
    if (
        unplaced
        and construct.startswith("in_shardings")
        and transform in ("eager", "lower", "custom_vjp")
    ):
        assert isinstance(
            found, ft.ShardingError
        ) and "its type in the body would be unsharded" in str(found)
        return
    if explicit and ambient and construct == "shard_map" and isinstance(found, ft.ShardingError):
        # Under a current mesh the type of a traced array is replicated, if nobody has placed the
        # array.
        assert transform not in ("eager", "lower") and "Explicit axes are not moved" in str(found)
        return
    if isinstance(found, ValueError | jax.errors.JaxRuntimeError) and not isinstance(
        found, ft.FunctreeError
    ):
        as_jax_does(found, construct, axes, source, transform)
        return
    assert not isinstance(found, Exception), found
    if transform == "shard_map":
        # Plain JAX constrains no array on a mesh whose axes are partly Manual.
        expected, sharding = (2 * ONE if construct in ONES else 2 * X), NamedSharding(mesh, SPEC)
    else:
        # On Explicit axes JAX needs the current mesh, from which it knows the devices of types.
        expected = called(
            lambda: plain(construct, mesh), transform, source, mesh, explicit or ambient
        )
        sharding = expected.sharding
    assert np.array_equal(found, expected)
    if transform in GRADIENTS and construct in ONES:
        return  # the gradient is zero, and depends on nothing that is placed
    if sharding.num_devices == 1 or (unplaced and transform in GRADIENTS):
        # Plain JAX has lost the mesh, or the gradient has the type of an argument that nobody has
        # placed.
        assert found.sharding.device_set == set(mesh.devices.flat)
        return
    assert found.sharding.is_equivalent_to(sharding, found.ndim), (found.sharding, sharding)


def as_jax_does(found: Exception, construct: str, axes: str, source: str, transform: str) -> None:
    """The errors of JAX that functree cannot foresee. Plain JAX, without a current mesh, raises
    them too."""
    if axes == "Auto":
        # An eager gradient through `jax.checkpoint` runs shard_map on arrays that are on no mesh.
        assert (construct, source, transform) == ("shard_map", "arguments", "grad of remat")
        assert "when passing `AbstractMesh`" in str(found) or "xla.sdy.LocalToGlobalShape" in str(
            found
        )
        return
    # Without a current mesh, JAX creates no array on Explicit axes outside of jit.
    assert source != "set_mesh" and (transform in EAGER_GRADIENTS or construct in ONES)
    other = called(lambda: plain(construct, MESHES[axes]), transform, source, MESHES[axes], False)
    for error in (found, other):
        assert isinstance(
            error, ValueError
        ) and "Please enter your `jit` into a mesh context" in str(error)
