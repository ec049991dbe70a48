"""An array ─► 32 bits of its values: the same under every sharding, on any number of devices and processes.

`sum(mix(bits ^ mix(position + salt)))` in uint32. `mix` is a bijection, so an element that changes always changes the
sum. Positions are mixed in, so elements that change places do too. The order of the sum does not matter.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functree.tree.bits import bits, on_device

_PRIME = 2**32 - 5  # the strides of a very large array are taken modulo a prime, so that its positions do not repeat


def digest(array: jax.Array | np.ndarray) -> jax.Array:
    """The digest of an array, which is computed where the array lies.

    Args:
        array: of any shape and dtype: random keys, dtypes of 8 bytes and of less than one byte too.

    Returns:
        A uint32 scalar on the array's devices. It is not waited for.
    """
    if not isinstance(array, jax.Array):
        # Not as one JAX array, which would have no 8 bytes without `jax_enable_x64`.
        return _digest(_words_of_numpy(array))
    return _digest_of_jax(on_device(array))


@jax.jit
def _digest_of_jax(array: jax.Array) -> jax.Array:
    return _digest(_words(array))


@jax.jit
def _digest(words: Sequence[Any]) -> jax.Array:
    """The digest of the 32-bit words of an array, each of its shape."""
    total = jnp.uint32(0)
    for salt, word in enumerate(words):
        position = _mix(_positions(word.shape) + jnp.uint32((salt + 1) * 0x9E3779B9 % 2**32))
        total += jnp.sum(_mix(word ^ position), dtype=jnp.uint32)
    return total


def _words(array: jax.Array) -> list[jax.Array]:
    """The bits of each element, as one or several uint32 arrays of the shape of the array."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return _words(jax.random.key_data(array))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return _words(array.real) + _words(array.imag)
    if dtype == jnp.bool_:
        return [array.astype(jnp.uint32)]
    if dtype.itemsize == 8:
        halves = jax.lax.bitcast_convert_type(array, jnp.uint32)
        return [halves[..., 0], halves[..., 1]]
    return [bits(array).astype(jnp.uint32)]


def _words_of_numpy(array: np.ndarray) -> list[np.ndarray]:
    """As `_words`, on the host."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # `ascontiguousarray` has at least one dimension
    if array.dtype.kind == "c":
        return _words_of_numpy(np.real(array)) + _words_of_numpy(np.imag(array))
    if array.dtype.itemsize == 8:
        halves = array[..., None].view(np.uint32)
        return [halves[..., 0], halves[..., 1]]
    # A dtype of less than one byte has one element in each byte, whose upper bits say nothing.
    return [np.asarray(word) for word in _words(jnp.asarray(array))]


def _positions(shape: Sequence[int]) -> jax.Array:
    """The index of each element among all, row by row."""
    position = jnp.zeros((), jnp.uint32)
    for dimension, stride in enumerate(strides(shape)):
        position = position + jax.lax.broadcasted_iota(jnp.uint32, shape, dimension) * jnp.uint32(stride)
    return position


def strides(shape: Sequence[int]) -> list[int]:
    """How far the index of an element moves with each dimension, modulo a prime.

    >>> strides((2, 3, 4))
    [12, 4, 1]
    """
    return [math.prod(shape[dimension + 1 :]) % _PRIME for dimension in range(len(shape))]


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 after which each bit depends on all bits: `lowbias32` of Ellis' hash-prospector (2018)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))
