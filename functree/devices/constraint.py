"""A traced array and a spec on a mesh ─► the same array, constrained to it."""

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
    """The array, constrained to a spec. Manual mesh axes are left out of it.

    A mesh may mix types of axes, and JAX has one function for each type: on Explicit axes the array
    is resharded.
    """
    on_explicit, on_auto = _by_type(mesh, spec)
    if on_explicit is not None and on_auto is not None:
        value = jax.sharding.reshard(value, on_explicit)  # the devices are known by the constraint
    elif on_explicit is not None:
        value = _resharded(value, on_explicit)
    if on_auto is not None:
        value = jax.lax.with_sharding_constraint(value, on_auto)
    if memory_kind == "pinned_host":
        value = jax.device_put(value, jax.memory.Space.Host)
    return value


# A model constrains its activations again and again, by a few specs.
@functools.lru_cache(maxsize=1024)
def _by_type(
    mesh: Mesh | AbstractMesh, spec: PartitionSpec
) -> tuple[NamedSharding | None, NamedSharding | None]:
    """The shardings on the Explicit and on the Auto axes of a mesh; None if it has no such axes."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    found: list[NamedSharding | None] = []
    for wanted in (AxisType.Explicit, AxisType.Auto):
        others = {name for name, axis_type in types.items() if axis_type != wanted}
        if len(others) == len(types):
            found.append(None)
        else:
            found.append(NamedSharding(mesh, without(spec, others)))
    return found[0], found[1]


def _resharded(value: _T, sharding: NamedSharding) -> _T:
    """The array, resharded on Explicit axes by a program that knows the devices of the mesh."""
    if isinstance(sharding.mesh, AbstractMesh) or not tracing():
        return jax.sharding.reshard(value, sharding)
    # If no argument is on a mesh, JAX takes the devices of a program from constraints and from the
    # shardings of inner functions, but not from `reshard`.
    return jax.jit(lambda x: jax.sharding.reshard(x, sharding), out_shardings=sharding)(value)
