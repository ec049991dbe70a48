"""Initializers, and dtypes: weights may be kept in one dtype and used in another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

#: An initializer as in `jax.nn.initializers`: (key, shape, dtype) ─► array. Constant ones accept `None` as the key.
Initializer = Callable[[Any, tuple[int, ...], DTypeLike], Array]

#: The default for all matrices: truncated normal, with variance 1 / (size of the dimension that is summed over).
fan_in: Initializer = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

#: The default for embeddings.
small_normal: Initializer = jax.nn.initializers.normal(0.02)


def dtype_or_none(dtype: DTypeLike | None) -> np.dtype | None:
    """The dtype as `np.dtype`, whatever it is given as, so that equal layers compare equal; `None` stays `None`.

    Examples:
        >>> from functree.nn.weights import dtype_or_none
        >>> dtype_or_none("float32") == dtype_or_none(jnp.float32)
        True
    """
    return None if dtype is None else jnp.dtype(dtype)


def cast(dtype: DTypeLike | None, x: Array, *weights: Array) -> tuple[Array, ...]:
    """`x` and `weights` in the dtype of the computation: `dtype`, or that of `x` if it is `None`.

    Examples:
        >>> from functree.nn.weights import cast
        >>> [a.dtype.name for a in cast(None, jnp.ones(2, jnp.bfloat16), jnp.ones(3))]
        ['bfloat16', 'bfloat16']
    """
    dtype = x.dtype if dtype is None else dtype
    return tuple(array.astype(dtype) for array in (x, *weights))


def accumulator(dtype: DTypeLike) -> np.dtype:
    """The dtype for sums over many terms of `dtype`: float32 or wider.

    Examples:
        >>> from functree.nn.weights import accumulator
        >>> accumulator(jnp.bfloat16)
        dtype('float32')
    """
    return np.promote_types(dtype, np.float32)  # JAX's own function raises under strict promotion
