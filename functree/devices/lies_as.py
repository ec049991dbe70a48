"""`lies_as` makes the compiler shard one array like another.

The function uses Shardy's `sdy.sharding_group`. JAX 0.10 offers this operation as
`jax.experimental.shard_alike`, which JAX 0.12 removed.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.interpreters import ad, batching, mlir

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
