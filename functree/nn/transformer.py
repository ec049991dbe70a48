"""Tokens ─► logits, by a Llama-like language model."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from functree.argument_checks import (
    FLAG,
    FUNCTION,
    KEY,
    SIZE,
    Takes,
    check,
    is_integers,
    parameter_error,
    shown,
)
from functree.errors import FunctreeValueError, Problem, count
from functree.layout.plan.notebook import ShownByPlan
from functree.nn.activations import activation, inputs, unsharded_sequence
from functree.nn.attention.attend import next_positions
from functree.nn.attention.layer import Positions, Segments, check_order
from functree.nn.block import CONFIG, Block
from functree.nn.cache import Cache, LayersCache
from functree.nn.config import TransformerConfig, config_of, first_layer
from functree.nn.embedding import Embedding
from functree.nn.linear import Linear
from functree.nn.moe.router import MoELosses
from functree.nn.norm import RMSNorm
from functree.nn.weights import Initializer, fan_in, small_normal
from functree.transforms.remat import REMAT, Remat
from functree.transforms.stacked import ScanOptions, Stacked, stack
from functree.tree.interfaces import Matrices

Tokens = Int[Array, "*batch seq"]


class Head(eqx.Module):
    """Computes the logits of the tokens that follow, by a table of tokens or a linear layer.

    Args:
        weights: the table of an embedding, or a linear layer.
    """

    weights: Embedding | Linear

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq vocab"]:
        """The logits for the output of `Transformer.features`, in its dtype."""
        if isinstance(self.weights, Embedding):
            logits = self.weights.logits(x)
        else:
            logits = self.weights(x)
        return activation(logits, "batch seq vocab")


class Transformer(eqx.Module, ShownByPlan):
    """A decoder with the architecture of Llama; made by `Transformer.create`.

    It maps tokens, `Int[Array, "*batch seq"]`, to the logits of those that follow them,
    `Float[Array, "*batch seq vocab"]` (Touvron et al., "LLaMA: open and efficient foundation
    language models", 2023). The embedding returns vectors in the `compute_dtype`, and every
    layer after it computes in the dtype of its input.

    Args:
        embed: the table of the tokens.
        blocks: the stack of blocks.
        norm: the norm before the logits.
        unembed: computes the logits; `None`: they are computed with the table of the embedding.
        max_seq: the length of the longest sequence that it accepts.
        remat: what the backward pass recomputes, as in `Stacked.scan`.
        microbatches: the number of micro-batches that run through the blocks, as in `Stacked.scan`.
        hidden: the `hidden` of a config whose experts have another size, which no layer has; `None`
            otherwise.

    These options are changed by `dataclasses.replace(model, remat="full")`. The layers keep all
    others, so that `model.config` is read from them.

    Raises:
        FunctreeError: an option does not fit.

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
            "Transformer cannot be built",
            max_seq=(self.max_seq, SIZE),
            remat=(self.remat, REMAT),
            microbatches=(self.microbatches, SIZE.or_none()),
            hidden=(self.hidden, SIZE.or_none()),
        )

    @property
    def config(self) -> TransformerConfig:
        """The sizes and options that the model computes with, read from its layers.

        Layers that surgery has put in the place of others are told as they are. `param_dtype` is
        the dtype of the first parameter of floating-point numbers. Without experts `normalize` and
        `dispatch` are the defaults.

        Raises:
            FunctreeError: the model has no `ft.nn.Attention`, no `ft.nn.RMSNorm` or no
                `ft.nn.Embedding`; no array has an axis that the config gives the size of, as in a
                part of a model.
        """
        block = first_layer(self.blocks, Block)
        return config_of(self, "before" if block is None else block.norms)

    def __matrix_dimensions__(self) -> Matrices:
        """That what computes the logits is no matrix, for `ft.nn.matrix_dimensions`, whatever class
        it is of; its blocks speak for themselves."""
        return {"unembed": None}

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

        Raises:
            FunctreeError: an argument does not fit.

        Examples:
            >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
            >>> config = ft.nn.TransformerConfig(100, 8, **sizes, tie_embedding=True)
            >>> ft.nn.Transformer.create(
            ...     config, key=jax.random.key(0)
            ... ).unembed is None
            True
        """
        check(
            "Transformer cannot be built",
            config=(config, CONFIG),
            init=(init, FUNCTION),
            embed_init=(embed_init, FUNCTION),
            key=(key, KEY),
        )
        # Three in any case, so that a tied model has the same blocks as one that is not.
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
            # Here alone the dtype is cast: every layer after it computes in that of its input.
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
        """For each token, the logits of the token that follows it, in the `compute_dtype`.

        Args:
            tokens: the tokens.
            positions: the position of each token, by which queries and keys are rotated; by default
                0, 1, 2, …
            segments: the segment of each token, an integer. A token attends only to those of its
                own before it, so that several texts can be packed in one sequence. By default
                all are in one.
            in_order: whether the tokens are in the order of their sequence. If not, as behind
                `ft.nn.zigzag`, a token attends to those whose position is not after its own.

        Raises:
            FunctreeError: the sequence is empty, or longer than `max_seq`; positions or segments
                have another shape; `in_order=False` without positions, or with a function as
                `attention`.
            ShardingError: the ambient rules do not fit the activations.
        """
        return self.logits(self.features(tokens, positions, segments, in_order))

    def with_losses(
        self,
        tokens: Tokens,
        positions: Positions = None,
        segments: Segments = None,
        in_order: bool = True,
    ) -> tuple[Float[Array, "*batch seq vocab"], MoELosses]:
        """The logits, and the losses of the experts, summed over the blocks.

        Arguments and errors are those of a call. A model without experts is an error.

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
        """The logits of tokens that others in a cache precede, and the cache with these too.

        Args:
            tokens: the next tokens of each row.
            cache: keys and values of the tokens before these.
            positions: the position of each token; by default they go on behind those in the cache.

        Returns:
            `(logits, cache)`. Logits after the last token that the cache has room for, or that
                `max_seq` allows, are NaN.

        Raises:
            FunctreeError: as in a call; the cache has other rows than the tokens, or is of another
                model.
            ShardingError: the ambient rules do not fit the activations.

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
            # How many tokens a row has had is a value, and not known while this is traced. One too
            # many would overwrite an earlier one, and give logits that look right.
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
        """The normalized output of the last block, from which the logits are computed.

        Arguments and errors are those of a call; the vectors are in the `compute_dtype`.

        Examples:
            >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
            >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
            >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
            >>> x = model.features(jnp.array([[1, 2, 3]]))
            >>> x.shape, model.logits(x).shape
            ((1, 3, 8), (1, 3, 100))
        """
        x, given, options = self._scan_inputs(tokens, positions, segments, in_order)
        return self.norm(self.blocks.scan(x, *given, **options))

    def features_with_losses(
        self,
        tokens: Tokens,
        positions: Positions = None,
        segments: Segments = None,
        in_order: bool = True,
    ) -> tuple[Float[Array, "*batch seq embed"], MoELosses]:
        """The features, and the losses of the experts; see `with_losses`."""
        x, given, options = self._scan_inputs(tokens, positions, segments, in_order)
        blocks = dataclasses.replace(self.blocks, layer=self.blocks.layer.with_losses)
        x, each = blocks.scan(x, *given, collect=True, **options)
        return self.norm(x), MoELosses(*(one.sum() for one in each))

    def features_with_cache(
        self, tokens: Int[Array, "batch seq"], cache: Cache, positions: Positions = None
    ) -> tuple[Float[Array, "batch seq embed"], LayersCache]:
        """The features, and the keys and values of the tokens in each layer, which are the
        arguments of `cache.extended`; see `decode`."""
        check_tokens(self.max_seq, tokens, positions)
        check_cache(self, tokens, cache)
        x = activation(self.embed(tokens), "batch seq embed")
        if positions is None:
            positions = next_positions(cache.filled, tokens.shape[1])
        # Each layer reads its own part, and returns keys and values of the new tokens only.
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

    def _scan_inputs(
        self, tokens: Tokens, positions: Positions, segments: Segments, in_order: bool
    ) -> tuple[Float[Array, "*batch seq embed"], list[Any], ScanOptions]:
        """The input of the first block, what each block gets besides, and the options of a scan."""
        check_tokens(self.max_seq, tokens, positions, segments, in_order)
        x = activation(self.embed(tokens), "batch seq embed")
        if self.microbatches is not None and positions is not None:
            # By row, since the blocks run on micro-batches.
            positions = jnp.broadcast_to(positions, x.shape[:-1])
        given: list[Any] = []
        if positions is not None or segments is not None:
            given = [positions, segments]
        by_row = tuple(i for i, one in enumerate(given) if one is not None)
        if not in_order:
            given.append(False)
        return (
            x,
            given,
            {
                "remat": self.remat,
                "microbatches": self.microbatches,
                "divided": by_row,
            },
        )

    def logits(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq vocab"]:
        """The logits for the output of `features`, in its dtype.

        Raises:
            ShardingError: the ambient rules do not fit the activations.
        """
        return self.head(*inputs(x, "vocab"))

    @property
    def head(self) -> "Head":
        """What computes the logits, without the rest of the model."""
        return Head(self.embed if self.unembed is None else self.unembed)


# What a model reads

TOKENS = Takes(
    "an array of integers, with a dimension for the sequence",
    lambda x: is_integers(x) and x.ndim > 0,
)
_CACHE = Takes("an `ft.nn.Cache`", lambda value: isinstance(value, Cache))
_HEADLINE = "Transformer cannot read these tokens"


def check_tokens(
    max_seq: int,
    tokens: Tokens,
    positions: Positions = None,
    segments: Segments = None,
    in_order: bool = True,
) -> None:
    """Raise FunctreeError for tokens that a model cannot read, and for what does not fit them.

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
    if not tokens.size:
        raise FunctreeValueError(f"tokens of shape {tokens.shape}: there is no token to read")
    if seq > max_seq:
        raise FunctreeValueError(
            f"tokens of shape {tokens.shape}: a sequence of {seq} is longer than "
            f"max_seq={max_seq}; shorten it, or build the model with a larger max_seq"
        )
    problems: list[Problem] = []
    right_type = True
    # Positions may be those of all rows.
    for name, value, shapes in (
        ("positions", positions, [tokens.shape, (seq,)]),
        ("segments", segments, [tokens.shape]),
    ):
        if value is None or (is_integers(value) and value.shape in shapes):
            continue
        why = f"must be integers of the shape of the tokens, {tokens.shape}"
        problems.append(Problem(None, None, f"{name}={shown(value)}", why))
        right_type = right_type and is_integers(value)
    if problems:
        raise parameter_error(_HEADLINE, problems, right_type=right_type)


def check_cache(model: Transformer, tokens: Tokens, cache: Cache) -> None:
    """Raise FunctreeError for a cache that does not go with a model and its next tokens."""
    check(_HEADLINE, cache=(cache, _CACHE))
    problems: list[Problem] = []
    rows = cache.filled.shape[0]
    if tokens.ndim != 2 or tokens.shape[0] != rows:
        why = f"must be (batch, seq), and the cache has {count(rows, 'row')}"
        problems.append(Problem(None, None, f"tokens of shape {tokens.shape}", why))
    if not cache.fits(model):
        what, remedy = f"cache.key={shown(cache.key)}", "ft.nn.Cache.create(model, ...)"
        problems.append(Problem(None, None, what, "it is of another model", remedy))
    if problems:
        raise FunctreeValueError(_HEADLINE, problems)
