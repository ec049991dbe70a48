"""Initializers and dtypes ─► weights kept in one dtype, and computed with in another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

#: As `jax.nn.initializers` makes them: (key, shape, dtype) ─► array. Constant ones take `None` for a key.
Initializer = Callable[[Any, tuple[int, ...], DTypeLike], Array]

#: The default of every matrix: truncated normal, with variance 1 / (size of what is summed over).
fan_in: Initializer = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

#: The default of embeddings.
small_normal: Initializer = jax.nn.initializers.normal(0.02)


def dtype_or_none(dtype: DTypeLike | None) -> np.dtype | None:
    """One spelling of a dtype, so that equal modules are equal; `None` stays.

    Examples:
        >>> from functree.nn.weights import dtype_or_none
        >>> dtype_or_none("float32") == dtype_or_none(jnp.float32)
        True
    """
    return None if dtype is None else jnp.dtype(dtype)


def cast(dtype: DTypeLike | None, x: Array, *weights: Array) -> tuple[Array, ...]:
    """`x` and `weights` in the dtype of the computation: `dtype`, or where that is `None` x's own.

    Examples:
        >>> from functree.nn.weights import cast
        >>> [a.dtype.name for a in cast(None, jnp.ones(2, jnp.bfloat16), jnp.ones(3))]
        ['bfloat16', 'bfloat16']
    """
    dtype = x.dtype if dtype is None else dtype
    return tuple(array.astype(dtype) for array in (x, *weights))


def accumulator(dtype: DTypeLike) -> np.dtype:
    """The dtype in which to sum many terms of `dtype`: float32, or a wider one.

    Examples:
        >>> from functree.nn.weights import accumulator
        >>> accumulator(jnp.bfloat16)
        dtype('float32')
    """
    return np.promote_types(dtype, np.float32)  # NumPy's: JAX's own refuses under strict dtype promotion
