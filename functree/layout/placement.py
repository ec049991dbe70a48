"""An array ─► the mesh that it is on, whether it is sharded as wanted, and the text of its sharding."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from functree.layout.meshes import mesh_view
from functree.layout.specs import spec_text


def is_concrete(value: Any) -> bool:
    """Whether a value is a JAX array with values, and not traced, abstract or an array of numpy."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def mesh_of(array: Any) -> Mesh | AbstractMesh | None:
    """The mesh that an array is on, or None. The type of a tracer has a mesh too, even if all mesh axes are Auto."""
    sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else getattr(array, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is None or mesh.empty else mesh


def first_mesh(arrays: Iterable[Any]) -> Mesh | AbstractMesh | None:
    """The mesh of the first array that is on a mesh."""
    return next((mesh for mesh in map(mesh_of, arrays) if mesh is not None), None)


def with_devices_of(mesh: AbstractMesh, arrays: Iterable[Any]) -> Mesh | AbstractMesh:
    """The mesh of an array that has the shape of an abstract mesh, with its devices; else the abstract mesh itself."""
    meshes = (mesh_of(array) for array in arrays)
    return next((one for one in meshes if isinstance(one, Mesh) and one.abstract_mesh == mesh), mesh)


def is_sharded_as(array: jax.Array, sharding: Any) -> bool:
    """Whether an array is sharded as wanted, in the wanted kind of memory."""
    # Not by `==`: P("data") and P("data", None) are one sharding of a matrix.
    here = array.sharding
    return memory_of(here) == memory_of(sharding) and here.is_equivalent_to(sharding, array.ndim)


def is_placed(value: Any, target: NamedSharding) -> bool:
    """Whether an array has its sharding already. Uncommitted arrays do not, so that they become committed."""
    if not is_concrete(value) or not value.committed or not isinstance(value.sharding, NamedSharding):
        return False
    return value.sharding.mesh == target.mesh and is_sharded_as(value, target)


def memory_of(sharding: Any) -> str:
    """The memory kind of a sharding; the default kind may be written as None."""
    return sharding.memory_kind or "device"


def other_memory(sharding: Any) -> str | None:
    """The memory kind of a sharding; None if it is the default kind, which JAX writes as "device"."""
    kind = memory_of(sharding)
    return None if kind == "device" else kind


def sharding_text(sharding: Any) -> str:
    """The text of a sharding: `P('data') on (data=8)`."""
    if sharding is None:
        return "unspecified"
    if not isinstance(sharding, NamedSharding):
        devices = sorted(str(device) for device in sharding.device_set)
        return f"on {devices[0]}" if len(devices) == 1 else f"on {len(devices)} devices"
    kind = other_memory(sharding)
    where = f"{spec_text(sharding.spec)} on {mesh_view(sharding.mesh)}"
    return where if kind is None else f"{where} in {kind}"
