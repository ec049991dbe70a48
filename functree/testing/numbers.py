"""These functions turn arrays into numbers whose differences are accurate."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from functree.tree.arrays import is_key


def has_numbers(kind: object) -> bool:
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
