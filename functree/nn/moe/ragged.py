"""Rows in groups, and a matrix for each group ─► their products, by `jax.lax.ragged_dot`.

JAX cannot batch `ragged_dot` where only some of its arrays are batched, as under a `jax.vmap` over
tokens. So its parts, forward and backward, are batched by a loop (`sequential_vmap`); and since JAX
cannot differentiate what says how it is batched, the derivative is said here.
"""

from typing import Any

import jax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from functree.devices.varying import equally_varying

_Rows = Float[Array, "rows size"]
_Weights = Float[Array, "groups size out"]
_Sizes = Int[Array, "groups"]


def product_of_groups(x: _Rows, weights: _Weights, sizes: _Sizes) -> Float[Array, "rows out"]:
    """The product of each row with the matrix of its group; behind the last group it is anything.

    Args:
        x: the rows, group by group.
        weights: the matrices.
        sizes: how many rows each group has.

    Examples:
        >>> from functree.nn.moe.ragged import product_of_groups
        >>> x, weights = (
        ...     jnp.ones((3, 2)),
        ...     jnp.array([[[1.0], [1.0]], [[2.0], [2.0]]]),
        ... )
        >>> product_of_groups(x, weights, jnp.array([1, 2]))[:, 0]
        Array([2., 4., 4.], dtype=float32)
    """
    # In a shard_map the gradient of weights that are equal on all devices is a sum over them: here,
    # by the derivative of the cast.
    x, weights, sizes = equally_varying(x, weights, sizes)
    return _product(x, weights, sizes)


@jax.custom_vjp
def _product(x: _Rows, weights: _Weights, sizes: _Sizes) -> Float[Array, "rows out"]:
    return _forward(x, weights, sizes)


@sequential_vmap
def _forward(x: _Rows, weights: _Weights, sizes: _Sizes) -> Float[Array, "rows out"]:
    return jax.lax.ragged_dot(x, weights, sizes)


@sequential_vmap
def _of_rows(x: _Rows, weights: _Weights, sizes: _Sizes, d: Array) -> _Rows:
    """The gradient by the rows."""
    return jax.vjp(lambda x: jax.lax.ragged_dot(x, weights, sizes), x)[1](d)[0]


@sequential_vmap
def _of_weights(x: _Rows, weights: _Weights, sizes: _Sizes, d: Array) -> _Weights:
    """The gradient by the matrices."""
    return jax.vjp(lambda weights: jax.lax.ragged_dot(x, weights, sizes), weights)[1](d)[0]


def _with_residuals(x: _Rows, weights: _Weights, sizes: _Sizes) -> tuple[Array, Any]:
    return _forward(x, weights, sizes), (x, weights, sizes)


def _backward(residuals: Any, d: Array) -> tuple[Array, Array, None]:
    return _of_rows(*residuals, d), _of_weights(*residuals, d), None


_product.defvjp(_with_residuals, _backward)
