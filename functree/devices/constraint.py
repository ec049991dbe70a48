"""`with_constraint` constrains an array to a spec, and `lies_as` shards it like another array.

`with_constraint` takes a mesh with mesh axes of any type. `lies_as` uses Shardy's
`sdy.sharding_group`. JAX 0.10 offers this operation as `jax.experimental.shard_alike`, which JAX
0.12 removed.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from functree.devices.meshes import tracing, without
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


# An array that is sharded like another

_GROUPS = itertools.count()

# The first operation is a shard_map, and the second calls a function that may end in a shard_map.
# The partitioner fails if the result of such an operation is in a group (JAX 0.10 and 0.12), so a
# barrier separates the operation from the group. A barrier after every gradient would prevent
# fusion.
_OPAQUE = frozenset({"sdy.manual_computation", "func.call"})


def lies_as(array: jax.Array, other: jax.Array) -> jax.Array:
    """Return the first array, which the compiler then shards like the second.

    Values and derivatives are unchanged. With `jax_use_shardy_partitioner=False`, the function does
    nothing.

    Args:
        array: an array.
        other: an array of the same shape.
    """
    return _lies_as.bind(array, other)[0]


# Both arrays are results. Otherwise, if this operation were compiled alone, the other array's
# sharding would not affect the result.
_lies_as = Primitive("lies_as")
_lies_as.multiple_results = True


def _abstract(array: Any, other: Any) -> Sequence[Any]:
    return [array, other]


def _lower(context: Any, array: Any, other: Any) -> Sequence[Any]:
    if jax.config.values["jax_use_shardy_partitioner"]:
        if getattr(array.owner, "name", None) in _OPAQUE:
            (array,) = stablehlo.OptimizationBarrierOp([array]).results
        group = next(_GROUPS)
        sdy.sharding_group(array, group)
        sdy.sharding_group(other, group)
    return [array, other]


def _batch(arrays: Sequence[Any], axes: Sequence[int | None]) -> tuple[Any, Sequence[int]]:
    # Both arrays get the mapped dimension, since an array without this dimension would not
    # determine the dimension's sharding.
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    array, other = (
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    )
    return _lies_as.bind(array, other), (0, 0)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    # The compiler chooses how tangents are sharded. The outer `grad` lays out a gradient of a
    # gradient.
    return _lies_as.bind(*primals), tangents


# Outside a trace, the operation is compiled alone, and its result is sharded like the other array.
_lies_as.def_impl(jax.jit(_lies_as.bind))
_lies_as.def_abstract_eval(_abstract)
mlir.register_lowering(_lies_as, _lower, cacheable=False)
batching.primitive_batchers[_lies_as] = _batch
ad.primitive_jvps[_lies_as] = _jvp
