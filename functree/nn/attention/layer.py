"""The vectors of a sequence ─► causal self-attention, with rotary positions and grouped heads."""

import functools
import math
from collections.abc import Iterator
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from functree.argument_checks import (
    FLAG,
    SIZE,
    Flag,
    FloatingDtype,
    Key,
    Positive,
    Size,
    Takes,
    check,
    checked,
)
from functree.errors import FunctreeValueError, Problem
from functree.nn.activations import activation, inputs
from functree.nn.attention.attend import Implementation, attend, attend_cached
from functree.nn.attention.context import Context
from functree.nn.norm import RMSNorm
from functree.nn.rope import Scaling, rope
from functree.nn.weights import (
    DotGeneral,
    Initializer,
    broadcast_like,
    cast,
    dtype_or_none,
    fan_in,
    product,
)
from functree.tree.interfaces import Matrices

Positions = Int[Array, "*#batch seq"] | None
Segments = Int[Array, "*batch seq"] | None
LayerCache = tuple[
    Float[Array, "batch slots kv_heads head_dim"], Float[Array, "batch slots kv_heads head_dim"]
]
"""The keys and values of one layer."""

QKNorm = Annotated[
    bool | Literal["all"],
    Takes(
        "True, False or 'all'",
        lambda value: FLAG.is_type(value) or isinstance(value, str),
        lambda value: FLAG.is_type(value) or value == "all",
    ),
]
"""Whether queries and keys are normalized: each head by itself, or all together."""


