"""Tokens ─► logits, by a Llama-like language model."""

from collections.abc import Iterator
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

from functree.errors import FunctreeError, Problem, count
from functree.nn.activations import activation, inputs, whole_sequence
from functree.nn.attention.cached import next_positions
from functree.nn.attention.layer import Attention, LayerCache, Positions, Segments
from functree.nn.cache import Cache
from functree.nn.config import TransformerConfig
from functree.nn.embedding import Embedding
from functree.nn.linear import Linear
from functree.nn.mlp import MLP
from functree.nn.norm import RMSNorm
from functree.nn.weights import Initializer, fan_in, small_normal
from functree.parameters import FUNCTION, KEY, Takes, check, is_integers, shown
from functree.transforms.stacked import Stacked, stack
from functree.tree.arrays import is_array

CONFIG = Takes("a `ft.nn.TransformerConfig`", lambda value: isinstance(value, TransformerConfig))
Tokens = Int[Array, "*batch seq"]
TOKENS = Takes("an array of integers, with a dimension for the sequence", lambda x: is_integers(x) and x.ndim > 0)

CACHE = Takes("an `ft.nn.Cache`", lambda value: isinstance(value, Cache)).or_none()


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
        self, x: Any, positions: Any = None, segments: Any = None, filled: Any = None, *, cache: Any = None
    ) -> Any:
        """The block of `x`, with the arguments of `Attention`; with a cache also the new keys and values."""
        x, new = checkpoint_name(x, "block_input"), None
        mixed = self.attn(self.attn_norm(x), positions, segments, filled, cache=cache)
        if cache is not None:
            mixed, new = mixed
        x = activation(x + mixed, "batch seq embed")
        x = activation(x + self.mlp(self.mlp_norm(x)), "batch seq embed")
        return x if cache is None else (x, new)


class Head(eqx.Module):
    """Computes the logits of the tokens that follow, by a table of tokens or a linear layer.

    Args:
        weights: the table of an embedding, or a linear layer.
    """

    weights: Embedding | Linear

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq vocab"]:
        """The logits for the output of `Transformer.features`."""
        logits = self.weights.logits(x) if isinstance(self.weights, Embedding) else self.weights(x)
        return activation(logits, "batch seq vocab")


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

    @overload
    def __call__(
        self, tokens: Tokens, positions: Positions = None, segments: Segments = None, cache: None = None
    ) -> Float[Array, "*batch seq vocab"]: ...
    @overload
    def __call__(
        self, tokens: Tokens, positions: Positions = None, segments: Segments = None, *, cache: Cache
    ) -> tuple[Float[Array, "batch seq vocab"], Cache]: ...
    def __call__(self, tokens: Any, positions: Any = None, segments: Any = None, cache: Any = None) -> Any:
        """For each token, the logits of the token that follows it, in `config.compute_dtype`.

        Args:
            tokens: the tokens.
            positions: the position of each token, by which queries and keys are rotated; by default 0, 1, 2, … behind
                those in the cache.
            segments: the segment of each token, an integer. A token sees only those of its own segment before it, so
                that several texts can be packed in one sequence. By default all are in one.
            cache: keys and values of the tokens before these. It is returned with those of these tokens too.

        Returns:
            The logits; with a cache `(logits, cache)`. Behind the last token that the cache has room for, or that
            `config.max_seq` allows, they are NaN.

        Raises:
            FunctreeError: the sequence is empty, or longer than `config.max_seq`; positions or segments have another
                shape; both segments and a cache are given.
        """
        if cache is None:
            return self.logits(self.features(tokens, positions, segments))
        with whole_sequence():
            x, new = self.run(tokens, positions, segments, cache)
            # How many tokens a row has had is not known here: one too many is seen in the result.
            beyond = next_positions(cache.filled, tokens.shape[1]) >= cache.most_tokens(self.config)
            x = jnp.where(beyond[..., None], jnp.nan, x)
            return self.logits(x), cache.extended(*new)

    def features(
        self, tokens: Tokens, positions: Positions = None, segments: Segments = None
    ) -> Float[Array, "*batch seq embed"]:
        """The normalized output of the last block, from which the logits are computed."""
        return self.run(tokens, positions, segments)[0]

    def run(
        self, tokens: Tokens, positions: Positions = None, segments: Segments = None, cache: Cache | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], Any]:
        """The features of the tokens; with a cache also their keys and values in each layer, for `cache.extended`."""
        self._check(tokens, positions, segments, cache)
        x = activation(self.embed(tokens), "batch seq embed")
        if cache is None:
            # Layers that surgery has put there need not take more than `x`.
            given = [] if positions is None and segments is None else [positions, segments]
            return self.norm(self.blocks.scan(x, *given, remat=self.config.remat)), None
        if positions is None:
            positions = next_positions(cache.filled, tokens.shape[1])
        each = {"cache": (cache.key, cache.value)}
        x, new = self.blocks.scan(x, positions, None, cache.filled, each=each, collect=True)
        return self.norm(x), new

    def _check(self, tokens: Any, positions: Any, segments: Any, cache: Any) -> None:
        check("Transformer cannot read these tokens", tokens=(tokens, TOKENS), cache=(cache, CACHE))
        seq = tokens.shape[-1]
        if not tokens.size:
            raise FunctreeError(f"tokens of shape {tokens.shape}: there is no token to read")
        if seq > self.config.max_seq:
            raise FunctreeError(
                f"tokens of shape {tokens.shape}: a sequence of {seq} is longer than max_seq={self.config.max_seq}; "
                "shorten it, or build the model with a larger max_seq"
            )
        problems: list[Problem] = []
        for name, value in (("positions", positions), ("segments", segments)):
            if value is None:
                continue
            fits = is_integers(value) and value.shape == tokens.shape
            if not fits and not (name == "positions" and is_integers(value) and value.shape == (seq,)):
                why = f"must be integers of the shape of the tokens, {tokens.shape}"
                problems.append(Problem(None, None, f"{name}={shown(value)}", why))
        if cache is not None and segments is not None:
            why = "a row of a cache is one text"
            problems.append(Problem(None, None, "segments", why, "give each text a row of its own"))
        if cache is not None and (tokens.ndim != 2 or tokens.shape[0] != cache.filled.shape[0]):
            why = f"must be (batch, seq), and the cache has {count(cache.filled.shape[0], 'row')}"
            problems.append(Problem(None, None, f"tokens of shape {tokens.shape}", why))
        if cache is not None and not cache.fits(self.config):
            why = "it is of another model"
            problems.append(Problem(None, None, f"cache.key={shown(cache.key)}", why, "ft.nn.Cache.create(model, ...)"))
        if problems:
            raise FunctreeError("Transformer cannot read these tokens", problems)

    def logits(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq vocab"]:
        """The logits for the output of `features`."""
        return self.head(*inputs(x, "vocab"))

    @property
    def head(self) -> "Head":
        """What computes the logits, without the rest of the model."""
        return Head(self.embed if self.unembed is None else self.unembed)


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
        attn = block.attn
        for name in ("window", "rope_theta", "rope_scaling", "attention"):
            yield name, getattr(attn, name)
        yield "attention_bias", attn.query_bias is not None
        yield "qk_norm", attn.query_norm is not None
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
