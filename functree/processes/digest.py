"""A digest is 32 bits computed from an array's values, and does not depend on the sharding.

The digest is `sum(mix(bits ^ mix(position + salt)))` in uint32. `mix` is a bijection, so changing
one 32-bit word always changes the sum. Positions are mixed in, so swapping elements almost always
changes the sum too. The order of summation does not matter, so each device sums its own shard
without waiting for the others.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from functree.devices.meshes import Device, mesh_axes, of_rank
from functree.errors import Problem
from functree.processes.agreement import Agreement
from functree.processes.exchange import texts_of_all
from functree.tree.arrays import bits, is_key, on_device
from functree.tree.paths import Path

# Strides are taken modulo a prime. Modulo 2**32, a stride of 2**32 would be 0, and all rows of such
# an array would have the same positions.
_PRIME = 2**32 - 5

Bounds = tuple[tuple[int, int], ...]
"""The start and stop of a shard in each dimension of the array."""

Part = tuple[Bounds, jax.Array]
"""The bounds of a shard, and its digest: one uint32 on the shard's device.

Copies of a shard have the same bounds. An array's digest is the sum over its distinct shards.
"""


def digest_parts(array: jax.Array | np.ndarray | np.generic) -> list[Part]:
    """Start computing the digests of an array's shards in this process.

    Each copy of a shard gets its own digest, since the values of copies may differ.

    Args:
        array: an array of any shape and dtype, including random keys.
    """
    # Under the user's `jax.set_mesh`, JAX would refuse arrays on other devices.
    with jax.set_mesh(_NO_MESH):
        if isinstance(array, jax.Array):
            return _parts_of_jax(array)
        array = np.asarray(array)
        begins = np.zeros(array.ndim, np.uint32)
        bounds = _bounds((slice(None),) * array.ndim, array.shape)
        return [(bounds, _digest(_words_of_numpy(array), begins, strides(array.shape)))]


_NO_MESH = Mesh(np.empty((), object), ())


def _parts_of_jax(array: jax.Array) -> list[Part]:
    array = on_device(array)
    if is_key(array.dtype):
        array = jax.random.key_data(array)
    shape, shards, steps = array.shape, array.addressable_shards, strides(array.shape)
    # The shards of an array and of its digests may be in different orders.
    by_device: dict[Device, jax.Array] = {}
    if isinstance(array.sharding, NamedSharding):
        for number in _digests_on_mesh(array, array.sharding, steps).addressable_shards:
            by_device[number.device] = number.data
    else:
        for shard in shards:
            begins = np.array([begin for begin, _ in _bounds(shard.index, shape)], np.uint32)
            by_device[shard.device] = _digest_of_part(shard.data, begins, steps)
    return [(_bounds(shard.index, shape), by_device[shard.device]) for shard in shards]


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def digest(array: jax.Array | np.ndarray | np.generic) -> int:
    """Compute the digest of an array whose shards are all in this process."""
    # The digests are keyed by bounds, so that copies of a shard are counted once.
    return digest_of({bounds: number.item() for bounds, number in digest_parts(array)})


def digest_of(parts: Mapping[Bounds, int]) -> int:
    """Add the digests of an array's distinct shards, modulo 2**32."""
    return sum(parts.values()) % 2**32


@partial(jax.jit, static_argnums=(1, 2))
def _digests_on_mesh(
    array: jax.Array, sharding: NamedSharding, steps: tuple[int, ...]
) -> jax.Array:
    """Compute the digest of each device's shard."""
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

    # Each device returns a number, even for a copy of a shard, so that differing copies are found.
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
    """Compute the digest of a shard.

    Args:
        words: the 32-bit words of the shard's elements. For each word of an element, there is one
            array with the shard's shape.
        begins: the start of the shard in each dimension of the whole array.
        steps: the strides of the whole array.
    """
    total = jnp.uint32(0)
    # Without the salt, swapping the halves of a float64 would not change the digest.
    for salt, word in enumerate(words):
        position = jnp.full((), (salt + 1) * 0x9E3779B9 % 2**32, jnp.uint32)
        for dimension, step in enumerate(steps):
            index = jax.lax.broadcasted_iota(jnp.uint32, word.shape, dimension) + begins[dimension]
            position = position + index * jnp.uint32(step)
        total += jnp.sum(_mix(jnp.bitwise_xor(word, _mix(position))), dtype=jnp.uint32)
    return total


