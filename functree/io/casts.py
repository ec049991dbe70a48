"""These functions cast arrays, and count the values that the new dtype cannot hold.

Rounding a float is not a loss. A value is lost if it is out of range, or if its nonzero imaginary
part is dropped. A cast to an integer dtype loses fractions and NaNs. A cast from an integer dtype
to a float dtype loses the integers that are rounded.
"""

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from functree.errors import count, listed, warn
from functree.tree.arrays import on_device
from functree.tree.paths import Path

# A NumPy or JAX array. Both have the methods that are used here.
_Array = Any


class Loss(NamedTuple):
    """The number of values that an array lost in a cast, with the dtypes.

    Attributes:
        path: the array's path.
        size: the number of its elements.
        before: its dtype before the cast.
        after: its dtype after the cast.
        lost: how many of its values were lost. For an array on devices, this number is a JAX array,
            so that the next cast does not wait for the count.
    """

    path: Path
    size: int
    before: Any
    after: Any
    lost: int | jax.Array

    def __str__(self) -> str:
        return f"`{self.path}` lost {int(self.lost)} of {self.size} ({self.before} to {self.after})"


def warn_of_losses(where: object, losses: Iterable[Loss], remedy: str) -> None:
    """Warn about arrays that lost values, and list their paths."""
    found = [str(loss) for loss in losses if int(loss.lost)]
    if found:
        warn(
            f"{where}: {count(len(found), 'array')} lost values that the new dtype cannot hold: "
            f"{listed(found)}; {remedy}"
        )


def cast_on_devices(
    array: jax.Array, dtype: np.dtype, sharding: Sharding
) -> tuple[jax.Array, int | jax.Array]:
    """Cast an array and give it a sharding. Also return how many values the dtype cannot hold."""
    where = sharding
    if sharding.memory_kind not in (None, "device"):
        where = sharding.with_memory_kind("device")
    cast, lost = _caster(dtype, where)(on_device(array))
    return jax.device_put(cast, sharding), lost


def cast_on_host(array: _Array, dtype: Any) -> _Array:
    """Cast an array in host memory."""
    # NumPy would warn about only some losses, without naming the array.
    with np.errstate(all="ignore"):
        return _cast(array, dtype)


# The number of elements that are checked at once. Masks for a whole array would take several times
# the array's memory.
_BLOCK = 2**20


def lost_on_host(array: np.ndarray, dtype: np.dtype) -> int:
    """Count the values of a NumPy array that a dtype cannot hold."""
    if not _can_lose(array.dtype, dtype):
        return 0
    flat, lost = array.reshape(-1), 0
    with np.errstate(all="ignore"):
        if _is_in_range(array, dtype):
            return 0
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK]
            lost += int(_lost(block, _cast(block, dtype), np).sum())
    return lost


def _is_in_range(array: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether the smallest and the largest value show that no value is lost.

    For weights that are cast to smaller float dtypes, this is much faster than checking each value.
    """
    if not array.size or not (_is_float(array.dtype) and _is_float(dtype)):
        return False
    # If the array contains a NaN, the comparisons are False.
    info = jnp.finfo(dtype)
    return float(info.min) <= float(array.min()) and float(array.max()) <= float(info.max)


# The function is cached, since JAX compiles each new function again.
@functools.lru_cache(maxsize=256)
def _caster(
    dtype: np.dtype, sharding: Sharding
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Build one program that casts an array and counts the lost values."""

    def cast_and_count(array: jax.Array) -> tuple[jax.Array, jax.Array]:
        cast = _cast(array, dtype)
        if not _can_lose(array.dtype, dtype):
            return cast, jnp.uint32(0)
        return cast, _lost(array, cast, jnp).sum(dtype=jnp.uint32)

    whole = None
    if isinstance(sharding, NamedSharding):
        whole = sharding.update(spec=PartitionSpec())  # so that all processes can read the count
    return jax.jit(cast_and_count, out_shardings=(sharding, whole))


def _cast(array: _Array, dtype: np.dtype) -> _Array:
    if array.dtype == dtype:
        return array
    if _is_complex(array.dtype) and not _is_complex(dtype):
        array = array.real  # NumPy and JAX would both warn, without naming the array
    return array.astype(dtype)


def _can_lose(before: Any, after: Any) -> bool:
    """Return whether a cast may lose values. Rounding a float is not a loss."""
    if before == after:  # for example, dtypes of random keys, which NumPy does not have
        return False
    if jnp.issubdtype(before, jnp.integer) and jnp.issubdtype(after, jnp.inexact):
        # NumPy treats this cast as safe, although large integers are rounded.
        return int(jnp.iinfo(before).max).bit_length() > jnp.finfo(after).nmant + 1
    return not np.can_cast(before, after)


def _lost(x: _Array, y: _Array, xp: ModuleType) -> _Array:
    """Return a mask of the values that a cast has lost.

    Args:
        x: the array before the cast.
        y: the array after the cast.
        xp: `numpy` or `jax.numpy`.
    """
    if _is_complex(x.dtype):
        lost = _lost(x.real, y.real, xp)
        return lost | (_lost(x.imag, y.imag, xp) if _is_complex(y.dtype) else x.imag != 0)
    dtype = y.real.dtype
    x, y = _wide(x), _wide(y.real)
    if _is_float(x.dtype) and _is_float(dtype):
        lost = (xp.isfinite(x) != xp.isfinite(y)) | (xp.isnan(x) != xp.isnan(y))
        if np.dtype(dtype).itemsize == 1:
            # Some one-byte dtypes replace infinity with their largest value. Floats up to half a
            # step above that value are rounded to it.
            info = jnp.finfo(dtype)
            lost |= xp.isfinite(x) & (abs(x) > float(info.max) * (1 + float(info.eps)))
        return lost
    if _is_float(x.dtype):
        low, high = 0, 1
        if not jnp.issubdtype(dtype, jnp.bool_):
            low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        # Compare with the next power of two, which a float represents exactly. The largest integer
        # itself may be rounded. The result of the cast is not used, since it differs between
        # devices.
        return ~((xp.trunc(x) == x) & (x >= float(low)) & (x < float(high + 1)))
    back = y.astype(x.dtype)
    if _is_float(y.dtype):
        # A float beyond the largest integer would be cast back to the largest integer.
        is_in_range = xp.isfinite(y) & (y < float(int(jnp.iinfo(x.dtype).max) + 1))
        return (back != x) | ~is_in_range
    # A negative integer becomes a large unsigned integer, and is cast back to itself.
    return (back != x) | ((x < 0) != (y < 0))


def _wide(array: _Array) -> _Array:
    """Cast an array of real numbers to at least 32 bits, which all operations support."""
    if array.dtype.itemsize >= 4:
        return array
    return array.astype(np.float32 if _is_float(array.dtype) else np.int32)


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _is_complex(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))
