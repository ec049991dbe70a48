"""An array ─► the bits of its elements, as unsigned integers."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike


def is_key(dtype: DTypeLike) -> bool:
    """Whether a dtype is that of typed random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def unsigned(dtype: DTypeLike) -> jnp.dtype:
    """The unsigned integers with as many bits as a dtype of real numbers has."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(f"uint{jnp.iinfo(dtype).bits}")
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


def bits(array: jax.Array) -> jax.Array:
    """The bits of each element of an array of real numbers."""
    return jax.lax.bitcast_convert_type(array, unsigned(array.dtype))


def on_device(array: jax.Array) -> jax.Array:
    """An array in the memory of its devices, where it can be computed with."""
    if array.sharding.memory_kind in (None, "device"):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind("device"))


@functools.cache
def keys_of(impl: str) -> Callable[[jax.Array], jax.Array]:
    """The function from words to typed keys of an implementation; one function, so that it is
    compiled once."""
    return functools.partial(jax.random.wrap_key_data, impl=impl)


def with_sharding(fun: Callable[..., jax.Array], sharding: Sharding, *args: jax.Array) -> jax.Array:
    """The result of a function of arrays, with a sharding; also if other processes have parts of
    it."""
    kind = sharding.memory_kind
    if kind in (None, "device"):
        return _jitted(fun, sharding)(*args)
    return jax.device_put(_jitted(fun, sharding.with_memory_kind("device"))(*args), sharding)


@functools.lru_cache(maxsize=256)
def _jitted(fun: Callable[..., jax.Array], sharding: Sharding) -> Callable[..., jax.Array]:
    return jax.jit(fun, out_shardings=sharding)
