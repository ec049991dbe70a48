"""`Linear` maps vectors to vectors; you name its axes when you create it."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from functree.argument_checks import Flag, FloatingDtype, Key, Size, checked
from functree.nn.weights import (
    DotGeneral,
    Initializer,
    affine,
    cast,
    dtype_or_none,
    fan_in,
    named_axes,
    product,
)
from functree.tree.axes import Axes, Names, names
from functree.tree.interfaces import Matrices


class Linear(eqx.Module):
    """A linear layer: `x @ weight + bias`, over the last dimension of `x`.

    Args:
        in_size: the size of the last dimension of `x`.
        out_size: the size of the last dimension of the result.
        axes: the names of the weight's two dimensions, input and output. The second also names the
            bias's dimension.
        use_bias: whether to add a bias, which is initially zero.
        init: the initializer of the weight; by default truncated normal with variance `1 /
            in_size`.
        key: the key for the weight.
        param_dtype: the dtype of the parameters.
        compute_dtype: the dtype to which `x` and the parameters are cast; by default the dtype of
            `x`.
        dot_general: a hashable function that multiplies by the weight. It takes the arguments of
            `jax.lax.dot_general`, which is the default.

    Raises:
        AxesError: if `axes` does not contain two names.
        FunctreeError: if a size is not a positive integer.
        FunctreeError: if another argument is invalid.

    Examples:
        >>> head = ft.nn.Linear(4, 8, axes="embed vocab", key=jax.random.key(0))
        >>> head(jnp.ones((2, 3, 4))).shape
        (2, 3, 8)
        >>> ft.tree_axes(head).weight
        Axes('embed', 'vocab')
    """

    weight: Float[Array, "in_size out_size"]
    bias: Float[Array, "out_size"] | None
    axes: Axes = eqx.field(static=True)
    compute_dtype: np.dtype | None = eqx.field(static=True)
    dot_general: DotGeneral | None = eqx.field(static=True)

    @checked("Linear: invalid arguments")
    def __init__(
        self,
        in_size: Size,
        out_size: Size,
        *,
        axes: str | Axes = "embed hidden",
        use_bias: Flag = True,
        init: Initializer = fan_in,
        key: Key,
        param_dtype: FloatingDtype = jnp.float32,
        compute_dtype: FloatingDtype | None = None,
        dot_general: DotGeneral | None = None,
    ):
        self.axes = named_axes("Linear", axes, 2)
        self.weight = init(key, (in_size, out_size), param_dtype)
        self.bias = jnp.zeros((out_size,), param_dtype) if use_bias else None
        self.compute_dtype = dtype_or_none(compute_dtype)
        self.dot_general = dot_general

    def __axis_names__(self) -> Names:
        """Return the leaves' axis names, which depend on the argument `axes`."""
        return names(weight=self.axes, bias=Axes(self.axes[1]))

    def __matrix_dimensions__(self) -> Matrices:
        """Declare the weight for `ft.nn.matrix_dimensions`, unless it belongs to a vocabulary."""
        # A vocabulary's weight contains one vector per token. Muon's authors train such weights
        # with AdamW.
        if "vocab" in self.axes:
            return {}
        return {"weight": (-2, -1)}

    def __call__(self, x: Float[Array, "*batch in_size"]) -> Float[Array, "*batch out_size"]:
        """Multiply by the weight and add the bias, in `compute_dtype`.

        The result's sharding is not constrained: only the caller can name the axes of `x`.
        """
        x, weight = cast(self.compute_dtype, x, self.weight)
        return affine(product(x, weight, dot_general=self.dot_general), None, self.bias)
