"""An array ─► 32 bits of its values: the same under every sharding, on any number of devices and processes.

`sum(mix(bits ^ mix(position + salt)))` in uint32. `mix` is a bijection, so an element that changes always changes the
sum. Positions are mixed in, so elements that change places do too. The order of the sum does not matter, so each device
computes that of its own part, and no device waits for another one.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from functree.layout.specs import mesh_axes, of_rank
from functree.tree.bits import bits, is_key, on_device

_PRIME = 2**32 - 5  # the strides of a very large array are taken modulo a prime, so that its positions do not repeat

Bounds = tuple[tuple[int, int], ...]
"""A part of an array: for each dimension, its beginning and its end."""


class Part(NamedTuple):
    """The digest of the part of an array that one device has. That of the array is the sum of those of its parts.

    Attributes:
        bounds: which part it is. Copies of a part have the same bounds.
        number: a uint32 array of one element, on the device.
    """

    bounds: Bounds
    number: Any

    def read(self) -> int:
        """The number. This waits for the device."""
        return int(np.asarray(self.number).reshape(()))


def digest_parts(array: jax.Array | np.ndarray | np.generic) -> list[Part]:
    """Start to compute the digests of the parts of an array that the devices of this process have, copies among them.

    Args:
        array: of any shape and dtype: random keys, dtypes of 8 bytes and of less than one byte too.
    """
    if not isinstance(array, jax.Array):
        # Not as one JAX array, which would have no 8 bytes without `jax_enable_x64`.
        words, whole = _words_of_numpy(np.asarray(array)), tuple((0, size) for size in array.shape)
        return [Part(whole, _digest(words, np.zeros(array.ndim, np.uint32), strides(array.shape)))]
    array = on_device(array)
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    steps, shards = strides(array.shape), array.addressable_shards
    bounds = [_bounds(shard.index, array.shape) for shard in shards]
    if isinstance(array.sharding, NamedSharding):
        numbers = _digests_on_mesh(array, array.sharding, steps).addressable_shards
        by_device = {number.device: number.data for number in numbers}
        return [Part(own, by_device[shard.device]) for own, shard in zip(bounds, shards, strict=True)]
    begins = [np.array([begin for begin, _ in own], np.uint32) for own in bounds]
    numbers = [_digest_of_part(shard.data, begin, steps) for shard, begin in zip(shards, begins, strict=True)]
    return list(map(Part, bounds, numbers))


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def digest(array: jax.Array | np.ndarray | np.generic) -> int:
    """The digest of an array of which all parts are in this process."""
    return joined({part.bounds: part.read() for part in digest_parts(array)})


def joined(parts: Mapping[Bounds, int]) -> int:
    """The digest of an array, from those of its parts."""
    return sum(parts.values()) % 2**32


@partial(jax.jit, static_argnums=(1, 2))
def _digests_on_mesh(array: jax.Array, sharding: NamedSharding, steps: tuple[int, ...]) -> jax.Array:
    """The digest of each device's part."""
    mesh, spec = sharding.mesh, of_rank(sharding.spec, array.ndim)
    axes = [mesh_axes(entry) for entry in spec]

    def of_part(part: jax.Array) -> jax.Array:
        begins = [
            jax.lax.axis_index(names).astype(jnp.uint32) * jnp.uint32(size) if names else jnp.uint32(0)
            for names, size in zip(axes, part.shape, strict=True)
        ]
        return _digest(_words(part), begins, steps)[None]

    every = PartitionSpec(mesh.axis_names)
    return jax.shard_map(of_part, mesh=mesh, in_specs=spec, out_specs=every, check_vma=False)(array)


@partial(jax.jit, static_argnums=2)
def _digest_of_part(part: jax.Array, begins: Any, steps: tuple[int, ...]) -> jax.Array:
    return _digest(_words(part), begins, steps)


@partial(jax.jit, static_argnums=2)
def _digest(words: Sequence[Any], begins: Sequence[Any], steps: tuple[int, ...]) -> jax.Array:
    """The digest of a part of an array.

    Args:
        words: the 32-bit words of its elements, each with the shape of the part.
        begins: where the part begins, in each dimension.
        steps: the strides of the whole array.
    """
    total = jnp.uint32(0)
    for salt, word in enumerate(words):
        position = jnp.full((), (salt + 1) * 0x9E3779B9 % 2**32, jnp.uint32)
        for dimension, step in enumerate(steps):
            index = jax.lax.broadcasted_iota(jnp.uint32, word.shape, dimension) + begins[dimension]
            position = position + index * jnp.uint32(step)
        total += jnp.sum(_mix(word ^ _mix(position)), dtype=jnp.uint32)
    return total


def _words(array: jax.Array) -> list[jax.Array]:
    """The bits of each element, as one or several uint32 arrays of the shape of the array."""
    dtype = array.dtype
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


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """How far the position of an element moves with each dimension, modulo a prime.

    >>> strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dimension + 1 :]) % _PRIME for dimension in range(len(shape)))


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 after which each bit depends on all bits: `lowbias32` of Ellis' hash-prospector (2018)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))
