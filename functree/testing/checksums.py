"""A checksum is a weighted sum of an array's elements, computed in a traced program."""

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
"""The number of tiles along each dimension of an array."""

# Sums of very large numbers, as in masks, must not overflow.
SCALE = 2.0**-24

# One multiplier for each of the first dimensions, so that a transposed array has a different sum.
_MULTIPLIERS = (2654435769, 2246822519, 3266489917, 668265263, 374761393, 1640531527)

_LARGE = 4096


def has_checksum(kind: object) -> bool:
    """Return whether values of a type are arrays of numbers.

    Tokens, references and tangents of integers are not.
    """
    return isinstance(kind, ShapedArray) and kind.dtype != jax.dtypes.float0


def is_inexact(dtype: np.dtype) -> bool:
    """Return whether a dtype is inexact, so that a sum depends on the order of its terms."""
    return jnp.issubdtype(dtype, jnp.inexact)


def numbers(x: Any) -> Any:
    """Return an array itself, or the raw data of random keys."""
    return jax.random.key_data(x) if is_key(x.dtype) else x


def wide(values: np.ndarray) -> np.ndarray:
    """Cast numbers to the widest dtype of their kind, so that differences are accurate."""
    # JAX's function is used, since NumPy does not treat bfloat16 as a float.
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return values.astype(np.complex128)
    if is_inexact(values.dtype):
        return values.astype(np.float64)
    # NumPy would wrap differences of integers, and does not subtract booleans.
    return values.astype(np.int64)


def rounding(dtype: np.dtype) -> float:
    """Return the relative rounding error of a dtype, or zero if it is exact."""
    return float(jnp.finfo(dtype).eps) if is_inexact(dtype) else 0.0


@functools.partial(jax.jit, static_argnames=("tiles", "with_size"))
def checksum(x: _Array, tiles: Tiles | None = None, with_size: bool = False) -> _Array:
    """Compute the checksum of an array.

    Each position has its own weight, so permuting elements changes the sum. The weights of floats
    are positive, so an element that is not finite makes the sum not finite. Integers are summed
    modulo 2**32, which is exact in any order.

    Args:
        x: the array.
        tiles: the number of tiles along each dimension, each with its own checksum; None for one
            checksum of the whole array.
        with_size: whether to also return the sums of the weighted absolute values. They follow
            the checksums along a new leading dimension.

    Returns:
        An array of shape `tiles`, or a scalar if `tiles` is None. With `with_size`, a dimension of
            size 2 precedes this shape.
    """
    if is_key(x.dtype):
        x = jax.random.key_data(x)
        tiles = None if tiles is None else (*tiles, *(1,) * (x.ndim - len(tiles)))
    cuts = (1,) * x.ndim if tiles is None else tiles
    local = tuple(size // n for size, n in zip(x.shape, cuts, strict=True))
    weights = _weights(local, x.dtype)
    dims = tuple(range(x.ndim))
    if math.prod(cuts) > 1:
        # Each dimension becomes two: the tile, and the position within it.
        x = x.reshape(np.stack([cuts, local], 1).ravel().tolist())
        weights = jnp.expand_dims(weights, list(range(0, x.ndim, 2)))
        dims = tuple(range(1, x.ndim, 2))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        # Real and imaginary parts have different weights, so that conjugates differ.
        x = x.real + 2 * x.imag
    terms = jnp.asarray(x, weights.dtype) * weights
    shape = () if tiles is None else cuts
    total = _sum(terms, dims).reshape(shape)
    if not with_size:
        return total
    # The same sum, with absolute values.
    return jnp.stack([total, _sum(abs(terms), dims).reshape(shape)])


def _sum(terms: _Array, dims: tuple[int, ...]) -> _Array:
    """Sum in the dtype of the terms. `jnp.sum` may use 64 bits for integers."""
    return lax.reduce(terms, terms.dtype.type(0), lax.add, dims)


def _weights(shape: tuple[int, ...], dtype: np.dtype) -> _Array:
    """Compute a weight for each position, in the dtype of the sum.

    Each weight is the product of one weight per dimension. Independent weights would double the
    compile time. A sum of weights would not detect that rows were permuted if each row sums to
    zero, as normalized rows do.
    """
    kind, flat = _sum_dtype(dtype), (1,) * len(shape)
    weights = jnp.full(flat, SCALE if is_inexact(dtype) else 1, kind)
    product = np.ones(flat, kind)
    for dim, size in enumerate(shape):
        along = [size if d == dim else 1 for d in range(len(shape))]
        if size > _LARGE:
            weights *= _along(jnp, size, dim, dtype).reshape(along)
            continue
        # A constant compiles fast, but a large constant makes the program's text long.
        if product.size * size > _LARGE:
            weights *= jnp.asarray(product)
            product = np.ones(flat, kind)
        product = product * _along(np, size, dim, dtype).reshape(along)
    return weights * jnp.asarray(product)


def _along(module: Any, size: int, dim: int, dtype: np.dtype) -> Any:
    """Compute a weight for each index of a dimension, with `numpy` or `jax.numpy`."""
    index = module.arange(1, size + 1, dtype=np.uint32)
    hashed = index * np.uint32(_MULTIPLIERS[dim % len(_MULTIPLIERS)])
    if not is_inexact(dtype):
        # The weights are odd, so that no difference vanishes modulo a power of two.
        return hashed | np.uint32(1)
    real = _sum_dtype(dtype)
    return (hashed >> np.uint32(8)).astype(real) * real.type(2.0**-24) + real.type(0.5)


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    if not is_inexact(dtype):
        return np.dtype(np.uint32)
    # Shorter dtypes are summed in 32 bits.
    wide = jnp.finfo(dtype).bits > 32
    return np.dtype(np.float64 if wide else np.float32)
