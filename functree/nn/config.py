"""The sizes and options of a transformer ─► `TransformerConfig`, checked when it is created."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
from jax.typing import DTypeLike

from functree.argument_checks import FLAG, FLOATING, POSITIVE, SIZE, check, is_size
from functree.errors import Problem
from functree.nn.attention.attend import IMPLEMENTATION, Implementation
from functree.nn.attention.layer import head_problems
from functree.nn.rope import SCALING, Scaling
from functree.transforms.remat import REMAT, Remat

_NUMBERS = ("rope_theta", "norm_eps")
_DTYPES = ("param_dtype", "compute_dtype")
_FLAGS = ("tie_embedding", "attention_bias", "qk_norm")
_SIZES = ("vocab_size", "embed", "layers", "heads", "kv_heads", "head_dim", "hidden", "max_seq")
_KINDS = {
    **dict.fromkeys(_SIZES, SIZE),
    **dict.fromkeys(_NUMBERS, POSITIVE),
    **dict.fromkeys(_DTYPES, FLOATING),
    **dict.fromkeys(_FLAGS, FLAG),
    "window": SIZE.or_none(),
    "rope_scaling": SCALING,
    "attention": IMPLEMENTATION,
    "remat": REMAT,
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The sizes and options of a `Transformer`; immutable, equal and hashable by value.

    Args:
        vocab_size: the number of tokens.
        embed: the size of the residual stream.
        layers: the number of blocks.
        heads: the number of query heads in each block.
        kv_heads: the number of key and value heads, a divisor of `heads`.
        head_dim: the size of one head, even.
        hidden: the size inside the feed-forward layer.
        max_seq: the length of the longest sequence that the model accepts.
        rope_theta: the base of the rotary frequencies.
        tie_embedding: whether the logits are computed with the table of the embedding.
        remat: what the backward pass recomputes, as in `Stacked.scan`: `None`, `"full"`, `"dots"`,
            `ft.offload(...)`, a policy.
        param_dtype: the dtype in which the parameters are created.
        compute_dtype: the dtype of the activations and of the logits. Weights are cast to it in the
            computation. Norms, rotations and softmax are computed in float32 or wider in any case.
        norm_eps: the `eps` of the norms.
        attention_bias: whether queries, keys and values have biases, as in Qwen 2.
        qk_norm: whether queries and keys are normalized over `head_dim`, as in Qwen 3.
        window: how many tokens a token attends to at most, itself among them, as in Mistral;
            `None`: all before it.
        rope_scaling: a hashable function that changes the rotary frequencies, such as
            `ft.nn.Llama3Rope`.
        attention: what computes attention: `"auto"`, `"xla"`, `"chunked"`, `"splash"`, `"cudnn"`,
            or a function of the arguments of `jax.nn.dot_product_attention`; see `ft.nn.Attention`.

    Raises:
        FunctreeError: fields are wrong; the error lists all of them.

    Examples:
        >>> sizes = dict(layers=2, heads=4, kv_heads=2, head_dim=2, hidden=16)
        >>> config = ft.nn.TransformerConfig(100, 8, **sizes)
        >>> config.max_seq, config.compute_dtype
        (2048, dtype('float32'))
        >>> dataclasses.replace(config, kv_heads=3)
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeValueError: no transformer can be built with these fields...
    """

    vocab_size: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    max_seq: int = 2048
    rope_theta: float = 10_000.0
    tie_embedding: bool = False
    remat: Remat = None
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    norm_eps: float = 1e-5
    attention_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    rope_scaling: Scaling | None = None
    attention: Implementation = "auto"

    def __post_init__(self) -> None:
        kinds = {name: (getattr(self, name), kind) for name, kind in _KINDS.items()}
        check("no transformer can be built with these fields", *_head_problems(self), **kinds)
        # One spelling: a config is static, and what is static is compared by type too. With
        # rope_theta=10_000 and 10_000.0 equal models would be compiled twice.
        for name in _DTYPES:
            object.__setattr__(self, name, jnp.dtype(getattr(self, name)))
        for name in _SIZES:
            object.__setattr__(self, name, int(getattr(self, name)))
        for name in _NUMBERS:
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.window is not None:
            object.__setattr__(self, "window", int(self.window))


def _head_problems(config: TransformerConfig) -> Iterator[Problem]:
    """The problems of the numbers of heads. That one is no size is a problem of its own."""
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    if is_size(heads) and is_size(kv_heads) and is_size(head_dim):
        yield from head_problems(heads, kv_heads, head_dim)
