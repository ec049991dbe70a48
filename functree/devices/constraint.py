"""`with_constraint` constrains an array to a spec on a mesh with mesh axes of any type."""

import functools
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from functree.devices.meshes import tracing
from functree.devices.specs import without
from functree.tree.arrays import AnyArray

_T = TypeVar("_T", bound=AnyArray)


def with_constraint(
    value: _T, mesh: Mesh | AbstractMesh, spec: PartitionSpec, memory_kind: str | None = None
) -> _T:
    """Constrain an array to a spec, ignoring the spec's Manual mesh axes.

    A mesh may have mesh axes of several types, and JAX requires a different function for each type.
    On Explicit mesh axes, the array is resharded.
    """
    on_explicit, on_auto = _by_type(mesh, spec)
    if on_explicit is not None and on_auto is not None:
        value = jax.sharding.reshard(value, on_explicit)  # the constraint below names the devices
    elif on_explicit is not None:
        value = _resharded(value, on_explicit)
    if on_auto is not None:
        value = jax.lax.with_sharding_constraint(value, on_auto)
    if memory_kind == "pinned_host":
        value = jax.device_put(value, jax.memory.Space.Host)
    return value


# A model constrains many activations to a few specs, so the shardings are cached.
@functools.lru_cache(maxsize=1024)
def _by_type(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec
) -> tuple[NamedSharding | None, NamedSharding | None]:
    """Split a spec into shardings on the Explicit and the Auto mesh axes.

    A sharding is None if the mesh has no mesh axes of its type.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    shardings: list[NamedSharding | None] = []
    for wanted in (AxisType.Explicit, AxisType.Auto):
        others = {name for name, axis_type in types.items() if axis_type != wanted}
        if len(others) == len(types):
            shardings.append(None)
        else:
            shardings.append(NamedSharding(mesh, without(spec, others)))
    return shardings[0], shardings[1]


def _resharded(value: _T, sharding: NamedSharding) -> _T:
    """Reshard an array on Explicit mesh axes, so that the program runs on the mesh's devices."""
    if isinstance(sharding.mesh, AbstractMesh) or not tracing():
        return jax.sharding.reshard(value, sharding)
    # If no argument of a program is on a mesh, JAX determines the program's devices from
    # constraints and from inner functions' shardings, but not from `reshard`.
    return jax.jit(lambda x: jax.sharding.reshard(x, sharding), out_shardings=sharding)(value)
