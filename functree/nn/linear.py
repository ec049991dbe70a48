"""Vectors ─► vectors, by a linear map whose axes are named when it is created."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from functree.argument_checks import Flag, FloatingDtype, Key, Size, checked
from functree.errors import AxesError
from functree.nn.weights import (
    DotGeneral,
    Initializer,
    broadcast_like,
    cast,
    dtype_or_none,
    fan_in,
    product,
)
from functree.tree.axes import Axes, Names, names
from functree.tree.interfaces import Matrices


class Linear(eqx.Module):
    """`x @ weight + bias`, over the last dimension of `x`.

    Args:
        in_size: the size of the last dimension of `x`.
        out_size: the size of the last dimension of the result.
        axes: the names of the two dimensions of the weight, input and output. The bias has the
            second name.
        use_bias: whether to add a bias, which is initially zero.
        init: the initializer of the weight; by default truncated normal with variance `1 /
            in_size`.
        key: the key for the weight.
        param_dtype: the dtype of the parameters.
        compute_dtype: the dtype to which they are cast in the computation; `None`: that of `x`.
        dot_general: what multiplies by the weights, a hashable function of the arguments of
            `jax.lax.dot_general`; `None`: that function itself.

    Raises:
        AxesError: `axes` does not have two names.
        FunctreeError: a size is not a positive integer, or another argument does not fit.

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

    @checked("Linear cannot be built")
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
        self.axes = Axes.of(axes)
        if len(self.axes) != 2:
            raise AxesError(
                f'Linear(axes="{self.axes}"): name both dimensions of the weight, as in '
                '"embed hidden"'
            )
        self.weight = init(key, (in_size, out_size), param_dtype)
        self.bias = jnp.zeros((out_size,), param_dtype) if use_bias else None
        self.compute_dtype = dtype_or_none(compute_dtype)
        self.dot_general = dot_general

    def __axis_names__(self) -> Names:
        """The axes of this instance's leaves, which differ from instance to instance."""
        return names(weight=self.axes, bias=Axes(self.axes[1]))

    def __matrix_dimensions__(self) -> Matrices:
        """The weight, for `ft.nn.matrix_dimensions`; a table of a vocabulary is no matrix."""
        # It has one vector for each token, and in most batches most of them have no gradient.
        if "vocab" in self.axes:
            return {}
        return {"weight": (-2, -1)}

    def __call__(self, x: Float[Array, "*batch in_size"]) -> Float[Array, "*batch out_size"]:
        """The product and the bias, in `compute_dtype`. No sharding is constrained.

        Its axes are given at each use, so only the caller knows what those of `x` are.
        """
        x, weight = cast(self.compute_dtype, x, self.weight)
        y = product(x, weight, dot_general=self.dot_general)
        if self.bias is None:
            return y
        return y + broadcast_like(self.bias.astype(y.dtype), y)
