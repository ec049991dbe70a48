"""A Llama-like block: attention and a feed-forward layer, each behind a norm."""

from typing import Any, Literal, overload

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from functree.argument_checks import FUNCTION, KEY, Takes, check
from functree.nn.activations import activation
from functree.nn.attention.layer import Attention, LayerCache, Positions, Segments
from functree.nn.config import Norms, TransformerConfig
from functree.nn.mlp import MLP
from functree.nn.moe.layer import MoE
from functree.nn.moe.router import MoELosses
from functree.nn.norm import RMSNorm
from functree.nn.weights import Initializer, fan_in

CONFIG = Takes("a `ft.nn.TransformerConfig`", lambda value: isinstance(value, TransformerConfig))


class Block(eqx.Module):
    """A block of Llama: norm, attention, residual sum; norm, SwiGLU or experts, residual sum. With
    `norms="after"`, each norm is of the result, before the sum.

    It takes and returns `Float[Array, "*batch seq embed"]`, in the dtype of its input.

    For `ft.offload` and other policies, `x` has the name `"block_input"`. If it is offloaded and no
    other value is kept, a stack of blocks keeps nothing on the device. The attention and the
    feed-forward layer name values too.

    Args:
        attn_norm: the norm before the attention, or after it.
        attn: the attention.
        mlp_norm: the norm before the feed-forward layer, or after it.
        mlp: the feed-forward layer, or a mixture of experts.
        norms: where the norms are: `"before"` or `"after"`.

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
    def create(
        cls, config: TransformerConfig, *, init: Initializer = fan_in, key: PRNGKeyArray
    ) -> "Block":
        """A block with the sizes of a config.

        Args:
            config: the sizes and options.
            init: the initializer of its matrices.
            key: is split for all of them.

        Raises:
            FunctreeError: an argument does not fit.
        """
        check(
            "Block cannot be built", config=(config, CONFIG), init=(init, FUNCTION), key=(key, KEY)
        )
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

    @overload
    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        positions: Positions = None,
        segments: Segments = None,
        filled: None = None,
        in_order: bool = True,
        *,
        cache: None = None,
        losses: Literal[False] = False,
    ) -> Float[Array, "*batch seq embed"]: ...
    @overload
    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        positions: Positions = None,
        segments: Segments = None,
        filled: None = None,
        in_order: bool = True,
        *,
        cache: None = None,
        losses: Literal[True],
    ) -> tuple[Float[Array, "*batch seq embed"], MoELosses]: ...
    @overload
    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        positions: Positions,
        segments: Segments,
        filled: Int[Array, "batch"],
        in_order: bool = True,
        *,
        cache: LayerCache,
    ) -> tuple[Float[Array, "batch seq embed"], LayerCache]: ...
    def __call__(
        self,
        x: Any,
        positions: Any = None,
        segments: Any = None,
        filled: Any = None,
        in_order: bool = True,
        *,
        cache: Any = None,
        losses: bool = False,
    ) -> Any:
        """The block of `x`; with a cache also the new keys and values, with `losses` also those.

        Args:
            x: the tokens' vectors.
            positions: as in `Attention`.
            segments: as in `Attention`.
            filled: as in `Attention`.
            in_order: as in `Attention`.
            cache: as in `Attention`.
            losses: whether to return the losses of the experts, without a cache.

        Raises:
            FunctreeError: as in `Attention` and `MoE`.
            ShardingError: the ambient rules do not fit the activations.
        """
        x, new = checkpoint_name(x, "block_input"), None
        # Another layer in its place need not know an order.
        order = () if in_order else (False,)
        given = positions, segments, filled, *order
        is_before = self.norms == "before"
        mixed = self.attn(self.attn_norm(x) if is_before else x, *given, cache=cache)
        if cache is not None:
            mixed, new = mixed
        mixed = mixed if is_before else self.attn_norm(mixed)
        # Both sums are constrained: the residual stream is what a scan carries from block to block,
        # so that it has the same sharding before and after each.
        x = activation(x + mixed, "batch seq embed")
        fed, of_experts = self.mlp(self.mlp_norm(x) if is_before else x), None
        if isinstance(fed, tuple):  # also of a layer that surgery has put there
            fed, of_experts = fed
        fed = fed if is_before else self.mlp_norm(fed)
        x = activation(x + fed, "batch seq embed")
        if losses:
            return x, of_experts
        return x if cache is None else (x, new)


def _feed_forward(config: TransformerConfig, init: Initializer, key: PRNGKeyArray) -> MLP | MoE:
    """The feed-forward layer of a block, or its experts."""
    dtype, hidden = config.param_dtype, config.hidden
    if config.experts is None or config.top_k is None:
        multiply = config.dot_general
        return MLP(
            config.embed, hidden, init=init, key=key, param_dtype=dtype, dot_general=multiply
        )
    return MoE(
        config.embed,
        hidden if config.expert_hidden is None else config.expert_hidden,
        config.experts,
        config.top_k,
        capacity=config.capacity,
        dispatch=config.dispatch,
        normalize=config.normalize,
        init=init,
        key=key,
        param_dtype=dtype,
        dot_general=config.dot_general,
    )


class WithLosses(eqx.Module):
    """A block that returns the losses of its experts too, as a layer of a scan that collects.

    Args:
        block: the block.
    """

    block: Block

    def __call__(
        self, x: Float[Array, "*batch seq embed"], *args: Any
    ) -> tuple[Float[Array, "*batch seq embed"], MoELosses]:
        """The block of `x`, and its losses."""
        return self.block(x, *args, losses=True)
