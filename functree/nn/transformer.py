"""Tokens ─► logits, by a Llama-like language model."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from functree.errors import FunctreeError, Problem
from functree.nn.activations import activation
from functree.nn.attention import Attention
from functree.nn.config import TransformerConfig
from functree.nn.embedding import Embedding
from functree.nn.linear import Linear
from functree.nn.mlp import MLP
from functree.nn.norm import RMSNorm
from functree.nn.weights import Initializer, fan_in, small_normal
from functree.parameters import FUNCTION, KEY, Takes, check, is_integers
from functree.transforms.stacked import Stacked, stack
from functree.tree.arrays import is_array

CONFIG = Takes("a `ft.nn.TransformerConfig`", lambda value: isinstance(value, TransformerConfig))
TOKENS = Takes("an array of integers, with a dimension for the sequence", lambda x: is_integers(x) and x.ndim > 0)


class Block(eqx.Module):
    """A block of Llama: norm, attention, residual sum; norm, SwiGLU, residual sum.

    For `ft.offload` and other policies, `x` has the name `"block_input"`. If it is offloaded and no other value is
    kept, a stack of blocks keeps nothing on the device. The attention and the feed-forward layer name values too.

    Args:
        attn_norm: the norm before the attention.
        attn: the attention.
        mlp_norm: the norm before the feed-forward layer.
        mlp: the feed-forward layer.

    Examples:
        >>> config = ft.nn.TransformerConfig(100, 8, layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> block = ft.nn.Block.create(config, key=jax.random.key(0))
        >>> block(jnp.ones((5, 8))).shape
        (5, 8)
    """

    attn_norm: RMSNorm
    attn: Attention
    mlp_norm: RMSNorm
    mlp: MLP

    @classmethod
    def create(cls, config: TransformerConfig, *, init: Initializer = fan_in, key: PRNGKeyArray) -> "Block":
        """A block with the sizes of a config; `init` is the initializer of its matrices."""
        check("Block cannot be built", config=(config, CONFIG), init=(init, FUNCTION), key=(key, KEY))
        attn_key, mlp_key = jax.random.split(key)
        dtype = config.param_dtype
        return cls(
            attn_norm=RMSNorm(config.embed, config.norm_eps, param_dtype=dtype),
            attn=Attention(
                config.embed,
                config.heads,
                config.kv_heads,
                config.head_dim,
                rope_theta=config.rope_theta,
                init=init,
                key=attn_key,
                param_dtype=dtype,
            ),
            mlp_norm=RMSNorm(config.embed, config.norm_eps, param_dtype=dtype),
            mlp=MLP(config.embed, config.hidden, init=init, key=mlp_key, param_dtype=dtype),
        )

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        x = checkpoint_name(x, "block_input")
        x = activation(x + self.attn(self.attn_norm(x)), "batch seq embed")
        return activation(x + self.mlp(self.mlp_norm(x)), "batch seq embed")


class Transformer(eqx.Module):
    """A decoder with the architecture of Llama; made by `Transformer.create`.

    The embedding returns vectors in `config.compute_dtype`, and every layer after it computes in the dtype of its
    input.

    Args:
        embed: the table of the tokens.
        blocks: the stack of blocks.
        norm: the norm before the logits.
        unembed: computes the logits; `None`: they are computed with the table of the embedding.
        config: the sizes and options that it was created with.

    Raises:
        FunctreeError: the config disagrees with the layers, as after `dataclasses.replace(model, config=...)`.

    Examples:
        >>> config = ft.nn.TransformerConfig(100, 8, layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
        >>> model(jnp.array([[1, 2, 3]])).shape
        (1, 3, 100)
        >>> model.blocks.layer.attn.query.shape
        (2, 8, 4, 2)
    """

    embed: Embedding
    blocks: Stacked[Block]
    norm: RMSNorm
    unembed: Linear | None
    config: TransformerConfig = eqx.field(static=True)

    def __check_init__(self) -> None:
        """Raise for a config that disagrees with the layers.

        The layers have to work without a config, so they keep what they compute with. Another config alone, as by
        `dataclasses.replace(model, config=...)`, would show other values than the model computes with.

        `param_dtype` is not compared: it is the dtype in which the parameters were created, and a model whose arrays
        were converted or quantized is as good.
        """
        problems: list[Problem] = []
        for name, of_layers in _fields_of_layers(self):
            of_config = getattr(self.config, name)
            if of_config != of_layers:
                why = f"its layers were made with {of_layers!r}"
                problems.append(Problem(None, None, f"config.{name}={of_config!r}", why, _OTHER_CONFIG))
        if problems:
            raise FunctreeError("Transformer: the config disagrees with the layers", list(dict.fromkeys(problems)))

    @classmethod
    def create(
        cls,
        config: TransformerConfig,
        *,
        init: Initializer = fan_in,
        embed_init: Initializer = small_normal,
        key: PRNGKeyArray,
    ) -> "Transformer":
        """A model with the sizes and options of a config.

        Args:
            config: the sizes and options.
            init: the initializer of all matrices except the table of the embedding.
            embed_init: the initializer of the table of the embedding.
            key: is split for all of them.
        """
        check(
            "Transformer cannot be built",
            config=(config, CONFIG),
            init=(init, FUNCTION),
            embed_init=(embed_init, FUNCTION),
            key=(key, KEY),
        )
        embed_key, blocks_key, unembed_key = jax.random.split(key, 3)
        dtype = config.param_dtype
        return cls(
            embed=Embedding(
                config.vocab_size,
                config.embed,
                init=embed_init,
                key=embed_key,
                param_dtype=dtype,
                compute_dtype=config.compute_dtype,
            ),
            blocks=stack(lambda key: Block.create(config, init=init, key=key), config.layers, blocks_key),
            norm=RMSNorm(config.embed, config.norm_eps, param_dtype=dtype),
            unembed=None if config.tie_embedding else _unembed(config, init, unembed_key),
            config=config,
        )

    def __call__(self, tokens: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq vocab"]:
        """For each token, the logits of the token that follows it, in `config.compute_dtype`.

        Raises:
            FunctreeError: the sequence is longer than `config.max_seq`.
        """
        return self.logits(self.features(tokens))

    def features(self, tokens: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """The normalized output of the last block, from which the logits are computed."""
        check("Transformer cannot read these tokens", tokens=(tokens, TOKENS))
        if tokens.shape[-1] > self.config.max_seq:
            raise FunctreeError(
                f"tokens of shape {tokens.shape}: a sequence of {tokens.shape[-1]} is longer than "
                f"max_seq={self.config.max_seq}; shorten it, or build the model with a larger max_seq"
            )
        x = activation(self.embed(tokens), "batch seq embed")
        return self.norm(self.blocks.scan(x, remat=self.config.remat))

    def logits(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq vocab"]:
        """The logits for the output of `features`."""
        logits = self.embed.logits(x) if self.unembed is None else self.unembed(x)
        return activation(logits, "batch seq vocab")


_OTHER_CONFIG = (
    "create the model from the new config (`Transformer.create`), and move the arrays (`ft.split`, `ft.merge`); or, if "
    "the layers are as they should be, give the model a config with their values (`dataclasses.replace`)"
)


def _fields_of_layers(model: Transformer) -> Iterator[tuple[str, Any]]:
    """Fields of the config, and their values in the layers. Layers that surgery has put there say nothing."""
    yield "tie_embedding", model.unembed is None
    if isinstance(model.norm, RMSNorm):
        yield "norm_eps", model.norm.eps
    if isinstance(model.embed, Embedding):
        yield "compute_dtype", model.embed.compute_dtype
        yield from _sizes(model.embed.weight, "vocab_size embed")
    block = model.blocks.layer if isinstance(model.blocks, Stacked) else None
    if not isinstance(block, Block):
        return
    if isinstance(block.attn, Attention):
        yield "rope_theta", block.attn.rope_theta
        yield from _sizes(block.attn.query, "layers embed heads head_dim")
        yield from _sizes(block.attn.key, "layers embed kv_heads head_dim")
    if isinstance(block.mlp, MLP):
        yield from _sizes(block.mlp.gate, "layers embed hidden")


def _sizes(weight: Any, fields: str) -> Iterator[tuple[str, int]]:
    """Fields of the config, and their values in the shape of a weight."""
    if not is_array(weight):  # in a part of a model, or in a tree of specs
        return
    # From the last dimension on: models that were stacked by vmap have more dimensions in front.
    yield from zip(reversed(fields.split()), reversed(weight.shape), strict=False)


def _unembed(config: TransformerConfig, init: Initializer, key: PRNGKeyArray) -> Linear:
    return Linear(
        config.embed,
        config.vocab_size,
        axes="embed vocab",
        use_bias=False,
        init=init,
        key=key,
        param_dtype=config.param_dtype,
    )
