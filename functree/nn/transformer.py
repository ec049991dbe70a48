"""Tokens ─► logits, by a Llama-like language model."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from functree.argument_checks import (
    FUNCTION,
    KEY,
    check,
)
from functree.errors import FunctreeValueError, Problem
from functree.layout.plan.notebook import ShownByPlan
from functree.nn.activations import activation, inputs, unsharded_sequence
from functree.nn.attention.attend import next_positions
from functree.nn.attention.layer import Attention, Positions, Segments
from functree.nn.block import CONFIG, Block, WithLosses
from functree.nn.cache import Cache
from functree.nn.config import TransformerConfig
from functree.nn.embedding import Embedding
from functree.nn.linear import Linear
from functree.nn.mlp import MLP
from functree.nn.moe.layer import MoE
from functree.nn.moe.router import MoELosses
from functree.nn.norm import RMSNorm
from functree.nn.tokens import Tokens, check_tokens
from functree.nn.weights import Initializer, fan_in, small_normal
from functree.transforms.stacked import Stacked, stack
from functree.tree.arrays import is_array
from functree.tree.interfaces import Matrices


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
    language models", 2023). The embedding returns vectors in `config.compute_dtype`, and every
    layer after it computes in the dtype of its input.

    Args:
        embed: the table of the tokens.
        blocks: the stack of blocks.
        norm: the norm before the logits.
        unembed: computes the logits; `None`: they are computed with the table of the embedding.
        config: the sizes and options that it was created with.

    Raises:
        FunctreeError: the config disagrees with the layers, as after `dataclasses.replace(model,
            config=...)`.

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
    config: TransformerConfig = eqx.field(static=True)

    def __check_init__(self) -> None:
        """Raise for a config that disagrees with the layers.

        The layers have to work without a config, so they keep what they compute with. Another
        config alone, as by `dataclasses.replace(model, config=...)`, would show other values than
        the model computes with.

        `param_dtype` is not compared: it is the dtype in which the parameters were created, and a
        model whose arrays were converted or quantized is as good.
        """
        problems: list[Problem] = []
        for name, of_layers in _fields_of_layers(self):
            of_config = getattr(self.config, name)
            if of_config != of_layers:
                why = f"its layers were made with {of_layers!r}"
                problems.append(
                    Problem(None, None, f"config.{name}={of_config!r}", why, _OTHER_CONFIG)
                )
        if problems:
            raise FunctreeValueError(
                "Transformer: the config disagrees with the layers", list(dict.fromkeys(problems))
            )

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
            config=config,
        )

    @overload
    def __call__(
        self,
        tokens: Tokens,
        positions: Positions = None,
        segments: Segments = None,
        cache: None = None,
        *,
        in_order: bool = True,
        losses: Literal[False] = False,
    ) -> Float[Array, "*batch seq vocab"]: ...
    @overload
    def __call__(
        self,
        tokens: Tokens,
        positions: Positions = None,
        segments: Segments = None,
        cache: None = None,
        *,
        in_order: bool = True,
        losses: Literal[True],
    ) -> tuple[Float[Array, "*batch seq vocab"], MoELosses]: ...
    @overload
    def __call__(
        self,
        tokens: Tokens,
        positions: Positions = None,
        segments: Segments = None,
        *,
        cache: Cache,
        in_order: bool = True,
    ) -> tuple[Float[Array, "batch seq vocab"], Cache]: ...
    def __call__(
        self,
        tokens: Any,
        positions: Any = None,
        segments: Any = None,
        cache: Any = None,
        *,
        in_order: bool = True,
        losses: bool = False,
    ) -> Any:
        """For each token, the logits of the token that follows it, in `config.compute_dtype`.

        Args:
            tokens: the tokens.
            positions: the position of each token, by which queries and keys are rotated; by default
                0, 1, 2, … behind those in the cache.
            segments: the segment of each token, an integer. A token attends only to those of its
                own before it, so that several texts can be packed in one sequence. By default
                all are in one.
            cache: keys and values of the tokens before these. It is returned with those of these
                tokens too.
            in_order: whether the tokens are in the order of their sequence. If not, as behind
                `ft.nn.zigzag`, a token attends to those whose position is not after its own.
            losses: whether to return the losses of the experts, summed over the blocks.

        Returns:
            The logits; with `losses` `(logits, losses)`, with a cache `(logits, cache)`. Those
            after the last token that the cache has room for, or that `config.max_seq` allows, are
            NaN.

        Raises:
            FunctreeError: the sequence is empty, or longer than `config.max_seq`; positions or
                segments have another shape; both segments and a cache are given; the cache has
                other rows than the tokens, or is of another model; `in_order=False` without
                positions, with a cache, or with a function as `attention`; losses of a model
                without experts, or with a cache, are asked for.
            ShardingError: the ambient rules do not fit the activations.
        """
        if losses:
            x, of_experts = self.run(tokens, positions, segments, cache, in_order, losses=True)
            return self.logits(x), of_experts
        if cache is None:
            return self.logits(self.features(tokens, positions, segments, in_order=in_order))
        with unsharded_sequence():
            x, new = self.run(tokens, positions, segments, cache, in_order)
            # How many tokens a row has had is a value, and not known while this is traced. One too
            # many would overwrite an earlier one, and give logits that look right.
            beyond = next_positions(cache.filled, tokens.shape[1]) >= cache.most_tokens(self.config)
            x = jnp.where(beyond[..., None], jnp.nan, x)
            return self.logits(x), cache.extended(*new)

    def features(
        self,
        tokens: Tokens,
        positions: Positions = None,
        segments: Segments = None,
        *,
        in_order: bool = True,
    ) -> Float[Array, "*batch seq embed"]:
        """The normalized output of the last block, from which the logits are computed.

        Arguments and errors are those of a call; the vectors are in `config.compute_dtype`.

        Examples:
            >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
            >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
            >>> model = ft.nn.Transformer.create(config, key=jax.random.key(0))
            >>> x = model.features(jnp.array([[1, 2, 3]]))
            >>> x.shape, model.logits(x).shape
            ((1, 3, 8), (1, 3, 100))
        """
        return self.run(tokens, positions, segments, in_order=in_order)[0]

    def run(
        self,
        tokens: Tokens,
        positions: Positions = None,
        segments: Segments = None,
        cache: Cache | None = None,
        in_order: bool = True,
        losses: bool = False,
    ) -> tuple[Float[Array, "*batch seq embed"], Any]:
        """The features of the tokens, and None; with a cache their keys and values in each layer.

        These are the arguments of `cache.extended`. With `losses` it is the losses of the experts,
        summed over the blocks. Args and errors are those of a call.
        """
        check_tokens(self.config, tokens, positions, segments, cache, in_order, losses)
        x = activation(self.embed(tokens), "batch seq embed")
        if cache is None:
            x, of_experts = self._through_blocks(x, positions, segments, in_order, losses)
            return self.norm(x), of_experts
        if positions is None:
            positions = next_positions(cache.filled, tokens.shape[1])
        # Each layer reads its own part, and returns keys and values of the new tokens only.
        each = {"cache": (cache.key, cache.value)}
        of_cache = positions, None, cache.filled
        number = self.config.microbatches
        x, new = self.blocks.scan(x, *of_cache, each=each, collect=True, microbatches=number)
        return self.norm(x), new

    def _through_blocks(
        self,
        x: Float[Array, "*batch seq embed"],
        positions: Positions,
        segments: Segments,
        in_order: bool,
        losses: bool,
    ) -> tuple[Float[Array, "*batch seq embed"], MoELosses | None]:
        """The output of the last block, and the losses of the experts if they are asked for."""
        # Layers that surgery has put there need not take more than `x`.
        given: list[Any] = []
        if not in_order:
            given = [positions, segments, None, False]
        elif positions is not None or segments is not None:
            given = [positions, segments]
        number, remat = self.config.microbatches, self.config.remat
        if number is not None and positions is not None and positions.shape != x.shape[:-1]:
            # By row, since the blocks run on micro-batches.
            given[0] = jnp.broadcast_to(positions, x.shape[:-1])
        by_row = tuple(i for i, one in enumerate(given[:2]) if one is not None)
        options: Any = {"remat": remat, "microbatches": number, "divided": by_row}
        if not losses:
            return self.blocks.scan(x, *given, **options), None
        blocks = dataclasses.replace(self.blocks, layer=WithLosses(self.blocks.layer))
        x, each = blocks.scan(x, *given, collect=True, **options)
        return x, MoELosses(*(one.sum() for one in each))

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


_OTHER_CONFIG = (
    "create the model from the new config (`Transformer.create`), and move the arrays (`ft.split`, "
    "`ft.merge`); or, if the layers are as they should be, give the model a config with their "
    "values (`dataclasses.replace`)"
)


def _fields_of_layers(model: Transformer) -> Iterator[tuple[str, Any]]:
    """Fields of the config, and their values in the layers.

    Of a layer of another class, which surgery has put there, nothing is known.
    """
    yield "tie_embedding", model.unembed is None
    if isinstance(model.norm, RMSNorm):
        yield "norm_eps", model.norm.eps
    if isinstance(model.embed, Embedding):
        yield "compute_dtype", model.embed.compute_dtype
        yield from _sizes(model.embed.weight, "vocab_size embed")
    block = model.blocks.layer if isinstance(model.blocks, Stacked) else None
    if not isinstance(block, Block):
        return
    yield "norms", block.norms
    if isinstance(block.attn, Attention):
        attn = block.attn
        same = ("window", "rope_theta", "rope_scaling", "attention", "context", "dot_general")
        for name in same:
            yield name, getattr(attn, name)
        yield "attention_bias", attn.query_bias is not None
        qk_norm = attn.query_norm is not None
        if isinstance(attn.query_norm, RMSNorm) and len(attn.query_norm.axes) > 1:
            qk_norm = "all"
        yield "qk_norm", qk_norm
        yield from _sizes(block.attn.query, "layers embed heads head_dim")
        yield from _sizes(block.attn.key, "layers embed kv_heads head_dim")
    if isinstance(block.mlp, MLP):
        yield "experts", None
        yield from _sizes(block.mlp.gate, "layers embed hidden")
    if isinstance(block.mlp, MoE):
        for name in ("top_k", "capacity", "normalize", "dispatch"):
            yield name, getattr(block.mlp, name)
        hidden = "hidden" if model.config.expert_hidden is None else "expert_hidden"
        yield from _sizes(block.mlp.gate, f"layers experts embed {hidden}")


def _sizes(weight: Any, fields: str) -> Iterator[tuple[str, int]]:
    """Fields of the config, and their values in the shape of a weight."""
    # It is none in a part of a model, such as what `ft.split` returns, and in a tree of specs.
    if not is_array(weight):
        return
    # From the last dimension on: models that were stacked by vmap have more dimensions in front.
    yield from zip(reversed(fields.split()), reversed(weight.shape), strict=False)
