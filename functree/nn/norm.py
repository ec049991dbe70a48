"""Vectors ─► vectors of root mean square one, scaled."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from functree.nn.products import along
from functree.nn.weights import Initializer, accumulator, dtype_or_none


class RMSNorm(eqx.Module):
    """`x / sqrt(mean(x²) + eps) · scale`, over the last dimension.

    Computed in float32 (or wider), whatever the dtype of `x`.

    Args:
        size: of the last dimension.
        eps: keeps zeros finite.
        init: of the scale; by default ones.
        key: for the scale, where `init` needs one.
        param_dtype: the dtype the scale is kept in.
        compute_dtype: the dtype of the result; `None`: that of `x`.

    Examples:
        >>> x = ft.nn.RMSNorm(2)(jnp.array([3.0, 4.0]))
        >>> print(jnp.mean(x**2).round(3))
        1.0
    """

    scale: Float[Array, "embed"]
    eps: float = eqx.field(static=True)
    compute_dtype: np.dtype | None = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        eps: float = 1e-5,
        *,
        init: Initializer = jax.nn.initializers.ones,
        key: PRNGKeyArray | None = None,
        param_dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike | None = None,
    ):
        self.scale = init(key, (size,), param_dtype)
        self.eps = eps
        self.compute_dtype = dtype_or_none(compute_dtype)

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        wide = x.astype(accumulator(x.dtype))
        unit = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.eps)
        scaled = unit * along(self.scale.astype(wide.dtype), wide)
        return scaled.astype(x.dtype if self.compute_dtype is None else self.compute_dtype)
