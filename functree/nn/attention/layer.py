"""`Attention` is causal self-attention with rotary positions and grouped heads."""

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
    affine,
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
        lambda value: FLAG.fits(value) or (isinstance(value, str) and value == "all"),
    ),
]
"""Whether queries and keys are normalized: `True` for each head separately, `"all"` for all heads
together."""


class Attention(eqx.Module):
    """Causal self-attention: each token attends to itself and to the tokens before it.

    Queries and keys are rotated by the positions of their tokens (RoPE). Heads are grouped, as in
    Llama 2 and 3: query head `h` uses key and value head `h // (heads / kv_heads)`. The softmax is
    computed in float32 or wider.

    For `ft.offload` and other checkpoint policies, the heads' queries, keys and values are named
    `"attn_query"`, `"attn_key"` (both after the rotation) and `"attn_value"`. The results of the
    heads are named `"attn_mixed"`, and the result of the layer is named `"attn_out"`.

    Args:
        embed: the size of the input and of the result.
        heads: the number of query heads.
        kv_heads: the number of key and value heads, a divisor of `heads`; by default `heads`.
        head_dim: the size of one head, which must be even; by default `embed // heads`.
        use_bias: whether queries, keys and values have biases, which are initially zero.
        qk_norm: whether queries and keys are normalized over `head_dim`, before they are rotated.
            `"all"` normalizes over all heads together.
        norm_eps: the `eps` of the query and key norms.
        window: the maximum number of tokens that a token attends to, including itself; by default
            all earlier tokens.
        rope_theta: the base of the rotary frequencies.
        rope_scaling: a hashable function that changes the rotary frequencies, such as
            `ft.nn.Llama3Rope`.
        attention: the implementation of attention: `"auto"`, `"xla"`, `"chunked"`, `"splash"`,
            `"cudnn"`, or a function that takes the arguments of `jax.nn.dot_product_attention`. The
            default uses the kernel of the platform that the program is lowered for. On platforms
            without a kernel, attention runs in chunks, and holds the attention weights of only one
            chunk of queries and one chunk of keys at a time.
        context: how the parts of a sequence attend to each other, if the rules shard "seq" over
            mesh axes that shard no heads. With `"heads"`, devices exchange heads for parts of the
            sequence: each device gets the whole sequence for fewer heads. The number of parts must
            divide the number of heads on a device. With `"gather"`, each device gets all keys and
            values. With `"ring"`, devices pass keys and values around a ring, part by part, and no
            device holds all of them. `"auto"` chooses `"heads"` if possible, otherwise `"gather"`.
        init: the initializer of the four weights. It creates each weight as a matrix whose first
            dimension is summed over. The default is truncated normal with variance 1 / fan_in.
        key: the key for the weights.
        param_dtype: the dtype of the parameters.
        compute_dtype: the dtype to which `x` and the parameters are cast; by default the dtype of
            `x`.
        dot_general: a hashable function that multiplies by the weights. It takes the arguments of
            `jax.lax.dot_general`, which is the default.

    Raises:
        FunctreeError: if a size is not a positive integer.
        FunctreeError: if `kv_heads` does not divide `heads`.
        FunctreeError: if `head_dim` is odd.
        FunctreeError: if another argument is invalid.

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

    @checked("Attention: invalid arguments")
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
        if callable(attention) and context != "auto":
            why = "it has no effect: a function passed as `attention=` receives whole sequences"
            remedy = 'omit `context=`, or pass attention="auto"'
            problem = Problem(None, None, f"context={context!r}", why, remedy)
            raise FunctreeValueError("Attention: invalid arguments", [problem])
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
        """Declare the weights for `ft.nn.matrix_dimensions`, each as one matrix for all heads."""
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
        """Compute the result for each token, in `compute_dtype`.

        Args:
            x: the tokens' vectors.
            positions: the position of each token, which determines the rotation of its queries and
                keys; by default 0, 1, 2, …
            segments: the segment of each token. A token attends only to tokens in its own segment.
                By default, all tokens are in one segment.
            in_order: whether the tokens are in the order of their sequence. If not, a token attends
                to tokens whose positions are not after its own, and the window is measured in
                positions.

        Raises:
            FunctreeError: if the kernel that `attention` names does not support this call.
            FunctreeError: if `context="heads"` and the number of parts of the sequence does not
                divide the number of heads on a device.
            FunctreeError: if `in_order=False` and there are no positions.
            FunctreeError: if `in_order=False` and `attention` is a function.
            FunctreeError: if `attention` is a function whose result has the wrong shape.
            ShardingError: if the ambient rules do not fit the activations.
        """
        if not in_order:
            check_order(positions)
        heads = self._heads(x, positions)
        of_mask = None if in_order else positions
        return self._result(self._mixed(*heads, segments=segments, positions=of_mask))

    def decode(
        self,
        x: Float[Array, "batch seq embed"],
        positions: Positions,
        filled: Int[Array, "batch"],
        cache: LayerCache,
    ) -> tuple[Float[Array, "batch seq embed"], LayerCache]:
        """Compute the result, keys and values for tokens that follow the tokens in a cache.

        Args:
            x: the tokens' vectors.
            positions: the position of each token.
            filled: the number of tokens in each row of the cache.
            cache: the keys and values of the earlier tokens.

        Raises:
            FunctreeError: if the kernel that `attention` names does not support this call.
            FunctreeError: if `attention` is a function whose result has the wrong shape.
            ShardingError: if the ambient rules do not fit the activations.
        """
        query, key, value = self._heads(x, positions)
        # If the cache has no slots, `x` is a prompt. No tokens come before a prompt, so a kernel
        # can compute its attention from the prompt's own keys and values.
        if not cache[0].shape[1]:
            mixed = self._mixed(query, key, value)
        else:
            mixed = attend_cached(query, key, value, *cache, filled, window=self.window)
        return self._result(mixed), (key, value)

    def _heads(
        self, x: Float[Array, "*batch seq embed"], positions: Positions
    ) -> tuple[Array, Array, Array]:
        """Compute queries, keys and values of shape (*batch, seq, heads or kv_heads, head_dim)."""
        x, *weights = cast(self.compute_dtype, x, self.query, self.key, self.value)
        xs = inputs(x, "heads head_dim", "kv_heads head_dim", "kv_heads head_dim")
        multiply = functools.partial(product, dot_general=self.dot_general)
        query = affine(multiply(xs[0], weights[0]), None, self.query_bias)
        key = affine(multiply(xs[1], weights[1]), None, self.key_bias)
        value = affine(multiply(xs[2], weights[2]), None, self.value_bias)
        query = self._rotated(query, self.query_norm, positions)
        key = self._rotated(key, self.key_norm, positions)
        # The constraints come after the norm and the rotation, so that no collective runs between
        # these two. `attend` then gets arrays with the sharding that its `shard_map` expects.
        return (
            checkpoint_name(activation(query, "batch seq heads head_dim"), "attn_query"),
            checkpoint_name(activation(key, "batch seq kv_heads head_dim"), "attn_key"),
            checkpoint_name(activation(value, "batch seq kv_heads head_dim"), "attn_value"),
        )

    def _mixed(
        self, *heads: Array, segments: Segments = None, positions: Positions = None
    ) -> Float[Array, "*batch seq heads head_dim"]:
        """Compute attention from queries, keys and values, with the layer's options."""
        return attend(
            *heads,
            implementation=self.attention,
            window=self.window,
            segments=segments,
            positions=positions,
            context=self.context,
        )

    def _result(
        self, mixed: Float[Array, "*batch seq heads head_dim"]
    ) -> Float[Array, "*batch seq embed"]:
        """Multiply the mixed heads by the output weight."""
        # The result is constrained like the queries, even if a user's function computed it.
        mixed = checkpoint_name(activation(mixed, "batch seq heads head_dim"), "attn_mixed")
        mixed, out = cast(self.compute_dtype, mixed, self.out)
        # (*batch, seq, heads, head_dim) ─► (*batch, seq, embed). If "heads" is sharded, each device
        # has a partial sum, as in the feed-forward layer.
        summed = product(mixed, out, summed=2, dot_general=self.dot_general)
        return checkpoint_name(activation(summed, "batch seq embed"), "attn_out")

    def _rotated(self, x: Array, norm: RMSNorm | None, positions: Positions) -> Array:
        # The norm comes first, as in Qwen 3. The order matters: the rotation preserves a vector's
        # length, but the norm's scale differs between dimensions.
        if norm is not None:
            x = norm(x)
        return rope(x, theta=self.rope_theta, positions=positions, scaling=self.rope_scaling)


