"""A traced array and a spec on a mesh ─► the same array, constrained to it."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from functree.layout.meshes import tracing
from functree.layout.specs import without


def constrained(value: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec, memory_kind: str | None = None) -> Any:
    """The array, constrained to a spec. Manual mesh axes are left out of it.

    A mesh may mix types of axes, and JAX has one function for each type: on Explicit axes the array is resharded.
    """
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def on_axes_of(wanted: AxisType) -> NamedSharding:
        others = {name for name, axis_type in types.items() if axis_type != wanted}
        return NamedSharding(mesh, without(spec, others))

    if AxisType.Explicit in types.values():
        resharded = _resharded if AxisType.Auto not in types.values() else jax.sharding.reshard
        value = resharded(value, on_axes_of(AxisType.Explicit))
    if AxisType.Auto in types.values():
        value = jax.lax.with_sharding_constraint(value, on_axes_of(AxisType.Auto))
    if memory_kind == "pinned_host":
        value = jax.device_put(value, jax.memory.Space.Host)
    return value


def _resharded(value: Any, sharding: NamedSharding) -> Any:
    """The array, resharded on Explicit axes, by a program that knows the devices of the mesh if there are any."""
    if isinstance(sharding.mesh, AbstractMesh) or not tracing():
        return jax.sharding.reshard(value, sharding)
    # If no argument is on a mesh, JAX takes the devices of a program from constraints and from the shardings of inner
    # functions, but not from `reshard`.
    return jax.jit(lambda x: jax.sharding.reshard(x, sharding), out_shardings=sharding)(value)
