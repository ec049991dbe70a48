"""A Llama-like block: attention and a feed-forward layer, each behind a norm."""

from typing import Any, overload

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from functree.argument_checks import FUNCTION, KEY, Takes, check
from functree.nn.activations import activation
from functree.nn.attention.layer import Attention, LayerCache, Positions, Segments
from functree.nn.config import TransformerConfig
from functree.nn.mlp import MLP
from functree.nn.norm import RMSNorm
from functree.nn.weights import Initializer, fan_in

CONFIG = Takes("a `ft.nn.TransformerConfig`", lambda value: isinstance(value, TransformerConfig))


class Block(eqx.Module):
    """A block of Llama: norm, attention, residual sum; norm, SwiGLU, residual sum.

    It takes and returns `Float[Array, "*batch seq embed"]`, in the dtype of its input.

    For `ft.offload` and other policies, `x` has the name `"block_input"`. If it is offloaded and no
    other value is kept, a stack of blocks keeps nothing on the device. The attention and the
    feed-forward layer name values too.

    Args:
        attn_norm: the norm before the attention.
        attn: the attention.
        mlp_norm: the norm before the feed-forward layer.
        mlp: the feed-forward layer.

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
    mlp: MLP

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
                init=init,
                key=attn_key,
                param_dtype=dtype,
            ),
            mlp_norm=RMSNorm(config.embed, config.norm_eps, param_dtype=dtype),
            mlp=MLP(config.embed, config.hidden, init=init, key=mlp_key, param_dtype=dtype),
        )

    @overload
    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        positions: Positions = None,
        segments: Segments = None,
        filled: None = None,
        *,
        cache: None = None,
    ) -> Float[Array, "*batch seq embed"]: ...
    @overload
    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        positions: Positions,
        segments: Segments,
        filled: Int[Array, "batch"],
        *,
        cache: LayerCache,
    ) -> tuple[Float[Array, "batch seq embed"], LayerCache]: ...
    def __call__(
        self,
        x: Any,
        positions: Any = None,
        segments: Any = None,
        filled: Any = None,
        *,
        cache: Any = None,
    ) -> Any:
        """The block of `x`; with a cache also the new keys and values.

        Args:
            x: the tokens' vectors.
            positions: as in `Attention`.
            segments: as in `Attention`.
            filled: as in `Attention`.
            cache: as in `Attention`.

        Raises:
            FunctreeError: as in `Attention`.
            ShardingError: the ambient rules do not fit the activations.
        """
        x, new = checkpoint_name(x, "block_input"), None
        mixed = self.attn(self.attn_norm(x), positions, segments, filled, cache=cache)
        if cache is not None:
            mixed, new = mixed
        # Both sums are constrained: the residual stream is what a scan carries from block to block,
        # so that it has the same sharding before and after each.
        x = activation(x + mixed, "batch seq embed")
        x = activation(x + self.mlp(self.mlp_norm(x)), "batch seq embed")
        return x if cache is None else (x, new)
