"""`BatchNorm` normalizes each channel of a batch and keeps running averages as state."""

from collections.abc import Sequence
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from functree.argument_checks import (
    TEXT,
    TEXTS,
    Flag,
    FloatingDtype,
    Fraction,
    Positive,
    Size,
    Takes,
    check,
    checked,
)
from functree.errors import FunctreeValueError
from functree.nn.weights import accumulator, affine, broadcast_like, named_axes
from functree.state.state import STATE, State, StateRef
from functree.tree.axes import Axes, Names, names

AxisNames = Annotated[
    str | Sequence[str],
    Takes("a name or a sequence of names", lambda value: TEXT.fits(value) or TEXTS.fits(value)),
]


class BatchNorm(eqx.Module):
    """Batch normalization: `(x - mean) / sqrt(variance + eps) · weight + bias`, per channel.

    A channel is an index of the last dimension. Mean and variance are computed over all other
    dimensions, in float32 or wider (Ioffe & Szegedy, "Batch normalization", 2015).

    In training, the batch's own statistics are used, and their running averages are kept as state.
    In inference, the averages are used. Under jit, the statistics cover the whole batch, even if it
    is sharded. Inside shard_map or vmap, they cover the local part of the batch, unless `axis_name`
    lists the axes over which the batch is split.

    Args:
        size: the number of channels, which is the size of the last dimension.
        axis_name: the mesh axes of a shard_map, or the axis names of a vmap, over which the batch
            is split.
        eps: a number added to the variance, so that the result for constant channels is finite.
        channelwise_affine: whether to scale and shift, with a weight (initially one) and a bias
            (initially zero).
        momentum: the weight of the old average in each update.
        inference: whether to use the averages without updating them; `eqx.nn.inference_mode` sets
            this field.
        axes: the name of the last dimension.
        param_dtype: the dtype of the weight and the bias. The averages are float32 or wider.

    Raises:
        FunctreeError: if `size` is not a positive integer.
        FunctreeError: if another argument is invalid.
        FunctreeError: if the layer is called in training, `x` has no batch dimension, and
            `axis_name` is None.
        AxesError: if `axes` is not one name.

    Examples:
        >>> layer, state = ft.make_state(ft.nn.BatchNorm(2, momentum=0.5))
        >>> y, state = layer(jnp.array([[1.0, 10.0], [3.0, 30.0]]), state)
        >>> print(y.round(3)[0], state[layer.mean])
        [-1. -1.] [ 1. 10.]
    """

    weight: Float[Array, "size"] | None
    bias: Float[Array, "size"] | None
    mean: StateRef
    var: StateRef
    axis_name: str | tuple[str, ...] | None = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    momentum: float = eqx.field(static=True)
    axes: Axes = eqx.field(static=True)
    # Not static, as in Equinox: `eqx.nn.inference_mode(model)` sets it with `eqx.tree_at`.
    inference: bool

    @checked("BatchNorm: invalid arguments")
    def __init__(
        self,
        size: Size,
        axis_name: AxisNames | None = None,
        eps: Positive = 1e-5,
        channelwise_affine: Flag = True,
        momentum: Fraction = 0.99,
        inference: Flag = False,
        *,
        axes: str | Axes = "embed",
        param_dtype: FloatingDtype = jnp.float32,
    ):
        self.axes = named_axes("BatchNorm", axes, 1)
        self.weight = jnp.ones((size,), param_dtype) if channelwise_affine else None
        self.bias = jnp.zeros((size,), param_dtype) if channelwise_affine else None
        # A bfloat16 average would not change. With a momentum of 0.99, an update is 1 % of the
        # difference between the batch's statistic and the average. For a difference of 20 %, this
        # update is below the 8-bit precision of bfloat16.
        wide = accumulator(param_dtype)
        self.mean = StateRef(jnp.zeros((size,), wide), self.axes)
        self.var = StateRef(jnp.ones((size,), wide), self.axes)
        # A tuple, since a static field has to be hashable.
        if axis_name is not None and not isinstance(axis_name, str):
            axis_name = tuple(axis_name)
        self.axis_name = axis_name
        self.eps, self.momentum, self.inference = eps, momentum, inference

    def __axis_names__(self) -> Names:
        """Return the leaves' axis names, which depend on the argument `axes`."""
        return names(
            {"weight": self.axes, "bias": self.axes, "mean.init": self.axes, "var.init": self.axes}
        )

    def __call__(
        self, x: Float[Array, "*batch size"], state: State, *, inference: bool | None = None
    ) -> tuple[Float[Array, "*batch size"], State]:
        """Return the normalized batch, in the dtype of `x`, and the state with the new averages.

        Args:
            x: the batch.
            state: the state with the averages.
            inference: a value that overrides the field `inference`; `None` uses the field.

        Raises:
            FunctreeError: if, in training, `x` has no batch dimension and `axis_name` is None.
            FunctreeError: if `state` is not an `ft.State`.
        """
        check("BatchNorm: invalid state", state=(state, STATE))
        wide = x.astype(accumulator(x.dtype))
        if inference is None:
            inference = self.inference
        if inference:
            mean, var = state[self.mean], state[self.var]
        else:
            mean, var = self._statistics(wide)
            state = state.set(self.mean, self._averaged(state[self.mean], mean))
            state = state.set(self.var, self._averaged(state[self.var], var))
        # Mean and variance have the shape (size,), as weight and bias do. `affine` can therefore
        # apply them too, and reshards them like `x` on Explicit axes.
        unit = affine(wide, jax.lax.rsqrt(var + self.eps), -mean * jax.lax.rsqrt(var + self.eps))
        return affine(unit, self.weight, self.bias).astype(x.dtype), state

    def _statistics(
        self, x: Float[Array, "*batch size"]
    ) -> tuple[Float[Array, "size"], Float[Array, "size"]]:
        if x.ndim == 1 and self.axis_name is None:
            raise FunctreeValueError(
                f"BatchNorm: x of shape {x.shape} has no batch dimension. Call the layer on the "
                "whole batch outside of `jax.vmap`, or name the mapped axis: "
                '`BatchNorm(..., axis_name="batch")` and `jax.vmap(..., axis_name="batch")`'
            )

        def over_batch(x: Array) -> Array:
            # Under jit, this is the mean of the whole batch, however it is sharded. Inside
            # shard_map or vmap, it is the mean of one part, and all parts have the same number of
            # examples.
            mean = jnp.mean(x, axis=tuple(range(x.ndim - 1)))
            return mean if self.axis_name is None else jax.lax.pmean(mean, self.axis_name)

        # Not mean(x²) - mean²: this difference loses precision if the mean is large.
        mean = over_batch(x)
        return mean, over_batch(affine(x, None, -mean) ** 2)

    def _averaged(self, old: Float[Array, "size"], new: Float[Array, "size"]) -> Array:
        # On Explicit axes, the average keeps its own sharding, however the channels of `x` are
        # sharded. Otherwise a step would return state that is sharded differently from its
        # argument, and would be compiled again.
        new = broadcast_like(new.astype(old.dtype), old)
        return self.momentum * old + (1 - self.momentum) * new