class Attention(eqx.Module):
    """Causal self-attention: each token attends to itself and to the tokens before it.

    Queries and keys are rotated by the positions of their tokens (RoPE). Heads are grouped, as in
    Llama 2 and 3: query head `h` uses key and value head `h // (heads / kv_heads)`. The softmax is
    computed in float32 or wider.

    For `ft.offload` and other policies these values have names: the queries, keys and values of the
    heads are `"attn_query"`, `"attn_key"` (both after the rotation) and `"attn_value"`, the results
    of the heads are `"attn_mixed"`, and the result of the layer is `"attn_out"`.

    Args:
        embed: the size of the input and of the result.
        heads: the number of query heads.
        kv_heads: the number of key and value heads, a divisor of `heads`; by default `heads`.
        head_dim: the size of one head, even; by default `embed // heads`.
        use_bias: whether queries, keys and values have biases, which are initially zero.
        qk_norm: whether queries and keys are normalized over `head_dim`, before they are rotated;
            `"all"`: over all heads together.
        norm_eps: the `eps` of these norms.
        window: how many tokens a token attends to at most, itself among them; by default all before
            it.
        rope_theta: the base of the rotary frequencies.
        rope_scaling: a hashable function that changes the rotary frequencies, such as
            `ft.nn.Llama3Rope`.
        attention: what computes it: `"auto"`, `"xla"`, `"chunked"`, `"splash"`, `"cudnn"`, or a
            function of the arguments of `jax.nn.dot_product_attention`. By default the kernel of
            the platform that the program is lowered for, and elsewhere in chunks, so that no array
            of all queries by all keys is held.
        context: how the parts of a sequence attend to each other, where the rules shard "seq" by
            mesh axes that shard no heads. `"heads"`: devices exchange heads for sequence, and have
            whole sequences of fewer heads, if the number of parts divides that of the heads of a
            device; `"gather"`: each gets all keys and values; `"ring"`: keys and values are passed
            round, in chunks, and no device has all of them. `"auto"` is `"heads"` where it can be,
            and else `"gather"`.
        init: the initializer of the four weights. It makes each as a matrix, whose first dimension
            is the one that is summed over; by default truncated normal with variance 1 / (size
            summed over).
        key: the key for the weights.
        param_dtype: the dtype of the parameters.
        compute_dtype: the dtype to which they are cast in the computation; `None`: that of `x`.
        dot_general: what multiplies by the weights, a hashable function of the arguments of
            `jax.lax.dot_general`; `None`: that function itself.

    Raises:
        FunctreeError: a size is not a positive integer, `kv_heads` does not divide `heads`,
            `head_dim` is odd, or another argument does not fit.

    Examples:
        >>> attention = ft.nn.Attention(8, 4, 2, key=jax.random.key(0))
        >>> attention.query.shape, attention.key.shape
        ((8, 4, 2), (8, 2, 2))
        >>> attention(jnp.ones((5, 8))).shape
        (5, 8)
    """

    query: Float[Array, "embed heads head_dim"]
    key: Float[Array, "embed kv_heads head_dim"]
    value: Float[Array, "embed kv_heads head_dim"]
    out: Float[Array, "heads head_dim embed"]
    query_bias: Float[Array, "heads head_dim"] | None
    key_bias: Float[Array, "kv_heads head_dim"] | None
    value_bias: Float[Array, "kv_heads head_dim"] | None
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    window: int | None = eqx.field(static=True)
    rope_theta: float = eqx.field(static=True)
    rope_scaling: Scaling | None = eqx.field(static=True)
    attention: Implementation = eqx.field(static=True)
    context: Context = eqx.field(static=True)
    compute_dtype: np.dtype | None = eqx.field(static=True)
    dot_general: DotGeneral | None = eqx.field(static=True)

    @checked("Attention cannot be built")
    def __init__(
        self,
        embed: Size,
        heads: Size,
        kv_heads: Size | None = None,
        head_dim: Size | None = None,
        *,
        use_bias: Flag = False,
        qk_norm: QKNorm = False,
        norm_eps: Positive = 1e-5,
        window: Size | None = None,
        rope_theta: Positive = 10_000.0,
        rope_scaling: Scaling | None = None,
        attention: Implementation = "auto",
        context: Context = "auto",
        init: Initializer = fan_in,
        key: Key,
        param_dtype: FloatingDtype = jnp.float32,
        compute_dtype: FloatingDtype | None = None,
        dot_general: DotGeneral | None = None,
    ):
        check("Attention cannot be built", *context_problems(attention, context))
        of_heads, of_kv_heads = _head_shapes(embed, heads, kv_heads, head_dim)
        keys = jax.random.split(key, 4)
        self.query = _matrix(init, keys[0], (embed,), of_heads, param_dtype)
        self.key = _matrix(init, keys[1], (embed,), of_kv_heads, param_dtype)
        self.value = _matrix(init, keys[2], (embed,), of_kv_heads, param_dtype)
        self.out = _matrix(init, keys[3], of_heads, (embed,), param_dtype)
        self.query_bias = self.key_bias = self.value_bias = None
        if use_bias:
            self.query_bias = jnp.zeros(of_heads, param_dtype)
            self.key_bias = jnp.zeros(of_kv_heads, param_dtype)
            self.value_bias = jnp.zeros(of_kv_heads, param_dtype)
        self.query_norm = self.key_norm = None
        if qk_norm:
            norm = functools.partial(RMSNorm, eps=norm_eps, param_dtype=param_dtype)
            if qk_norm == "all":
                self.query_norm = norm(of_heads, axes="heads head_dim")
                self.key_norm = norm(of_kv_heads, axes="kv_heads head_dim")
            else:
                self.query_norm = norm(of_heads[1], axes="head_dim")
                self.key_norm = norm(of_heads[1], axes="head_dim")
        self.window, self.attention, self.context = window, attention, context
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.compute_dtype = dtype_or_none(compute_dtype)
        self.dot_general = dot_general

    def __matrix_dimensions__(self) -> Matrices:
        """The four weights, for `ft.nn.matrix_dimensions`; each is one matrix for all heads."""
        into_heads = (-3, (-2, -1))
        return {
            "query": into_heads,
            "key": into_heads,
            "value": into_heads,
            "out": ((-3, -2), -1),
        }

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        positions: Positions = None,
        segments: Segments = None,
        in_order: bool = True,
    ) -> Float[Array, "*batch seq embed"]:
        """The result for each token, in `compute_dtype`.

        Args:
            x: the tokens' vectors.
            positions: the position of each token, by which its queries and keys are rotated; by
                default 0, 1, 2, …
            segments: the segment of each token: a token attends only to those of its own; by
                default all are in one.
            in_order: whether tokens are in the order of their sequence. If not, a token attends to
                those whose position is not after its own, and windows are of positions.

        Raises:
            FunctreeError: the kernel that `attention` names cannot compute this; heads cannot be
                exchanged for sequence; `in_order=False` without positions, or with a function as
                `attention`.
            ShardingError: the ambient rules do not fit the activations.
        """
        if not in_order:
            check_order(positions)
        heads = self._heads(x, positions)
        return self._result(self._attend(*heads, segments, None if in_order else positions))

    def decode(
        self,
        x: Float[Array, "batch seq embed"],
        positions: Positions,
        filled: Int[Array, "batch"],
        cache: LayerCache,
    ) -> tuple[Float[Array, "batch seq embed"], LayerCache]:
        """The result for tokens that others in a cache precede, and the new keys and values.

        Args:
            x: the tokens' vectors.
            positions: the position of each token.
            filled: how many tokens each row has in the cache.
            cache: keys and values of the tokens before these.

        Raises:
            FunctreeError: the kernel that `attention` names cannot compute this.
            ShardingError: the ambient rules do not fit the activations.
        """
        query, key, value = self._heads(x, positions)
        # A cache without slots is that of a prompt: nothing is before its tokens, so that a kernel
        # can compute it, and only their keys and values are asked for.
        if not cache[0].shape[1]:
            mixed = self._attend(query, key, value)
        else:
            mixed = attend_cached(query, key, value, *cache, filled, window=self.window)
        return self._result(mixed), (key, value)

    def _heads(
        self, x: Float[Array, "*batch seq embed"], positions: Positions
    ) -> tuple[Array, Array, Array]:
        """Queries, keys and values: (*batch, seq, heads, head_dim), and kv_heads for the others."""
        x, *weights = cast(self.compute_dtype, x, self.query, self.key, self.value)
        xs = inputs(x, "heads head_dim", "kv_heads head_dim", "kv_heads head_dim")
        multiply = functools.partial(product, dot_general=self.dot_general)
        query = _shifted(multiply(xs[0], weights[0]), self.query_bias)
        key = _shifted(multiply(xs[1], weights[1]), self.key_bias)
        value = _shifted(multiply(xs[2], weights[2]), self.value_bias)
        query = self._rotated(query, self.query_norm, positions)
        key = self._rotated(key, self.key_norm, positions)
        # Constrained after the norm and the rotation: no collective comes between them, and the
        # `shard_map` of `attend` finds its arrays as it takes them.
        return (
            checkpoint_name(activation(query, "batch seq heads head_dim"), "attn_query"),
            checkpoint_name(activation(key, "batch seq kv_heads head_dim"), "attn_key"),
            checkpoint_name(activation(value, "batch seq kv_heads head_dim"), "attn_value"),
        )

    def _attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        segments: Segments = None,
        positions: Positions = None,
    ) -> Float[Array, "*batch seq heads head_dim"]:
        return attend(
            query,
            key,
            value,
            implementation=self.attention,
            window=self.window,
            segments=segments,
            positions=positions,
            context=self.context,
        )

    def _result(
        self, mixed: Float[Array, "*batch seq heads head_dim"]
    ) -> Float[Array, "*batch seq embed"]:
        """The product of the mixed heads and the last weight."""
        # Sharded as the queries, whatever computed it: also a user's function.
        mixed = checkpoint_name(activation(mixed, "batch seq heads head_dim"), "attn_mixed")
        mixed, out = cast(self.compute_dtype, mixed, self.out)
        # (*batch, seq, heads, head_dim) ─► (*batch, seq, embed). With "heads" sharded each device
        # has a part of the sum, as in the feed-forward layer.
        summed = product(mixed, out, summed=2, dot_general=self.dot_general)
        return checkpoint_name(activation(summed, "batch seq embed"), "attn_out")

    def _rotated(self, x: Array, norm: RMSNorm | None, positions: Positions) -> Array:
        # The norm comes first, as in Qwen 3. The rotation keeps the length of a vector, but the
        # norm's scale differs from dimension to dimension.
        if norm is not None:
            x = norm(x)
        return rope(x, theta=self.rope_theta, positions=positions, scaling=self.rope_scaling)


