"""A Llama-like block runs attention and a feed-forward layer, each with its norm."""

from typing import Annotated, Self, cast

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from functree.argument_checks import Key, Takes, checked
from functree.errors import FunctreeValueError
from functree.nn.activations import activation
from functree.nn.attention.layer import Attention, LayerCache, Positions, Segments
from functree.nn.config import Norms, TransformerConfig
from functree.nn.mlp import MLP
from functree.nn.moe.layer import MoE
from functree.nn.moe.router import MoELosses
from functree.nn.norm import RMSNorm
from functree.nn.weights import Initializer, fan_in

Config = Annotated[
    TransformerConfig,
    Takes("an `ft.nn.TransformerConfig`", lambda value: isinstance(value, TransformerConfig)),
]


class Block(eqx.Module):
    """A Llama block: norm, attention, residual sum; then norm, SwiGLU or experts, residual sum.

    With `norms="after"`, each norm applies to the layer's result, before the residual sum. A block
    takes a `Float[Array, "*batch seq embed"]`, and returns an array of the same shape and dtype.

    For `ft.offload` and other checkpoint policies, the block's input is named `"block_input"`. If
    this value is offloaded and no other value is kept, a stack of blocks keeps no activations on
    the device. The attention and the feed-forward layer name more values.

    Args:
        attn_norm: the norm before the attention, or after it.
        attn: the attention.
        mlp_norm: the norm before the feed-forward layer, or after it.
        mlp: the feed-forward layer, or a mixture of experts.
        norms: where the norms are: `"before"` or `"after"` the layers.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
        >>> block = ft.nn.Block.create(config, key=jax.random.key(0))
        >>> block(jnp.ones((5, 8))).shape
        (5, 8)
    """

    attn_norm: RMSNorm
    attn: Attention
    mlp_norm: RMSNorm
    mlp: MLP | MoE
    norms: Norms = eqx.field(static=True, default="before")

    @classmethod
    @checked("Block: invalid arguments")
    def create(cls, config: Config, *, init: Initializer = fan_in, key: Key) -> Self:
        """Create a block with a config's sizes and options.

        Args:
            config: the sizes and options.
            init: the initializer of the block's matrices.
            key: the key for all matrices.

        Raises:
            FunctreeError: if an argument is invalid.
        """
        attn_key, mlp_key = jax.random.split(key)
        dtype = config.param_dtype
        return cls(
            attn_norm=RMSNorm(config.embed, config.norm_eps, param_dtype=dtype),
            attn=Attention(
                config.embed,
                config.heads,
                config.kv_heads,
                config.head_dim,
                use_bias=config.attention_bias,
                qk_norm=config.qk_norm,
                norm_eps=config.norm_eps,
                window=config.window,
                rope_theta=config.rope_theta,
                rope_scaling=config.rope_scaling,
                attention=config.attention,
                context=config.context,
                init=init,
                key=attn_key,
                param_dtype=dtype,
                dot_general=config.dot_general,
            ),
            mlp_norm=RMSNorm(config.embed, config.norm_eps, param_dtype=dtype),
            mlp=_feed_forward(config, init, mlp_key),
            norms=config.norms,
        )

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        positions: Positions = None,
        segments: Segments = None,
        in_order: bool = True,
    ) -> Float[Array, "*batch seq embed"]:
        """Apply the block to `x`.

        Args:
            x: the tokens' vectors.
            positions: as in `Attention`.
            segments: as in `Attention`.
            in_order: as in `Attention`.

        Raises:
            FunctreeError: if the attention or the experts cannot run, for the reasons that
                `Attention` and `MoE` list.
            ShardingError: if the ambient rules do not fit the activations.
        """
        return self._fed(self._attended(x, positions, segments, in_order))[0]

    def with_losses(
        self,
        x: Float[Array, "*batch seq embed"],
        positions: Positions = None,
        segments: Segments = None,
        in_order: bool = True,
    ) -> tuple[Float[Array, "*batch seq embed"], MoELosses]:
        """Apply the block to `x`, and return the losses of its experts too.

        Raises:
            FunctreeError: if the attention or the experts cannot run, for the reasons that
                `Attention` and `MoE` list.
            FunctreeError: if the block has no experts.
            ShardingError: if the ambient rules do not fit the activations.
        """
        y, losses = self._fed(self._attended(x, positions, segments, in_order))
        if losses is None:
            raise FunctreeValueError(
                "Transformer: the expert losses cannot be computed, because this layer has no "
                f"experts: mlp={type(self.mlp).__name__}. Set `experts=` and `top_k=` in the "
                "config, or omit `balance=`, `router_z=` and `with_losses`"
            )
        return y, losses

    def decode(
        self,
        x: Float[Array, "batch seq embed"],
        positions: Positions,
        filled: Int[Array, "batch"],
        cache: LayerCache,
    ) -> tuple[Float[Array, "batch seq embed"], LayerCache]:
        """Apply the block to `x`, and return the new keys and values as `Attention.decode` does."""
        x = checkpoint_name(x, "block_input")
        given = self._given(x, self.attn_norm)
        mixed, new = self.attn.decode(given, positions, filled, cache)
        return self._fed(self._sum(x, mixed, self.attn_norm))[0], new

    def _attended(
        self, x: Array, positions: Positions, segments: Segments, in_order: bool
    ) -> Float[Array, "*batch seq embed"]:
        """Add the attention's result to `x`."""
        x = checkpoint_name(x, "block_input")
        # A layer that replaces the attention may not have this parameter.
        order = {} if in_order else {"in_order": False}
        mixed = self.attn(self._given(x, self.attn_norm), positions, segments, **order)
        return self._sum(x, mixed, self.attn_norm)

    def _fed(self, x: Array) -> tuple[Float[Array, "*batch seq embed"], MoELosses | None]:
        """Add the feed-forward layer's result to `x`, and return the losses if it has experts."""
        fed, losses = self.mlp(self._given(x, self.mlp_norm)), None
        if isinstance(fed, tuple):  # also true for a layer inserted by surgery
            fed, losses = fed
        return self._sum(x, fed, self.mlp_norm), losses

    def _given(self, x: Array, norm: RMSNorm) -> Array:
        """Return a layer's input: `x`, normalized if the norms come before the layers."""
        return norm(x) if self.norms == "before" else x

    def _sum(self, x: Array, result: Array, norm: RMSNorm) -> Array:
        """Add a layer's result to `x`, normalized if the norms come after the layers."""
        if self.norms == "after":
            result = norm(result)
        # Both sums are constrained. The scan carries the residual stream from block to block, so
        # its sharding must be the same before and after each block.
        return activation(x + result, "batch seq embed")


def _feed_forward(config: TransformerConfig, init: Initializer, key: PRNGKeyArray) -> MLP | MoE:
    """Create a block's feed-forward layer, or its experts."""
    dtype, hidden = config.param_dtype, config.hidden
    if config.experts is None:
        multiply = config.dot_general
        return MLP(
            config.embed, hidden, init=init, key=key, param_dtype=dtype, dot_general=multiply
        )
    return MoE(
        config.embed,
        hidden if config.expert_hidden is None else config.expert_hidden,
        config.experts,
        # `MoE` raises an error for None.
        cast(int, config.top_k),
        capacity=config.capacity,
        dispatch=config.dispatch,
        normalize=config.normalize,
        init=init,
        key=key,
        param_dtype=dtype,
        dot_general=config.dot_general,
    )
