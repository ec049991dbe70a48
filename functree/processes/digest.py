"""An array ─► 32 bits of its values, the same under every sharding and on any number of devices;
and the arrays whose copies differ.

`sum(mix(bits ^ mix(position + salt)))` in uint32. `mix` is a bijection, so an element that changes
always changes the sum. Positions are mixed in, so elements that change places do too. The order of
the sum does not matter, so each device computes that of its own part, and no device waits for
another one.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from functree.devices.specs import mesh_axes, of_rank
from functree.errors import Problem
from functree.processes.agreement import Agreement
from functree.processes.exchange import texts_of_all
from functree.tree.arrays import bits, is_key, on_device
from functree.tree.paths import Path

# Strides are taken modulo a prime, and not modulo 2**32: there a stride of 2**32 would be 0, and
# all rows of such an array would have the same positions.
_PRIME = 2**32 - 5

Bounds = tuple[tuple[int, int], ...]
"""A part of an array: for each dimension, its beginning and its end."""


class Part(NamedTuple):
    """The digest of the part of an array that one device has.

    The digest of the array is the sum of those of its parts.

    Attributes:
        bounds: which part it is. Copies of a part have the same bounds.
        number: a uint32 array of one element, on the device.
    """

    bounds: Bounds
    number: jax.Array

    def read(self) -> int:
        """The number. This waits for the device."""
        return int(np.asarray(self.number).reshape(()))


def digest_parts(array: jax.Array | np.ndarray | np.generic) -> list[Part]:
    """Start to compute the digests of the parts of an array that the devices of this process have.

    Copies of a part are computed each for itself, since their values may differ.

    Args:
        array: of any shape and dtype: random keys, dtypes of 8 bytes and of less than one byte too.
    """
    # Under the mesh of a user's `jax.set_mesh`, JAX would refuse arrays that are on other devices.
    with jax.set_mesh(_NO_MESH):
        if isinstance(array, jax.Array):
            return _parts_of_jax(array)
        return [_whole_of_numpy(np.asarray(array))]


_NO_MESH = Mesh(np.empty((), object), ())


def _whole_of_numpy(array: np.ndarray) -> Part:
    # As words of 32 bits: in JAX it would lose elements of 8 bytes without `jax_enable_x64`.
    words = _words_of_numpy(array)
    begins = np.zeros(array.ndim, np.uint32)
    bounds = _bounds((slice(None),) * array.ndim, array.shape)
    return Part(bounds, _digest(words, begins, strides(array.shape)))


def _parts_of_jax(array: jax.Array) -> list[Part]:
    array = on_device(array)
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    steps = strides(array.shape)
    if isinstance(array.sharding, NamedSharding):
        return _parts_on_mesh(array, array.sharding, steps)
    parts: list[Part] = []
    for shard in array.addressable_shards:
        bounds = _bounds(shard.index, array.shape)
        begins = np.array([begin for begin, _ in bounds], np.uint32)
        parts.append(Part(bounds, _digest_of_part(shard.data, begins, steps)))
    return parts


def _parts_on_mesh(array: jax.Array, sharding: NamedSharding, steps: tuple[int, ...]) -> list[Part]:
    """The parts of an array on a mesh, computed by one program for all devices."""
    numbers = _digests_on_mesh(array, sharding, steps).addressable_shards
    # The shards of two arrays need not be in one order.
    by_device = {number.device: number.data for number in numbers}
    parts: list[Part] = []
    for shard in array.addressable_shards:
        parts.append(Part(_bounds(shard.index, array.shape), by_device[shard.device]))
    return parts


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def digest(array: jax.Array | np.ndarray | np.generic) -> int:
    """The digest of an array of which all parts are in this process."""
    # By bounds, so that copies of a part count once.
    return digest_of({part.bounds: part.read() for part in digest_parts(array)})


def digest_of(parts: Mapping[Bounds, int]) -> int:
    """The digest of an array, from those of its parts."""
    return sum(parts.values()) % 2**32


@partial(jax.jit, static_argnums=(1, 2))
def _digests_on_mesh(
    array: jax.Array, sharding: NamedSharding, steps: tuple[int, ...]
) -> jax.Array:
    """The digest of each device's part."""
    mesh, spec = sharding.mesh, of_rank(sharding.spec, array.ndim)

    def of_part(part: jax.Array) -> jax.Array:
        begins: list[jax.Array] = []
        for entry, size in zip(spec, part.shape, strict=True):
            axes = mesh_axes(entry)
            index = jnp.uint32(0)
            if axes:
                index = jax.lax.axis_index(axes).astype(jnp.uint32)
            begins.append(index * jnp.uint32(size))
        return _digest(_words(part), begins, steps)[None]

    # One number for each device, also where several devices have copies of one part: so it is seen
    # if the copies differ.
    every = PartitionSpec(mesh.axis_names)
    return jax.shard_map(of_part, mesh=mesh, in_specs=spec, out_specs=every, check_vma=False)(array)


@partial(jax.jit, static_argnums=2)
def _digest_of_part(part: jax.Array, begins: np.ndarray, steps: tuple[int, ...]) -> jax.Array:
    return _digest(_words(part), begins, steps)


