"""An array and another one ─► the array, sharded as the other one is.

`sdy.sharding_group` of the compiler's Shardy. JAX 0.10 has it as `jax.experimental.shard_alike`,
JAX 0.12 no longer.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir

_GROUPS = itertools.count()


def lies_as(array: jax.Array, other: jax.Array) -> jax.Array:
    """The array, which the compiler shards as it shards the other one.

    The values are those of the array, and so is the derivative. Under the partitioner that came
    before Shardy it does nothing.

    Args:
        array: an array.
        other: one of its shape.
    """
    return _lies_as.bind(array, other)


_lies_as = Primitive("lies_as")


def _impl(array: jax.Array, other: jax.Array) -> jax.Array:
    return array


def _abstract(array: Any, other: Any) -> Any:
    return array


def _lower(context: Any, array: Any, other: Any) -> Sequence[Any]:
    if jax.config.values["jax_use_shardy_partitioner"]:
        group = next(_GROUPS)
        sdy.sharding_group(array, group)
        sdy.sharding_group(other, group)
    return [array]


def _batch(arrays: Sequence[Any], axes: Sequence[int | None]) -> tuple[Any, int]:
    # Both have the mapped dimension, since one that is replicated would leave it open.
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    array, other = (
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    )
    return lies_as(array, other), 0


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    tangent = tangents[0]
    if not isinstance(tangent, ad.Zero):
        tangent = lies_as(tangent, primals[1])
    return lies_as(*primals), tangent


def _transpose(cotangent: Any, array: Any, other: Any) -> Sequence[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent, None]
    return [lies_as(cotangent, other), None]


_lies_as.def_impl(_impl)
_lies_as.def_abstract_eval(_abstract)
mlir.register_lowering(_lies_as, _lower, cacheable=False)
batching.primitive_batchers[_lies_as] = _batch
ad.primitive_jvps[_lies_as] = _jvp
ad.primitive_transposes[_lies_as] = _transpose
