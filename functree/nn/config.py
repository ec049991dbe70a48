"""A config holds a transformer's sizes and options, and can be read from an existing model."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from functree.argument_checks import (
    Flag,
    FloatingDtype,
    Positive,
    Size,
    check,
    is_floating,
    kinds_of,
)
from functree.errors import FunctreeValueError, Problem
from functree.labels.leaves import read
from functree.nn.attention.attend import Implementation
from functree.nn.attention.context import Context
from functree.nn.attention.layer import Attention, QKNorm
from functree.nn.embedding import Embedding
from functree.nn.moe.layer import MoE
from functree.nn.moe.sharding import DispatchName
from functree.nn.norm import RMSNorm
from functree.nn.rope import Scaling
from functree.nn.weights import DotGeneral
from functree.transforms.remat import REMAT, Remat
from functree.tree.arrays import Tree, is_array
from functree.tree.nodes import outermost

Norms = Literal["before", "after"]
"""Where a block's norms are: before its layers, or after each of them."""

# Values are converted, since equal dtypes such as `jnp.float32` and `"float32"` hash differently,
# and NumPy's numbers cannot be written as JSON.
_SPELLINGS = {
    int: int,
    int | None: int,
    float: float,
    float | None: float,
    DTypeLike: jnp.dtype,
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The sizes and options of a `Transformer`; immutable, compared and hashed by value.

    Each field is checked here. The layers check how fields fit each other, when a model is created.

    Args:
        vocab_size: the number of tokens in the vocabulary.
        embed: the size of the residual stream.
        layers: the number of blocks.
        heads: the number of query heads in each block.
        kv_heads: the number of key and value heads, a divisor of `heads`.
        head_dim: the size of one head, which must be even.
        hidden: the size of the feed-forward layer's hidden layer.
        max_seq: the length of the longest sequence that the model accepts.
        rope_theta: the base of the rotary frequencies.
        tie_embedding: whether the logits are computed with the embedding's table.
        remat: which values the backward pass recomputes, as in `Stacked.scan`: `None`, `"full"`,
            `"dots"`, `ft.offload(...)`, or a policy.
        param_dtype: the dtype in which the parameters are created.
        compute_dtype: the dtype of the activations and logits. Weights are cast to it for the
            computation. Norms, rotations and softmax always use float32 or wider.
        norm_eps: the `eps` of the norms.
        attention_bias: whether queries, keys and values have biases, as in Qwen 2.
        qk_norm: whether queries and keys are normalized over `head_dim`, as in Qwen 3. `"all"`
            normalizes over all heads together, as in OLMo 2.
        norms: where a block's norms are: `"before"` its attention and feed-forward layer, or
            `"after"` each of them, before the residual sum, as in OLMo 2.
        window: the maximum number of tokens that a token attends to, including itself, as in
            Mistral; `None` for all earlier tokens.
        rope_scaling: a hashable function that changes the rotary frequencies, such as
            `ft.nn.Llama3Rope`.
        attention: the implementation of attention: `"auto"`, `"xla"`, `"chunked"`, `"splash"`,
            `"cudnn"`, or a function that takes the arguments of `jax.nn.dot_product_attention`; see
            `ft.nn.Attention`.
        context: how the parts of a sequence attend to each other, if the rules shard "seq" over
            mesh axes that shard no heads: `"auto"`, `"gather"`, `"heads"` or `"ring"`; see
            `ft.nn.Attention`.
        microbatches: the number of micro-batches in the pipeline, if the rules shard the blocks
            (`{"layers": "pipe"}`), as in `Stacked.scan`.
        experts: the number of experts in each block, or `None` for no experts. With experts, the
            feed-forward layer of each block is an `ft.nn.MoE`.
        top_k: the number of experts for each token.
        capacity: the capacity factor of each expert, as in `ft.nn.MoE`; `None` to drop no tokens.
        expert_hidden: the size of an expert's hidden layer; by default `hidden`.
        normalize: whether the weights of a token's experts are divided by their sum.
        dispatch: how tokens reach sharded experts, as in `ft.nn.MoE`.
        dot_general: a hashable function that multiplies activations by weights. It takes the
            arguments of `jax.lax.dot_general`, which is the default. Products with the embedding's
            table and with the routers do not use this function.

    Raises:
        FunctreeError: if fields are invalid; the error lists all of them.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
        >>> config.max_seq, config.compute_dtype
        (2048, dtype('float32'))
        >>> dataclasses.replace(config, kv_heads=0)
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeArgumentError: TransformerConfig: invalid
        fields
        ...
    """

    vocab_size: Size
    embed: Size
    layers: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    hidden: Size
    max_seq: Size = 2048
    rope_theta: Positive = 10_000.0
    tie_embedding: Flag = False
    remat: Annotated[Remat, REMAT] = None
    param_dtype: FloatingDtype = jnp.float32
    compute_dtype: FloatingDtype = jnp.float32
    norm_eps: Positive = 1e-5
    attention_bias: Flag = False
    qk_norm: QKNorm = False
    norms: Norms = "before"
    window: Size | None = None
    rope_scaling: Scaling | None = None
    attention: Implementation = "auto"
    context: Context = "auto"
    microbatches: Size | None = None
    experts: Size | None = None
    top_k: Size | None = None
    capacity: Positive | None = None
    expert_hidden: Size | None = None
    normalize: Flag = True
    dispatch: DispatchName = "auto"
    dot_general: DotGeneral | None = None

    def __post_init__(self) -> None:
        kinds = {name: (getattr(self, name), kind) for name, kind in _KINDS.items()}
        check("TransformerConfig: invalid fields", *_without_experts(self), **kinds)
        for name, hint in _HINTS.items():
            value = getattr(self, name)
            if value is not None and hint in _SPELLINGS:
                object.__setattr__(self, name, _SPELLINGS[hint](value))


_KINDS, _HINTS = kinds_of(TransformerConfig), get_type_hints(TransformerConfig)


def _without_experts(config: TransformerConfig) -> Iterator[Problem]:
    """Yield the problems with options of experts in a config without experts."""
    for name in ("top_k", "capacity", "expert_hidden"):
        value = getattr(config, name)
        if config.experts is None and value is not None:
            why = "it has no effect without `experts=`"
            remedy = f"pass `experts=`, or omit `{name}=`"
            yield Problem(None, None, f"{name}={value}", why, remedy)


# The config of an existing model

L = TypeVar("L")

_UNKNOWN = "cannot read the model's sizes and options from its layers"


def config_of(model: Any, norms: Norms) -> TransformerConfig:
    """Read the config of a `Transformer` from its layers; `model.config` documents the errors.

    Args:
        model: the model.
        norms: where the norms of the model's blocks are. This is an argument, since this module
            cannot import `Block`.
    """
    names = ["embed", "heads", "kv_heads", "head_dim", "hidden"]
    sizes = dict(zip(names, sizes_of(model.blocks, names), strict=True))
    attn = layer_of(model.blocks, Attention)
    options = {name: getattr(attn, name) for name in _OF_ATTENTION}
    experts = first_layer(model.blocks, MoE)
    if experts is not None:
        options |= {name: getattr(experts, name) for name in _OF_EXPERTS}
        (options["experts"],) = sizes_of(model.blocks, ["experts"])
        if model.hidden is not None:
            sizes["hidden"], options["expert_hidden"] = model.hidden, sizes["hidden"]
    return TransformerConfig(
        vocab_size=sizes_of(model.embed, ["vocab"])[0],
        layers=len(model.blocks),
        max_seq=model.max_seq,
        tie_embedding=model.unembed is None,
        remat=model.remat,
        microbatches=model.microbatches,
        param_dtype=_param_dtype(model),
        compute_dtype=compute_dtype_of(model),
        norm_eps=layer_of((model.norm, model.blocks), RMSNorm).eps,
        attention_bias=all(
            bias is not None for bias in (attn.query_bias, attn.key_bias, attn.value_bias)
        ),
        qk_norm=_qk_norm(attn),
        norms=norms,
        **sizes,
        **options,
    )


# The options that have the same name in the layer and in the config.
_OF_ATTENTION = ("rope_theta", "rope_scaling", "window", "attention", "context", "dot_general")
_OF_EXPERTS = ("top_k", "capacity", "normalize", "dispatch")


def first_layer(tree: Tree, kind: type[L]) -> L | None:
    """Return the first layer of class `kind` in a part of a model, at any depth, or None."""
    for _, layer in outermost(tree, lambda _, node: isinstance(node, kind)):
        return layer
    return None


def layer_of(tree: Tree, kind: type[L]) -> L:
    """Return the first layer as `first_layer` does, or raise a FunctreeError."""
    layer = first_layer(tree, kind)
    if layer is None:
        raise FunctreeValueError(f"{_UNKNOWN}: no layer is an `ft.nn.{kind.__name__}`")
    return layer


def sizes_of(tree: Tree, names: Sequence[str]) -> tuple[int, ...]:
    """Read the sizes of named axes from the arrays in a part of a model.

    This works even for an adapter around a weight, and for a layer of a different class.

    Raises:
        FunctreeError: if one of the axis names occurs in no array.

    Examples:
        >>> from functree.nn.config import sizes_of
        >>> sizes_of(ft.nn.MLP(4, 8, key=jax.random.key(0)), ["hidden", "embed"])
        (8, 4)
    """
    sizes: dict[str | None, int] = {}
    for leaf in read(tree).leaves:
        for name, size in zip(leaf.axes, leaf.shape, strict=False):
            sizes.setdefault(name, size)
    missing = [name for name in names if name not in sizes]
    if missing:
        why = "no array has an axis with this name"
        remedy = 'add the name to an array\'s annotation, as in `Float[Array, "embed hidden"]`'
        problems = [Problem(None, None, f'"{name}"', why, remedy) for name in missing]
        raise FunctreeValueError(_UNKNOWN, problems)
    return tuple(sizes[name] for name in names)


def compute_dtype_of(model: Any) -> np.dtype:
    """Return the dtype of a model's activations, which is the dtype of its tokens' vectors."""
    embedding = layer_of(model.embed, Embedding)
    return embedding.compute_dtype or embedding.weight.dtype


def _qk_norm(attn: Attention) -> QKNorm:
    """Return the `qk_norm` option of an attention layer."""
    norm = attn.query_norm
    if norm is None:
        return False
    over_all_heads = isinstance(norm, RMSNorm) and len(norm.axes) > 1
    return "all" if over_all_heads else True


def _param_dtype(model: Any) -> np.dtype:
    """Return the dtype of the first floating-point parameter."""
    for leaf in jax.tree.leaves(model):
        if is_array(leaf) and is_floating(leaf.dtype):
            return leaf.dtype
    return compute_dtype_of(model)