def _head_shapes(
    embed: int, heads: int, kv_heads: int | None, head_dim: int | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The last dimensions of queries, and of keys and values: (heads, head_dim).

    Raises:
        FunctreeError: they do not go together, or are too small a part of `embed`.
    """
    if kv_heads is None:
        kv_heads = heads
    if head_dim is None:
        head_dim = embed // heads
    # Once more: there may be more heads than `embed`, and the default is 0.
    check("Attention cannot be built", head_dim=(head_dim, SIZE))
    check("Attention cannot be built", *head_problems(heads, kv_heads, head_dim))
    return (heads, head_dim), (kv_heads, head_dim)


def _shifted(
    x: Float[Array, "*batch seq heads head_dim"], bias: Float[Array, "heads head_dim"] | None
) -> Float[Array, "*batch seq heads head_dim"]:
    return x if bias is None else x + broadcast_like(bias.astype(x.dtype), x)


def _matrix(
    init: Initializer,
    key: PRNGKeyArray,
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    dtype: DTypeLike,
) -> Float[Array, "*rows_and_columns"]:
    """A weight that is initialized as a matrix, whose rows are summed over."""
    # JAX's initializers take all but the last dimension for summed over. For (embed, heads,
    # head_dim) the variance would be too small by the number of heads.
    matrix = init(key, (math.prod(rows), math.prod(columns)), dtype)
    return matrix.reshape(*rows, *columns)


def context_problems(attention: Implementation, context: Context) -> Iterator[Problem]:
    """The problem of a function that computes attention, and a way to compute it in parts.

    Examples:
        >>> from functree.nn.attention.layer import context_problems
        >>> [
        ...     problem.what
        ...     for problem in context_problems(
        ...         jax.nn.dot_product_attention, "ring"
        ...     )
        ... ]
        ["context='ring'"]
    """
    if callable(attention) and context != "auto":
        why = "a function that is given as `attention=` gets whole sequences"
        yield Problem(None, None, f"context={context!r}", why, 'attention="auto"')


def check_order(positions: Positions) -> None:
    """Raise FunctreeError for tokens that are not in order, and have no positions.

    Examples:
        >>> from functree.nn.attention.layer import check_order
        >>> check_order(jnp.array([0, 2, 1]))
    """
    if positions is None:
        raise FunctreeValueError(
            "in_order=False: the order is that of `positions=`, and there are none. Give those "
            "that `ft.nn.zigzag` returns, or leave `in_order` out"
        )


def head_problems(heads: int, kv_heads: int, head_dim: int) -> Iterator[Problem]:
    """The problems of these numbers of heads, which are positive integers, for the layer and for
    the config of a model.

    Examples:
        >>> from functree.nn.attention.layer import head_problems
        >>> [problem.why for problem in head_problems(8, 3, 16)]
        ['it must divide heads=8: all key and value heads serve equally many query
        heads']
    """
    if heads % kv_heads:
        why = (
            f"it must divide heads={heads}: all key and value heads serve equally many query heads"
        )
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield Problem(None, None, f"kv_heads={kv_heads}", why, f"one of {divisors} for kv_heads")
    if head_dim % 2:
        why = "it must be even: rotary positions rotate pairs of dimensions"
        yield Problem(None, None, f"head_dim={head_dim}", why, f"head_dim={head_dim + 1}")
