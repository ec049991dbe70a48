"""A traced array ─► a checksum that tells another array from it: a weighted sum of its elements."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jaxtyping import Array, Shaped

from functree.tree.arrays import is_key

_Array = Shaped[Array, "..."]
Tiles = tuple[int, ...]
"""For each dimension of an array, into how many parts it is cut."""

# Sums of numbers near the largest one, such as masks have, must not overflow.
SCALE = 2.0**-24

# One for each of the first dimensions, so that a transposed array makes another sum.
_MULTIPLIERS = (2654435769, 2246822519, 3266489917, 668265263, 374761393, 1640531527)

_LARGE = 4096


def has_checksum(kind: object) -> bool:
    """Whether values of a type are arrays with numbers: tokens and references are not, nor are the
    tangents of integers."""
    return isinstance(kind, ShapedArray) and kind.dtype != jax.dtypes.float0


def is_inexact(dtype: np.dtype) -> bool:
    """Return whether the sums of a dtype depend on their order."""
    return jnp.issubdtype(dtype, jnp.inexact)


def numbers(x: Any) -> Any:
    """The numbers of an array; of random keys, their words."""
    return jax.random.key_data(x) if is_key(x.dtype) else x


def wide(values: np.ndarray) -> np.ndarray:
    """Numbers in a dtype in which their differences are exact enough."""
    # By JAX's function: for numpy bfloat16 is no floating-point dtype.
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return values.astype(np.complex128)
    if is_inexact(values.dtype):
        return values.astype(np.float64)
    # Of the others, numpy would wrap their differences, and has none of booleans.
    return values.astype(np.int64)


def rounding(dtype: np.dtype) -> float:
    """The relative error of a dtype; zero if it is exact."""
    return float(jnp.finfo(dtype).eps) if is_inexact(dtype) else 0.0


@functools.partial(jax.jit, static_argnames=("tiles", "with_size"))
def checksum(x: _Array, tiles: Tiles | None = None, with_size: bool = False) -> _Array:
    """The checksum of an array.

    Each element has a weight by its position, so that permuted elements make another sum. The
    weights of floating-point numbers are positive, so that whatever is not finite makes a sum that
    is not. Integers are summed modulo 2**32, which is exact in any order.

    Args:
        x: the array.
        tiles: cuts it, and makes a checksum of each part, as if it were the whole.
        with_size: whether the sum of the absolute values is returned too, behind the checksums in a
            dimension in front.

    Returns:
        An array of the shape `tiles`, if these are given, else a number.
    """
    if is_key(x.dtype):
        x = jax.random.key_data(x)
        tiles = None if tiles is None else (*tiles, *(1,) * (x.ndim - len(tiles)))
    cuts = (1,) * x.ndim if tiles is None else tiles
    local = tuple(size // n for size, n in zip(x.shape, cuts, strict=True))
    weights = _weights(local, x.dtype)
    dims = tuple(range(x.ndim))
    if math.prod(cuts) > 1:
        # Each dimension becomes two: the tile, and the position in it.
        x = x.reshape(np.stack([cuts, local], 1).ravel().tolist())
        weights = jnp.expand_dims(weights, list(range(0, x.ndim, 2)))
        dims = tuple(range(1, x.ndim, 2))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        # The two parts have different weights, so that conjugates differ.
        x = x.real + 2 * x.imag
    terms = jnp.asarray(x, weights.dtype) * weights
    shape = () if tiles is None else cuts
    total = _sum(terms, dims).reshape(shape)
    if not with_size:
        return total
    # Without their signs it is the same sum.
    return jnp.stack([total, _sum(abs(terms), dims).reshape(shape)])


def _sum(terms: _Array, dims: tuple[int, ...]) -> _Array:
    """A sum in the dtype of its terms: `jnp.sum` has integers of 32 bits in 64, if these are
    enabled."""
    return lax.reduce(terms, terms.dtype.type(0), lax.add, dims)


def _weights(shape: tuple[int, ...], dtype: np.dtype) -> _Array:
    """A weight for each position, of the dtype in which the sum is made.

    It is the product of a weight for each index: a weight of its own for each position would take
    as long to compile again as all the rest. A sum of them would not see whether normalized rows
    are permuted: each of these sums to zero.
    """
    kind, flat = _sum_dtype(dtype), (1,) * len(shape)
    weights = jnp.full(flat, SCALE if is_inexact(dtype) else 1, kind)
    product = np.ones(flat, kind)
    for dim, size in enumerate(shape):
        along = [size if d == dim else 1 for d in range(len(shape))]
        if size > _LARGE:
            weights *= _along(jnp, size, dim, dtype).reshape(along)
            continue
        # What is a constant is quick to compile, but a large one is a long text.
        if product.size * size > _LARGE:
            weights *= jnp.asarray(product)
            product = np.ones(flat, kind)
        product = product * _along(np, size, dim, dtype).reshape(along)
    return weights * jnp.asarray(product)


def _along(module: Any, size: int, dim: int, dtype: np.dtype) -> Any:
    """A weight for each index in a dimension, made by `numpy` or by `jax.numpy`."""
    index = module.arange(1, size + 1, dtype=np.uint32)
    hashed = index * np.uint32(_MULTIPLIERS[dim % len(_MULTIPLIERS)])
    if not is_inexact(dtype):
        # Odd, so that no difference vanishes modulo a power of two.
        return hashed | np.uint32(1)
    real = _sum_dtype(dtype)
    return (hashed >> np.uint32(8)).astype(real) * real.type(2.0**-24) + real.type(0.5)


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    if not is_inexact(dtype):
        return np.dtype(np.uint32)
    # What is shorter is summed in 32 bits.
    wide = jnp.finfo(dtype).bits > 32
    return np.dtype(np.float64 if wide else np.float32)
