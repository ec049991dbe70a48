"""A Llama-like language model: tokens ─► logits."""

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from functree.errors import FunctreeError
from functree.nn.activations import activation
from functree.nn.attention import Attention
from functree.nn.config import TransformerConfig
from functree.nn.embedding import Embedding
from functree.nn.linear import Linear
from functree.nn.mlp import MLP
from functree.nn.norm import RMSNorm
from functree.nn.weights import Initializer, fan_in, small_normal
from functree.transforms.stacked import Stacked, stack


class Block(eqx.Module):
    """Llama's block: norm, attention, residual; norm, SwiGLU, residual.

    `x` has the name `"block_input"`, for `ft.offload` and other policies: with it offloaded and no other kept, a stack
    of blocks keeps nothing on the device. The attention and the feed-forward layer name values too.

    Args:
        attn_norm: before the attention.
        attn: the attention.
        mlp_norm: before the feed-forward layer.
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
        """A block of the config's sizes; `init` makes its matrices."""
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
    """A decoder of Llama's shape; made by `Transformer.create`.

    The embedding decides the dtype of the residual stream, `config.compute_dtype`, and every layer after it
    computes in the dtype of its input.

    Args:
        embed: the table of the tokens.
        blocks: the stack of blocks.
        norm: before the logits.
        unembed: makes the logits; `None`: the embedding's table does.
        config: what it was built from.

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
        """The layers keep what they compute with: another config alone would change nothing, and say that it did."""
        config, block = self.config, self.blocks.layer
        kept = {
            "norm_eps": (self.norm.eps, config.norm_eps),
            "compute_dtype": (self.embed.compute_dtype, config.compute_dtype),
        }
        if isinstance(block, Block):  # and not what surgery has put there
            kept["rope_theta"] = (block.attn.rope_theta, config.rope_theta)
        for name, (have, said) in kept.items():
            if have != said:
                raise FunctreeError(
                    f"Transformer: config.{name} is {said!r}, and its layers were made with {have!r}: make the model "
                    "from the new config (`Transformer.create`), and move the arrays (`ft.split`, `ft.merge`)"
                )

    @classmethod
    def create(
        cls,
        config: TransformerConfig,
        *,
        init: Initializer = fan_in,
        embed_init: Initializer = small_normal,
        key: PRNGKeyArray,
    ) -> "Transformer":
        """A model of the config's sizes.

        Args:
            config: the sizes and choices.
            init: of every matrix but the embedding's.
            embed_init: of the embedding's table.
            key: for all of them.
        """
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
        """The logits of the token that follows each one, in `config.compute_dtype`.

        Raises:
            FunctreeError: more tokens than `config.max_seq`.
        """
        return self.logits(self.features(tokens))

    def features(self, tokens: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """What the last block leaves, normed: all but the logits."""
        if tokens.shape[-1] > self.config.max_seq:
            raise FunctreeError(
                f"tokens of shape {tokens.shape}: a sequence of {tokens.shape[-1]} is longer than "
                f"max_seq={self.config.max_seq}; shorten it, or build the model with a larger max_seq"
            )
        x = activation(self.embed(tokens), "batch seq embed")
        return self.norm(self.blocks.scan(x, remat=self.config.remat))

    def logits(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq vocab"]:
        """The logits of features."""
        logits = self.embed.logits(x) if self.unembed is None else self.unembed(x)
        return activation(logits, "batch seq vocab")


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
