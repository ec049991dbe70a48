"""An array ─► its mesh, whether it is sharded as wanted, and the text of its sharding."""

from collections.abc import Iterable
from typing import Any, TypeGuard

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from functree.devices.meshes import current_mesh, mesh_view
from functree.devices.specs import spec_text


def is_concrete(value: object) -> TypeGuard[jax.Array]:
    """Whether a value is a JAX array with values, and not traced, abstract or an array of numpy."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def mesh_of(array: Any) -> Mesh | AbstractMesh | None:
    """The mesh that an array is on, or None."""
    if isinstance(array, Tracer):
        # The type of a tracer has a mesh too, even if all mesh axes are Auto; a tracer itself has
        # no attribute `sharding`.
        sharding: object = jax.typeof(array).sharding
    else:
        sharding = getattr(array, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return None
    return mesh


def first_mesh(arrays: Iterable[object]) -> Mesh | AbstractMesh | None:
    """The mesh of the first array that is on a mesh."""
    for array in arrays:
        mesh = mesh_of(array)
        if mesh is not None:
            return mesh
    return None


def explicit_mesh(arrays: Iterable[object]) -> Mesh | AbstractMesh | None:
    """The current mesh, else that of the arrays, if its axes are Explicit: JAX differentiates and
    loops eagerly on them only with a current mesh."""
    mesh = current_mesh()
    if mesh is None:
        mesh = first_mesh(arrays)
    return mesh if mesh is not None and AxisType.Explicit in mesh.axis_types else None


def with_devices_of(mesh: AbstractMesh, arrays: Iterable[object]) -> Mesh | AbstractMesh:
    """An abstract mesh with the devices of the first array on such a mesh, if there is one."""
    for array in arrays:
        found = mesh_of(array)
        if isinstance(found, Mesh) and found.abstract_mesh == mesh:
            return found
    return mesh


def is_sharded_as(array: jax.Array, sharding: Sharding) -> bool:
    """Whether an array is sharded as wanted, in the wanted kind of memory."""
    # Not by `==`: P("data") and P("data", None) are one sharding of a matrix.
    here = array.sharding
    return memory_of(here) == memory_of(sharding) and here.is_equivalent_to(sharding, array.ndim)


def is_placed(value: Any, target: NamedSharding) -> bool:
    """Whether an array has its sharding already."""
    # An uncommitted array has not, whatever its sharding: JAX would move it beside another array.
    if not is_concrete(value) or not value.committed:
        return False
    # Nor has an array on another mesh, though it be of the same devices: its axes have other names.
    if not isinstance(value.sharding, NamedSharding) or value.sharding.mesh != target.mesh:
        return False
    return is_sharded_as(value, target)


def memory_of(sharding: Sharding) -> str:
    """The memory kind of a sharding; the default kind may be written as None."""
    return sharding.memory_kind or "device"


def other_memory(sharding: Sharding) -> str | None:
    """The memory kind of a sharding; None if it is the default kind, the memory of the device."""
    kind = memory_of(sharding)
    if kind == "device":
        return None
    return kind


def sharding_text(sharding: Sharding | None) -> str:
    """The text of a sharding: `P('data') on (data=8)`."""
    if sharding is None:
        return "unspecified"
    if not isinstance(sharding, NamedSharding):
        devices = list(sharding.device_set)
        if len(devices) == 1:
            return f"on {devices[0]}"
        return f"on {len(devices)} devices"
    text = f"{spec_text(sharding.spec)} on {mesh_view(sharding.mesh)}"
    kind = other_memory(sharding)
    if kind is not None:
        text += f" in {kind}"
    return text