def _words(array: jax.Array) -> list[jax.Array]:
    """Return the bits of each element, as uint32 arrays with the array's shape."""
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return _words(array.real) + _words(array.imag)
    if dtype == jnp.bool_:
        return [array.astype(jnp.uint32)]
    if dtype.itemsize == 8:
        # Elements are split into two words, since uint64 needs `jax_enable_x64`.
        halves = jax.lax.bitcast_convert_type(array, jnp.uint32)
        return [halves[..., 0], halves[..., 1]]
    return [bits(array).astype(jnp.uint32)]


def _words_of_numpy(array: np.ndarray) -> list[np.ndarray]:
    """Return the bits of each element like `_words`, computed on the host.

    JAX would truncate elements of 8 bytes without `jax_enable_x64`.
    """
    if array.dtype.itemsize >= 8:
        # `ascontiguousarray` adds a dimension to a scalar.
        words = np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint32)
        return list(np.moveaxis(words, -1, 0))
    # JAX extracts the bits, since NumPy stores elements smaller than a byte in one byte each, with
    # arbitrary upper bits.
    return list(map(np.asarray, _words(jnp.asarray(array))))


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a shape in elements, modulo a prime.

    >>> strides((2, 3, 4))
    (12, 4, 1)
    """
    steps: list[int] = []
    for dimension in range(len(shape)):
        steps.append(math.prod(shape[dimension + 1 :]) % _PRIME)
    return tuple(steps)


def _mix(x: jax.Array) -> jax.Array:
    """Apply a bijection of uint32. Each bit of the result depends on all bits of the argument.

    The bijection is `lowbias32` from Hash Prospector: https://nullprogram.com/blog/2018/07/31/.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))


# Copies may differ after a hardware fault, or after a `shard_map` with `check_vma=False` whose
# result was not the same on all devices.
_PLACE = (
    "restore the array from a checkpoint, or copy the array to the host and place it again with "
    "`ft.shard`"
)


def digests_of(
    arrays: Mapping[str, jax.Array | np.ndarray | np.generic], remedy: str = _PLACE
) -> tuple[dict[str, str], list[Problem]]:
    """Compute digests of arrays. All processes must call this function with the same names.

    Args:
        arrays: arrays, by their paths as strings.
        remedy: the remedy for copies that differ.

    Returns:
        The digest of each array as 8 hexadecimal digits, and a problem for each array whose copies
            differ.
    """
    with Agreement("the copies of arrays cannot be compared"):
        # All computations start before the first digest is read, so that no device is idle.
        started = {name: digest_parts(array) for name, array in arrays.items()}
        read: dict[str, list[tuple[Bounds, int]]] = {}
        for name, parts in started.items():
            read[name] = [(bounds, number.item()) for bounds, number in parts]
    merged, problems = compared(read, remedy)
    return {name: f"{digest_of(parts):08x}" for name, parts in merged.items()}, problems


def compared(
    parts: Mapping[str, Iterable[tuple[Bounds, int]]], remedy: str
) -> tuple[dict[str, dict[Bounds, int]], list[Problem]]:
    """Collect the digests of shards from all processes, and compare the copies of each shard.

    All processes must call this function with the same names.

    Args:
        parts: the digests of this process's shards, by the array's path as a string.
        remedy: the remedy for copies that differ.

    Returns:
        The digests of all shards of each array, and a problem for each array whose copies differ.
    """
    mine = {name: sorted(set(digests)) for name, digests in parts.items()}
    told = list(map(json.loads, texts_of_all(json.dumps(mine))))
    merged: dict[str, dict[Bounds, int]] = {}
    problems: list[Problem] = []
    for name in mine:
        numbers = merged[name] = {}
        others: set[int] = set()  # the processes with a digest that differs from an earlier one
        for process, arrays in enumerate(told):
            for bounds, number in arrays[name]:
                # JSON returns tuples as lists.
                if numbers.setdefault(tuple(map(tuple, bounds)), number) != number:
                    others.add(process)
        if others:
            where = f", as in process {min(others)}" if len(told) > 1 else ""
            why = f"has copies with different values{where}"
            problems.append(Problem(Path(name), None, "", why, remedy))
    return merged, problems
