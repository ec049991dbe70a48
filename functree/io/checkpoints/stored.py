"""An array ─► the array that is stored for it, and back: words for random keys, bytes for dtypes that zarr lacks.

The two have the same bits in the same order, so they have the same digest.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from functree.layout.plan.codec import key_implementation
from functree.layout.specs import of_rank
from functree.tree.bits import bits, on_device, unsigned

# Of the dtypes with less than a byte, zarr has some in some versions. Each element of these is stored as a byte.
_AS_BYTES = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3")

NOT_STORED = ("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn")
"""The dtypes that JAX names and XLA cannot convert."""


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def stored_form(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and the dtype that an array is stored with."""
    if is_key(dtype):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return words.shape, words.dtype
    return shape, np.dtype(np.uint8 if str(dtype) in _AS_BYTES else dtype)


def to_stored(value: jax.Array | np.ndarray | np.generic) -> jax.Array | np.ndarray:
    """The array that is stored for an array, with the same sharding."""
    shape, dtype = stored_form(value.shape, value.dtype)
    if not isinstance(value, jax.Array):
        return np.asarray(value).view(dtype)
    if value.dtype == dtype:
        return value
    stored = _to_stored(on_device(value))
    return jax.device_put(stored, stored_sharding(value.sharding, len(shape)))


def from_stored(stored: jax.Array | np.ndarray, dtype: Any) -> jax.Array | np.ndarray:
    """The array of a dtype that was stored so: in the memory of its devices, or of numpy if what was stored is."""
    if stored.dtype == dtype:
        return stored
    if isinstance(stored, jax.Array):
        return _from_stored(on_device(stored), dtype)
    return _from_stored(jnp.asarray(stored), dtype) if is_key(dtype) else stored.view(dtype)


def stored_sharding(sharding: Sharding, ndim: int) -> Sharding:
    """The sharding of what is stored, of `ndim` dimensions, for an array with a sharding: further ones are whole."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=of_rank(sharding.spec, ndim))


@jax.jit
def _to_stored(value: jax.Array) -> jax.Array:
    return jax.random.key_data(value) if is_key(value.dtype) else bits(value).astype(jnp.uint8)


@partial(jax.jit, static_argnums=1)
def _from_stored(stored: jax.Array, dtype: Any) -> jax.Array:
    if is_key(dtype):
        return jax.random.wrap_key_data(stored, impl=key_implementation(dtype))
    return jax.lax.bitcast_convert_type(stored.astype(unsigned(dtype)), dtype)
