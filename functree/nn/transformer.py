"""`Transformer` is a Llama-like language model: it maps tokens to logits."""

import dataclasses
from typing import Annotated, Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.argument_checks import (
    FLAG,
    SIZE,
    Key,
    Takes,
    check,
    checked,
    is_integers,
)
from functree.errors import FunctreeValueError, count
from functree.layout.decide import ShownByPlan
from functree.nn.activations import activation, inputs, unsharded_sequence
from functree.nn.attention.attend import next_positions
from functree.nn.attention.layer import Positions, Segments, check_order
from functree.nn.block import Block, Config
from functree.nn.cache import Cache, LayersCache
from functree.nn.config import TransformerConfig, config_of, first_layer
from functree.nn.embedding import Embedding
from functree.nn.linear import Linear
from functree.nn.moe.router import MoELosses
from functree.nn.norm import RMSNorm
from functree.nn.weights import Initializer, fan_in, small_normal
from functree.transforms.remat import REMAT, Remat
from functree.transforms.stacked import Stacked, stack
from functree.tree.interfaces import Matrices

Tokens = Int[Array, "*batch seq"]
Head = Embedding | Linear


class Transformer(eqx.Module, ShownByPlan):
    """A decoder with the architecture of Llama, created with `Transformer.create`.

    It maps tokens, `Int[Array, "*batch seq"]`, to the logits of the next tokens,
    `Float[Array, "*batch seq vocab"]` (Touvron et al., "LLaMA: open and efficient foundation
    language models", 2023). The embedding returns vectors in the `compute_dtype`, and every
    layer after it computes in the dtype of its input.

    Args:
        embed: the embedding of the tokens.
        blocks: the stack of blocks.
        norm: the norm before the logits.
        unembed: the layer that computes the logits; `None` to use the table of the embedding.
        max_seq: the length of the longest sequence that the model accepts.
        remat: which values the backward pass recomputes, as in `Stacked.scan`.
        microbatches: the number of micro-batches in the pipeline, as in `Stacked.scan`.
        hidden: the config's `hidden`, if the config sets `expert_hidden`, since no layer then has
            this size; `None` otherwise.

    Change the last four options with `dataclasses.replace(model, remat="full")`. The layers store
    all other options, and `model.config` reads those options from the layers.

    Raises:
        FunctreeError: if an option is invalid.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
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
    max_seq: int = eqx.field(static=True)
    remat: Remat = eqx.field(static=True, default=None)
    microbatches: int | None = eqx.field(static=True, default=None)
    hidden: int | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        check(
            "Transformer: invalid arguments",
            max_seq=(self.max_seq, SIZE),
            remat=(self.remat, REMAT),
            microbatches=(self.microbatches, SIZE.or_none()),
            hidden=(self.hidden, SIZE.or_none()),
        )

    @property
    def config(self) -> TransformerConfig:
        """The sizes and options that the model computes with, read from its layers.

        Layers that surgery has replaced are described as they are now. `param_dtype` is the dtype
        of the first floating-point parameter. Without experts, `normalize` and `dispatch` have
        their defaults.

        Raises:
            FunctreeError: if the model has no `ft.nn.Attention`, `ft.nn.RMSNorm` or
                `ft.nn.Embedding`.
            FunctreeError: if the config needs the size of an axis that no array has, as in a part
                of a model.
        """
        block = first_layer(self.blocks, Block)
        return config_of(self, "before" if block is None else block.norms)

    def __matrix_dimensions__(self) -> Matrices:
        """Declare that `unembed` is not a matrix, whatever its class; see `matrix_dimensions`."""
        return {"unembed": None}

    @classmethod
    @checked("Transformer: invalid arguments")
    def create(
        cls,
        config: Config,
        *,
        init: Initializer = fan_in,
        embed_init: Initializer = small_normal,
        key: Key,
    ) -> Self:
        """Create a model with a config's sizes and options.

        Args:
            config: the sizes and options.
            init: the initializer of all matrices except the embedding table.
            embed_init: the initializer of the embedding table.
            key: the key for all parameters.

        Raises:
            FunctreeError: if an argument is invalid.

        Examples:
            >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
            >>> config = ft.nn.TransformerConfig(100, 8, **sizes, tie_embedding=True)
            >>> ft.nn.Transformer.create(
            ...     config, key=jax.random.key(0)
            ... ).unembed is None
            True
        """
        # The key is always split into three, so that tied and untied models have the same blocks.
        embed_key, blocks_key, unembed_key = jax.random.split(key, 3)
        dtype = config.param_dtype
        unembed = None
        if not config.tie_embedding:
            unembed = Linear(
                config.embed,
                config.vocab_size,
                axes="embed vocab",
                use_bias=False,
                init=init,
                key=unembed_key,
                param_dtype=dtype,
                dot_general=config.dot_general,
            )
        return cls(
            # This is the only cast: every later layer computes in the dtype of its input.
            embed=Embedding(
                config.vocab_size,
                config.embed,
                init=embed_init,
                key=embed_key,
                param_dtype=dtype,
                compute_dtype=config.compute_dtype,
            ),
            blocks=stack(
                lambda key: Block.create(config, init=init, key=key), config.layers, blocks_key
            ),
            norm=RMSNorm(config.embed, config.norm_eps, param_dtype=dtype),
            unembed=unembed,
            max_seq=config.max_seq,
            remat=config.remat,
            microbatches=config.microbatches,
            hidden=None if config.expert_hidden is None else config.hidden,
        )

    def __call__(
        self,
        tokens: Tokens,
        positions: Positions = None,
        segments: Segments = None,
        in_order: bool = True,
    ) -> Float[Array, "*batch seq vocab"]:
        """Compute the logits of the next token at each position, in the `compute_dtype`.

        Args:
            tokens: the tokens.
            positions: the position of each token, which determines the rotation of queries and
                keys; by default 0, 1, 2, …
            segments: the segment of each token, an integer. A token attends only to tokens of its
                own segment, so that one sequence can pack several texts. By default, all tokens are
                in one segment.
            in_order: whether the tokens are in the order of their sequence. If not, as after
                `ft.nn.zigzag`, a token attends to tokens whose positions are not after its own.

        Raises:
            FunctreeError: if the sequence is empty, or longer than `max_seq`.
            FunctreeError: if the shapes of positions or segments do not fit the tokens.
            FunctreeError: if `in_order=False` and there are no positions.
            FunctreeError: if `in_order=False` and `attention` is a function.
            FunctreeError: if a block's attention or experts cannot run, for the reasons that
                `ft.nn.Attention` and `ft.nn.MoE` list.
            ShardingError: if the ambient rules do not fit the activations.
        """
        return self.logits(self.features(tokens, positions, segments, in_order))

    def with_losses(
        self,
        tokens: Tokens,
        positions: Positions = None,
        segments: Segments = None,
        in_order: bool = True,
    ) -> tuple[Float[Array, "*batch seq vocab"], MoELosses]:
        """Compute the logits, and the losses of the experts, summed over the blocks.

        Arguments and errors are as in a call.

        Raises:
            FunctreeError: if the model has no experts.

        Examples:
            >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
            >>> config = ft.nn.TransformerConfig(100, 8, **sizes, experts=4, top_k=2)
            >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
            >>> logits, losses = model.with_losses(jnp.array([[1, 2, 3]]))
            >>> logits.shape, losses.balance.shape
            ((1, 3, 100), ())
        """
        x, losses = self.features_with_losses(tokens, positions, segments, in_order)
        return self.logits(x), losses

    def decode(
        self, tokens: Int[Array, "batch seq"], cache: Cache, positions: Positions = None
    ) -> tuple[Float[Array, "batch seq vocab"], Cache]:
        """Compute the logits of tokens that follow a cache's tokens, and extend the cache.

        Args:
            tokens: the next tokens of each row.
            cache: the keys and values of the earlier tokens.
            positions: the position of each token; by default, positions continue from the cache.

        Returns:
            `(logits, cache)`. Logits after the last token that the cache has room for, or that
                `max_seq` allows, are NaN.

        Raises:
            FunctreeError: if a call of the model with these tokens would raise a FunctreeError.
            FunctreeError: if the cache and the tokens differ in the number of rows.
            FunctreeError: if the cache is for a different model.
            ShardingError: if the ambient rules do not fit the activations.

        Examples:
            >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
            >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
            >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
            >>> cache = ft.nn.Cache.create(model, batch=1, length=8)
            >>> logits, cache = model.decode(jnp.array([[1, 2, 3]]), cache)
            >>> logits.shape, cache.filled
            ((1, 3, 100), Array([3], dtype=int32))
        """
        with unsharded_sequence():
            x, new = self.features_with_cache(tokens, cache, positions)
            # The number of tokens that a row has received is unknown in a trace. One token too many
            # would overwrite an earlier token, but its logits would look valid.
            beyond = next_positions(cache.filled, tokens.shape[1]) >= cache.most_tokens(self)
            x = jnp.where(beyond[..., None], jnp.nan, x)
            return self.logits(x), cache.extended(*new)

    def features(
        self,
        tokens: Tokens,
        positions: Positions = None,
        segments: Segments = None,
        in_order: bool = True,
    ) -> Float[Array, "*batch seq embed"]:
        """Compute the normalized output of the last block, from which the logits are computed.

        Arguments and errors are as in a call. The vectors are in the `compute_dtype`.

        Examples:
            >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
            >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
            >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
            >>> x = model.features(jnp.array([[1, 2, 3]]))
            >>> x.shape, model.logits(x).shape
            ((1, 3, 8), (1, 3, 100))
        """
        x = self._scanned(self.blocks, tokens, positions, segments, in_order)
        return self.norm(x)

    def features_with_losses(
        self,
        tokens: Tokens,
        positions: Positions = None,
        segments: Segments = None,
        in_order: bool = True,
    ) -> tuple[Float[Array, "*batch seq embed"], MoELosses]:
        """Compute the features, and the losses of the experts; see `with_losses`."""
        blocks = dataclasses.replace(self.blocks, layer=self.blocks.layer.with_losses)
        x, each = self._scanned(blocks, tokens, positions, segments, in_order, collect=True)
        return self.norm(x), MoELosses(*(loss.sum() for loss in each))

    def features_with_cache(
        self, tokens: Int[Array, "batch seq"], cache: Cache, positions: Positions = None
    ) -> tuple[Float[Array, "batch seq embed"], LayersCache]:
        """Compute the features, and the keys and values of the tokens in each layer; see `decode`.

        The keys and values are the arguments of `cache.extended`.
        """
        check_tokens(self.max_seq, tokens, positions)
        check_cache(self, tokens, cache)
        x = activation(self.embed(tokens), "batch seq embed")
        if positions is None:
            positions = next_positions(cache.filled, tokens.shape[1])
        # Each layer reads its own part of the cache, and returns only the new tokens' keys and
        # values.
        blocks = dataclasses.replace(self.blocks, layer=self.blocks.layer.decode)
        x, new = blocks.scan(
            x,
            positions,
            cache.filled,
            each={"cache": (cache.key, cache.value)},
            collect=True,
            microbatches=self.microbatches,
        )
        return self.norm(x), new

    def _scanned(
        self,
        blocks: Stacked[Any],
        tokens: Tokens,
        positions: Positions,
        segments: Segments,
        in_order: bool,
        collect: bool = False,
    ) -> Any:
        """Apply blocks to the vectors of the tokens, and return the result of the scan."""
        check_tokens(self.max_seq, tokens, positions, segments, in_order)
        x = activation(self.embed(tokens), "batch seq embed")
        if self.microbatches is not None and positions is not None:
            # Each example needs its own row of positions, since the blocks run on micro-batches.
            positions = jnp.broadcast_to(positions, x.shape[:-1])
        given: list[Any] = []
        if positions is not None or segments is not None:
            given = [positions, segments]
        by_row = tuple(i for i, argument in enumerate(given) if argument is not None)
        if not in_order:
            given.append(False)
        return blocks.scan(
            x,
            *given,
            collect=collect,
            remat=self.remat,
            microbatches=self.microbatches,
            divided=by_row,
        )

    def logits(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq vocab"]:
        """Compute the logits from the output of `features`, in the same dtype.

        Raises:
            ShardingError: if the ambient rules do not fit the activations.
        """
        return logits_of(self.head, *inputs(x, "vocab"))

    @property
    def head(self) -> Head:
        """The layer that computes the logits: `unembed`, or `embed` if there is none."""
        return self.embed if self.unembed is None else self.unembed


def logits_of(head: Head, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq vocab"]:
    """Compute next-token logits with an embedding's table or a linear layer."""
    logits = head.logits(x) if isinstance(head, Embedding) else head(x)
    return activation(logits, "batch seq vocab")


