"""The mesh that most tests use, made by JAX alone, and what lies on it."""

from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

SIZES = {"data": 2, "model": 4}


def mesh_of(explicit: bool = False) -> Mesh:
    """The mesh of `SIZES` over all devices, with Auto or with Explicit axes."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(kind, kind))


MESH = mesh_of()
EXPLICIT = mesh_of(explicit=True)


def lay(x: Any, *spec: Any) -> Array:
    """An array on `MESH`, sharded by this spec; of one that lies there already, perhaps the same
    buffers."""
    return jax.device_put(x, NamedSharding(MESH, PartitionSpec(*spec)))


def assert_lies(x: Any, *spec: Any, mesh: Mesh = MESH) -> None:
    """The array is sharded by this spec, or by one that means the same."""
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec)), x.ndim), (
        x.sharding
    )
