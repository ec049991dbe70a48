"""The layers in this module normalize and scale vectors; `LayerNorm` shifts them too."""

from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from functree.argument_checks import (
    SIZE,
    Flag,
    FloatingDtype,
    Key,
    Positive,
    Size,
    Takes,
    checked,
)
from functree.nn.weights import Initializer, accumulator, affine, dtype_or_none, named_axes
from functree.tree.axes import Axes, Names, names


def _as_tuple(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return size if isinstance(size, tuple) else (size,)


Sizes = Annotated[
    int | tuple[int, ...],
    Takes(
        "a positive integer, or a tuple of positive integers",
        lambda size: len(_as_tuple(size)) > 0 and all(map(SIZE.fits, _as_tuple(size))),
    ),
]


class RMSNorm(eqx.Module):
    """Root-mean-square normalization: `x / sqrt(mean(x²) + eps) · scale`.

    The mean is taken over the last dimension, or over several last dimensions together. It is
    computed in float32 or wider, whatever the dtype of `x` (Zhang & Sennrich, "Root mean square
    layer normalization", 2019).

    Args:
        size: the size of the last dimension, or a tuple of sizes.
        eps: a number added to the mean square, so that the result for zeros is finite. The default
            is the value in Llama 2 and 3.
        init: the initializer of the scale; by default ones.
        axes: the name of the last dimension, or one name for each size.
        key: the key for the scale, if `init` needs one.
        param_dtype: the dtype of the scale.
        compute_dtype: the dtype of the result; by default the dtype of `x`.

    Raises:
        AxesError: if `axes` does not have one name for each size.
        FunctreeError: if a size is not a positive integer.
        FunctreeError: if another argument is invalid.

    Examples:
        >>> x = ft.nn.RMSNorm(2)(jnp.array([3.0, 4.0]))
        >>> print(jnp.mean(x**2).round(3))
        1.0
    """

    scale: Float[Array, "*size"]
    eps: float = eqx.field(static=True)
    axes: Axes = eqx.field(static=True)
    compute_dtype: np.dtype | None = eqx.field(static=True)

    @checked("RMSNorm: invalid arguments")
    def __init__(
        self,
        size: Sizes,
        eps: Positive = 1e-5,
        *,
        init: Initializer = jax.nn.initializers.ones,
        axes: str | Axes = "embed",
        key: Key | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        compute_dtype: FloatingDtype | None = None,
    ):
        self.axes = named_axes("RMSNorm", axes, len(_as_tuple(size)))
        self.scale = init(key, _as_tuple(size), param_dtype)
        self.eps = eps
        self.compute_dtype = dtype_or_none(compute_dtype)

    def __axis_names__(self) -> Names:
        """Return the leaves' axis names, which depend on the argument `axes`."""
        return names(scale=self.axes)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the normalized vectors, in `compute_dtype`."""
        # bfloat16 squares would be summed with 8 bits of precision, and float16 squares overflow
        # from 256 on. The cast follows the multiplication by the scale, so that the result is
        # rounded once.
        wide = x.astype(accumulator(x.dtype))
        last = tuple(range(-self.scale.ndim, 0))
        unit = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=last, keepdims=True) + self.eps)
        return affine(unit, self.scale, None).astype(self.compute_dtype or x.dtype)


class LayerNorm(eqx.Module):
    """Layer normalization: `(x - mean) / sqrt(variance + eps) · weight + bias`.

    Mean and variance are taken over the last dimension. They are computed in float32 or wider,
    whatever the dtype of `x` (Ba et al., "Layer normalization", 2016).

    Args:
        size: the size of the last dimension.
        eps: a number added to the variance, so that the result for constant vectors is finite.
        use_weight: whether to scale, with a weight that is initially one.
        use_bias: whether to shift, with a bias that is initially zero.
        axes: the name of the last dimension.
        param_dtype: the dtype of the weight and the bias.
        compute_dtype: the dtype of the result; by default the dtype of `x`.

    Raises:
        AxesError: if `axes` is not one name.
        FunctreeError: if `size` is not a positive integer.
        FunctreeError: if another argument is invalid.

    Examples:
        >>> print(ft.nn.LayerNorm(3)(jnp.array([1.0, 2.0, 3.0])).round(3))
        [-1.225  0.     1.225]
    """

    weight: Float[Array, "size"] | None
    bias: Float[Array, "size"] | None
    eps: float = eqx.field(static=True)
    axes: Axes = eqx.field(static=True)
    compute_dtype: np.dtype | None = eqx.field(static=True)

    @checked("LayerNorm: invalid arguments")
    def __init__(
        self,
        size: Size,
        eps: Positive = 1e-5,
        use_weight: Flag = True,
        use_bias: Flag = True,
        *,
        axes: str | Axes = "embed",
        param_dtype: FloatingDtype = jnp.float32,
        compute_dtype: FloatingDtype | None = None,
    ):
        self.axes = named_axes("LayerNorm", axes, 1)
        self.weight = jnp.ones((size,), param_dtype) if use_weight else None
        self.bias = jnp.zeros((size,), param_dtype) if use_bias else None
        self.eps, self.compute_dtype = eps, dtype_or_none(compute_dtype)

    def __axis_names__(self) -> Names:
        """Return the leaves' axis names, which depend on the argument `axes`."""
        return names(weight=self.axes, bias=self.axes)

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        """Return the normalized vectors, in `compute_dtype`."""
        # Not mean(x²) - mean(x)²: if the mean is large, this difference loses the variance, even in
        # float32.
        wide = x.astype(accumulator(x.dtype))
        centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
        unit = centered * jax.lax.rsqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + self.eps)
        scaled = affine(unit, self.weight, self.bias)
        return scaled.astype(self.compute_dtype or x.dtype)