def _head_shapes(
    embed: int, heads: int, kv_heads: int | None, head_dim: int | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the sizes of the last two dimensions of queries, and of keys and values.

    Raises:
        FunctreeError: if `kv_heads` does not divide `heads`.
        FunctreeError: if `head_dim` is 0 or odd.
    """
    if kv_heads is None:
        kv_heads = heads
    if head_dim is None:
        head_dim = embed // heads
    # `head_dim` is checked again, since its default is 0 if `heads` is greater than `embed`.
    check("Attention: invalid arguments", head_dim=(head_dim, SIZE))
    check("Attention: invalid arguments", *_head_problems(heads, kv_heads, head_dim))
    return (heads, head_dim), (kv_heads, head_dim)


def _matrix(
    init: Initializer,
    key: PRNGKeyArray,
    rows: tuple[int, ...],
    columns: tuple[int, ...],
    dtype: DTypeLike,
) -> Float[Array, "*rows_and_columns"]:
    """Initialize a weight as a matrix whose rows are summed over."""
    # JAX's initializers treat all dimensions except the last as summed over. For (embed, heads,
    # head_dim), the variance would be too small by a factor of `heads`.
    matrix = init(key, (math.prod(rows), math.prod(columns)), dtype)
    return matrix.reshape(*rows, *columns)


def check_order(positions: Positions) -> None:
    """Raise a FunctreeError if tokens that are not in order have no positions.

    Examples:
        >>> from functree.nn.attention.layer import check_order
        >>> check_order(jnp.array([0, 2, 1]))
    """
    if positions is None:
        raise FunctreeValueError(
            "in_order=False needs `positions=`. Pass the positions that `ft.nn.zigzag` returns, "
            "or omit `in_order`"
        )


def _head_problems(heads: int, kv_heads: int, head_dim: int) -> Iterator[Problem]:
    """Yield the problems with the numbers of heads."""
    if heads % kv_heads:
        why = (
            f"it must divide heads={heads}: each key and value head is shared by the same number "
            "of query heads"
        )
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield Problem(None, None, f"kv_heads={kv_heads}", why, f"set kv_heads to one of {divisors}")
    if head_dim % 2:
        why = "it must be even: rotary positions rotate pairs of dimensions"
        yield Problem(None, None, f"head_dim={head_dim}", why, f"set head_dim={head_dim + 1}")
