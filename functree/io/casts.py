"""An array ─► the same with another dtype, and how many of its values this dtype does not hold.

What it holds is meant up to the rounding of floating-point numbers. A fraction that becomes an
integer, a number out of range, a NaN, an imaginary part that is dropped: these are other values.
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

# What is computed with in place of an array: arrays of numpy and of JAX have the same functions.
_Array = Any


class Loss(NamedTuple):
    """An array that was cast, and what was lost by that.

    Attributes:
        path: its path.
        size: the number of its elements.
        before: its dtype before.
        after: its dtype now.
        lost: how many of its values are others now; of an array on devices this is an array, so
            that nobody waits for it before the next one is cast.
    """

    path: Path
    size: int
    before: Any
    after: Any
    lost: int | jax.Array

    def __str__(self) -> str:
        return f"`{self.path}` {int(self.lost)} of {self.size} ({self.before} as {self.after})"


def warn_of_losses(where: object, losses: Iterable[Loss], remedy: str) -> None:
    """Warn of arrays that have other values than they were read with, by path."""
    found = [str(loss) for loss in losses if int(loss.lost)]
    if found:
        warn(
            f"{where}: {count(len(found), 'array')} with values that the new dtype does not hold, "
            f"and that are others now: {listed(found)}; {remedy}"
        )


def cast_on_devices(
    array: jax.Array, dtype: np.dtype, sharding: Sharding
) -> tuple[jax.Array, int | jax.Array]:
    """An array with a dtype and a sharding, and how many of its values are others there."""
    where = sharding
    if sharding.memory_kind not in (None, "device"):
        where = sharding.with_memory_kind("device")
    cast, lost = _caster(dtype, where)(on_device(array))
    return jax.device_put(cast, sharding), lost


def cast_on_host(array: _Array, dtype: Any) -> _Array:
    """An array in the memory of the host with a dtype."""
    # Numpy warns of some losses, and not of others, and does not say where.
    with np.errstate(all="ignore"):
        return _cast(array, dtype)


# The elements that are looked at together: masks of a whole array would take several times its
# memory.
_BLOCK = 2**20


def lost_on_host(array: np.ndarray, dtype: np.dtype) -> int:
    """How many values of an array of numpy a dtype does not hold."""
    if not _can_lose(array.dtype, dtype):
        return 0
    flat, lost = array.reshape(-1), 0
    with np.errstate(all="ignore"):
        if _is_in_range(array, dtype):
            return 0
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK]
            lost += int(_lost(block, _cast(block, dtype), dtype, np).sum())
    return lost


def _is_in_range(array: np.ndarray, dtype: np.dtype) -> bool:
    """Whether the largest and the smallest value say that all are held: of weights that are cast to
    shorter floats they do, at a tenth of the time that it takes to look at each value."""
    if not array.size or not (_is_float(array.dtype) and _is_float(dtype)):
        return False
    # False for a NaN.
    info = jnp.finfo(dtype)
    return float(info.min) <= float(array.min()) and float(array.max()) <= float(info.max)


# Remembered, since a new function would be compiled again for each array.
@functools.lru_cache(maxsize=256)
def _caster(
    dtype: np.dtype, sharding: Sharding
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """What casts an array, and counts the values that are lost: one program, which has them at
    hand."""

    def cast_and_count(array: jax.Array) -> tuple[jax.Array, jax.Array]:
        cast = _cast(array, dtype)
        if not _can_lose(array.dtype, dtype):
            return cast, jnp.uint32(0)
        return cast, _lost(array, cast, dtype, jnp).sum(dtype=jnp.uint32)

    whole = None
    if isinstance(sharding, NamedSharding):
        whole = sharding.update(spec=PartitionSpec())  # in all processes
    return jax.jit(cast_and_count, out_shardings=(sharding, whole))


def _cast(array: _Array, dtype: np.dtype) -> _Array:
    if array.dtype == dtype:
        return array
    if _is_complex(array.dtype) and not _is_complex(dtype):
        array = array.real  # else numpy and JAX both warn, of an array without a name
    return array.astype(dtype)


def _can_lose(before: Any, after: Any) -> bool:
    """Whether a dtype may lack values that another one has, but for the rounding of floats."""
    if before == after:  # such as dtypes of random keys, which numpy does not know
        return False
    if jnp.issubdtype(before, jnp.integer) and jnp.issubdtype(after, jnp.inexact):
        # To numpy such a cast is safe, although large integers are rounded.
        return int(jnp.iinfo(before).max).bit_length() > jnp.finfo(after).nmant + 1
    return not np.can_cast(before, after)


def _lost(x: _Array, cast: _Array, dtype: Any, xp: ModuleType) -> _Array:
    """Which values of an array are others after a cast.

    Args:
        x: the array.
        cast: what it was cast to.
        dtype: the dtype of that.
        xp: numpy or `jax.numpy`.
    """
    if _is_complex(x.dtype):
        if not _is_complex(dtype):
            return _lost(x.real, cast, dtype, xp) | (x.imag != 0)
        part = _part(dtype)
        return _lost(x.real, cast.real, part, xp) | _lost(x.imag, cast.imag, part, xp)
    if _is_complex(dtype):
        cast, dtype = cast.real, _part(dtype)
    x, y = _wide(x), _wide(cast)
    if _is_float(x.dtype) and _is_float(dtype):
        lost = (xp.isfinite(x) != xp.isfinite(y)) | (xp.isnan(x) != xp.isnan(y))
        if np.dtype(dtype).itemsize == 1:
            # Some of these have no infinities, but their largest value instead. Up to half of a
            # step above it a value is rounded.
            info = jnp.finfo(dtype)
            lost |= xp.isfinite(x) & (abs(x) > float(info.max) * (1 + float(info.eps)))
        return lost
    if _is_float(x.dtype):
        low, high = 0, 1
        if not _is_flag(dtype):
            low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        # Below the next power of two, which is a float: the largest integer may not be one. And not
        # by what it was cast to, which differs between devices.
        return ~((xp.trunc(x) == x) & (x >= float(low)) & (x < float(high + 1)))
    back = y.astype(x.dtype)
    if _is_float(y.dtype):
        # A float beyond the largest integer would be cast back to that.
        is_in_range = xp.isfinite(y) & (y < float(int(jnp.iinfo(x.dtype).max) + 1))
        return (back != x) | ~is_in_range
    # As unsigned, a negative number is a large one, which is cast back to itself.
    return (back != x) | ((x < 0) != (y < 0))


def _wide(array: _Array) -> _Array:
    """An array of real numbers in one of the dtypes that everything can be computed with."""
    if array.dtype.itemsize >= 4:
        return array
    return array.astype(np.float32 if _is_float(array.dtype) else np.int32)


def _part(dtype: Any) -> np.dtype:
    """The dtype of the parts of a complex number; of others, their own."""
    return np.dtype(jnp.finfo(dtype).dtype) if _is_complex(dtype) else np.dtype(dtype)


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _is_flag(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.bool_))


def _is_complex(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))