# Arguments

Model = Annotated[
    Transformer, Takes("an `ft.nn.Transformer`", lambda value: isinstance(value, Transformer))
]
TOKENS = Takes(
    "an array of integers with a sequence dimension and at least one token",
    lambda x: is_integers(x) and x.ndim > 0 and x.size > 0,
)
_HEADLINE = "Transformer: invalid inputs"


def check_tokens(
    max_seq: int,
    tokens: Tokens,
    positions: Positions = None,
    segments: Segments = None,
    in_order: bool = True,
) -> None:
    """Raise a FunctreeError if a model cannot read the tokens, or if an argument does not fit them.

    Args:
        max_seq: the length of the longest sequence that the model accepts.
        tokens: the tokens.
        positions: as in a call of the model.
        segments: as in a call of the model.
        in_order: as in a call of the model.
    """
    check(_HEADLINE, tokens=(tokens, TOKENS), in_order=(in_order, FLAG))
    if not in_order:
        check_order(positions)
    seq = tokens.shape[-1]
    if seq > max_seq:
        raise FunctreeValueError(
            f"Transformer: tokens of shape {tokens.shape} exceed max_seq={max_seq}. Shorten the "
            "sequence, or create the model with a larger max_seq"
        )
    # All rows may share one row of positions.
    check(
        _HEADLINE,
        positions=(positions, integers(tokens.shape, (seq,)).or_none()),
        segments=(segments, integers(tokens.shape).or_none()),
    )


def integers(*shapes: tuple[int, ...]) -> Takes:
    """Return the check of an integer array with one of some shapes."""
    text = f"integers of shape {' or '.join(map(str, dict.fromkeys(shapes)))}"
    return Takes(text, lambda value: is_integers(value) and value.shape in shapes)


def check_cache(model: Transformer, tokens: Tokens, cache: Cache) -> None:
    """Raise a FunctreeError if a cache does not fit a model and its next tokens."""
    fitting = Takes(
        "an `ft.nn.Cache` for the model's layers, heads and compute_dtype, as "
        "`ft.nn.Cache.create(model, ...)` creates it",
        lambda value: isinstance(value, Cache) and value.fits(model),
    )
    check(_HEADLINE, cache=(cache, fitting))
    rows = cache.filled.shape[0]
    if tokens.ndim != 2 or tokens.shape[0] != rows:
        raise FunctreeValueError(
            f"Transformer: tokens of shape {tokens.shape} must have the shape ({rows}, seq), since "
            f"the cache has {count(rows, 'row')}"
        )
