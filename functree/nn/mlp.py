"""`MLP` is the feed-forward layer of a transformer (SwiGLU): it maps vectors to vectors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from functree.argument_checks import FloatingDtype, Key, Size, checked
from functree.nn.activations import activation, inputs
from functree.nn.weights import (
    DotGeneral,
    Initializer,
    cast,
    dtype_or_none,
    fan_in,
    product,
)
from functree.tree.interfaces import Matrices


class MLP(eqx.Module):
    """A SwiGLU layer: `(silu(x @ gate) * (x @ up)) @ down`, over the last dimension of `x`.

    SwiGLU is from Shazeer, "GLU variants improve transformer" (2020), and is used in Llama.

    For `ft.offload` and other checkpoint policies, `x @ gate` and `x @ up` are named `"mlp_gate"`
    and `"mlp_up"`. If both are kept, no product with a weight is recomputed.

    Args:
        embed: the size of the input and of the result.
        hidden: the size of the hidden layer.
        init: the initializer of the three matrices; by default truncated normal with variance 1 /
            fan_in.
        key: the key for the matrices.
        param_dtype: the dtype of the parameters.
        compute_dtype: the dtype to which `x` and the parameters are cast; by default the dtype of
            `x`.
        dot_general: a hashable function that multiplies by the weights. It takes the arguments of
            `jax.lax.dot_general`, which is the default.

    Raises:
        FunctreeError: if a size is not a positive integer.
        FunctreeError: if another argument is invalid.

    Examples:
        >>> ft.nn.MLP(4, 8, key=jax.random.key(0))(jnp.ones((2, 3, 4))).shape
        (2, 3, 4)
    """

    gate: Float[Array, "embed hidden"]
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    compute_dtype: np.dtype | None = eqx.field(static=True)
    dot_general: DotGeneral | None = eqx.field(static=True)

    @checked("MLP: invalid arguments")
    def __init__(
        self,
        embed: Size,
        hidden: Size,
        *,
        init: Initializer = fan_in,
        key: Key,
        param_dtype: FloatingDtype = jnp.float32,
        compute_dtype: FloatingDtype | None = None,
        dot_general: DotGeneral | None = None,
    ):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate = init(gate_key, (embed, hidden), param_dtype)
        self.up = init(up_key, (embed, hidden), param_dtype)
        self.down = init(down_key, (hidden, embed), param_dtype)
        self.compute_dtype = dtype_or_none(compute_dtype)
        self.dot_general = dot_general

    def __matrix_dimensions__(self) -> Matrices:
        """Declare the three matrices for `ft.nn.matrix_dimensions`."""
        return dict.fromkeys(("gate", "up", "down"), (-2, -1))

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        """Apply the layer to each vector, in `compute_dtype`.

        Args:
            x: the vectors; the ambient rules apply to their axes as "batch seq embed".

        Raises:
            ShardingError: if the ambient rules do not fit the activations.
        """
        x, gate, up, down = cast(self.compute_dtype, x, self.gate, self.up, self.down)
        # Both products need the same input, so a sharded sequence is gathered once.
        (x,) = inputs(x, "hidden")
        # A `remat` policy can keep named values. The products are expensive to recompute; `silu`
        # and the multiplication after them are cheap.
        gated = checkpoint_name(product(x, gate, dot_general=self.dot_general), "mlp_gate")
        raised = checkpoint_name(product(x, up, dot_general=self.dot_general), "mlp_up")
        # (batch, seq, hidden), sharded along "hidden" like the weights. If rules shard "seq" over
        # the same mesh axis, the partitioner alone would shard this array along the sequence
        # instead, using all-to-alls, and gather the weights.
        hidden = activation(jax.nn.silu(gated) * raised, "batch seq hidden")
        # (batch, seq, embed). If "hidden" is sharded, each device has a partial sum. Adding the
        # partial sums takes an all-reduce, or a reduce-scatter if "seq" is sharded between layers.
        summed = product(hidden, down, dot_general=self.dot_general)
        return activation(summed, "batch seq embed")
