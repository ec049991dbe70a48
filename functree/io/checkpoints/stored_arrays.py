"""An array ─► the array that is stored for it, and back.

Random keys are stored as words, and dtypes that zarr lacks as bytes. An array and what is stored
for it have the same bits in the same order, so they have the same digest.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from functree.devices.specs import of_rank
from functree.report.json_text import key_implementation
from functree.tree.arrays import bits, is_key, keys_of, on_device, unsigned, with_sharding

StoredArray = jax.Array | np.ndarray

# Of the dtypes with less than a byte, zarr has some in some versions. Each element of these is
# stored as a byte, so that what one version writes another one reads.
_AS_BYTES = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3")

NOT_STORED = ("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn")
"""The dtypes that JAX names and XLA cannot convert."""


def stored_form(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and the dtype that an array is stored with."""
    if is_key(dtype):
        # The words of a key are one more dimension; how many there are is the implementation's.
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return words.shape, words.dtype
    if str(dtype) in _AS_BYTES:
        return shape, np.dtype(np.uint8)
    return shape, np.dtype(dtype)


def to_stored(value: jax.Array | np.ndarray | np.generic) -> StoredArray:
    """The array that is stored for an array, with the same sharding."""
    shape, dtype = stored_form(value.shape, value.dtype)
    if not isinstance(value, jax.Array):
        return np.asarray(value).view(dtype)  # numpy has a byte for each element anyway
    if value.dtype == dtype:
        return value
    # Computed where the array is, shard by shard: nothing is moved to be saved.
    return with_sharding(_to_stored, stored_sharding(value.sharding, len(shape)), on_device(value))


def from_stored(stored: StoredArray, dtype: Any, sharding: Sharding | None) -> StoredArray:
    """The array of a dtype that was stored so.

    Args:
        stored: what was stored, with the sharding of what is stored for such an array.
        dtype: the dtype of the array.
        sharding: the sharding of the array; None for what is in the memory of the host.
    """
    if stored.dtype == dtype:
        return stored
    if isinstance(stored, jax.Array) and sharding is not None:
        return with_sharding(_reader(dtype), sharding, on_device(stored))
    # In the memory of the host: a key is an array of JAX in any case, and all else stays numpy's.
    if is_key(dtype):
        return _reader(dtype)(jnp.asarray(stored))
    return np.asarray(stored).view(dtype)


def stored_sharding(sharding: Sharding, ndim: int) -> Sharding:
    """The sharding of what is stored, of `ndim` dimensions, for an array with a sharding: further
    ones are whole."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=of_rank(sharding.spec, ndim))


def _to_stored(value: jax.Array) -> jax.Array:
    if is_key(value.dtype):
        return jax.random.key_data(value)
    return bits(value).astype(jnp.uint8)


# Remembered, since a new function would be compiled again for each array.
@functools.cache
def _reader(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """The function from what is stored to an array of a dtype."""
    if is_key(dtype):
        return keys_of(key_implementation(dtype) or "")
    return lambda stored: jax.lax.bitcast_convert_type(stored.astype(unsigned(dtype)), dtype)