@partial(jax.jit, static_argnums=2)
def _digest(
    words: Sequence[jax.Array] | Sequence[np.ndarray],
    begins: Sequence[jax.Array] | np.ndarray,
    steps: tuple[int, ...],
) -> jax.Array:
    """The digest of a part of an array.

    Args:
        words: the 32-bit words of its elements, each with the shape of the part.
        begins: where the part begins, in each dimension.
        steps: the strides of the whole array.
    """
    total = jnp.uint32(0)
    # The salt tells the words of one element apart: else the two halves of a float64 could be
    # swapped unseen.
    for salt, word in enumerate(words):
        position = jnp.full((), (salt + 1) * 0x9E3779B9 % 2**32, jnp.uint32)
        for dimension, step in enumerate(steps):
            index = jax.lax.broadcasted_iota(jnp.uint32, word.shape, dimension) + begins[dimension]
            position = position + index * jnp.uint32(step)
        total += jnp.sum(_mix(jnp.bitwise_xor(word, _mix(position))), dtype=jnp.uint32)
    return total


def _words(array: jax.Array) -> list[jax.Array]:
    """The bits of each element, as one or several uint32 arrays of the shape of the array."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return _words(array.real) + _words(array.imag)
    if dtype == jnp.bool_:
        return [array.astype(jnp.uint32)]
    if dtype.itemsize == 8:
        # Into words and not into uint64, which needs `jax_enable_x64`.
        halves = jax.lax.bitcast_convert_type(array, jnp.uint32)
        return [halves[..., 0], halves[..., 1]]
    return [bits(array).astype(jnp.uint32)]


def _words_of_numpy(array: np.ndarray) -> list[np.ndarray]:
    """As `_words`, on the host."""
    # `ascontiguousarray` makes an array of one dimension of a scalar.
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.kind == "c":
        return _words_of_numpy(np.real(array)) + _words_of_numpy(np.imag(array))
    if array.dtype.itemsize == 8:
        halves = array[..., None].view(np.uint32)
        return [halves[..., 0], halves[..., 1]]
    # By JAX: numpy has the elements of a dtype of less than one byte in one byte each, of which the
    # upper bits say nothing.
    return list(map(np.asarray, _words(jnp.asarray(array))))


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """How far the position of an element moves with each dimension, modulo a prime.

    >>> strides((2, 3, 4))
    (12, 4, 1)
    """
    steps: list[int] = []
    for dimension in range(len(shape)):
        steps.append(math.prod(shape[dimension + 1 :]) % _PRIME)
    return tuple(steps)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 after which each bit depends on all bits of the argument.

    It is `lowbias32` of the hash prospector: https://nullprogram.com/blog/2018/07/31/.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))


# Copies differ after a fault of a device, or a `shard_map` with `check_vma=False` whose result was
# not the same on all devices.
_PLACE = "place it anew, with `ft.shard`"


def digests_of(
    arrays: Mapping[str, jax.Array | np.ndarray | np.generic], remedy: str = _PLACE
) -> tuple[dict[str, str], list[Problem]]:
    """The digests of some arrays. All processes call this, with arrays of the same names.

    Args:
        arrays: arrays by the text of their path.
        remedy: what to do about copies with other values.

    Returns:
        The digest of each array, as 8 hexadecimal digits, and a problem for each that has copies of
            other values.
    """
    with Agreement("the copies of arrays are not compared"):
        # All are started before one is read, so that the devices do not wait for this process.
        started = {name: digest_parts(array) for name, array in arrays.items()}
        read: dict[str, list[tuple[Bounds, int]]] = {}
        for name, parts in started.items():
            read[name] = [(part.bounds, part.read()) for part in parts]
    found, problems = compared(read, remedy)
    return {name: f"{digest_of(parts):08x}" for name, parts in found.items()}, problems


def compared(
    parts: Mapping[str, Iterable[tuple[Bounds, int]]], remedy: str
) -> tuple[dict[str, dict[Bounds, int]], list[Problem]]:
    """The parts of arrays in all processes, and a problem for each array whose copies differ.

    All processes call this, with the same names.

    Args:
        parts: for each array, by the text of its path, the parts in this process with a digest of
            each.
        remedy: what to do about copies with different values.
    """
    mine = {name: sorted(set(own)) for name, own in parts.items()}
    told = list(map(json.loads, texts_of_all(json.dumps(mine))))
    found: dict[str, dict[Bounds, int]] = {}
    problems: list[Problem] = []
    for name in mine:
        numbers = found[name] = {}
        others: set[int] = set()  # the processes with another value for a part than was met before
        for process, arrays in enumerate(told):
            for bounds, number in arrays[name]:
                # JSON has lists in the place of tuples.
                if numbers.setdefault(tuple(map(tuple, bounds)), number) != number:
                    others.add(process)
        if others:
            where = f" in process {min(others)}" if len(told) > 1 else ""
            why = f"has copies that have different values{where}, so it is not one array"
            problems.append(Problem(Path(name), None, "", why, remedy))
    return found, problems
