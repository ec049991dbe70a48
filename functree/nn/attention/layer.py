"""Vectors of a sequence ─► causal self-attention over them, with rotary positions and grouped keys and values."""

from collections.abc import Iterator
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from functree.errors import FunctreeError, Problem
from functree.nn.activations import activation, inputs
from functree.nn.attention.attend import IMPLEMENTATION, Implementation, attend
from functree.nn.attention.cached import attend_cached
from functree.nn.norm import RMSNorm
from functree.nn.products import along, product
from functree.nn.rope import SCALING, Scaling, rope
from functree.nn.weights import Initializer, cast, dtype_or_none, fan_in
from functree.parameters import FLAG, FLOATING, FUNCTION, KEY, POSITIVE, SIZE, check

Positions = Int[Array, "*#batch seq"] | None
Segments = Int[Array, "*batch seq"] | None
LayerCache = tuple[Float[Array, "batch slots kv_heads head_dim"], Float[Array, "batch slots kv_heads head_dim"]]
"""The keys and values of one layer."""


class Attention(eqx.Module):
    """Causal self-attention: each token attends to itself and to the tokens before it.

    Query head `h` uses key and value head `h // (heads / kv_heads)`. The softmax is computed in float32 or wider.

    For `ft.offload` and other policies these values have names: the queries, keys and values of the heads are
    `"attn_query"`, `"attn_key"` (both after the rotation) and `"attn_value"`, the results of the heads are
    `"attn_mixed"`, and the result of the layer is `"attn_out"`.

    Args:
        embed: the size of the input and of the result.
        heads: the number of query heads.
        kv_heads: the number of key and value heads, a divisor of `heads`; by default `heads`.
        head_dim: the size of one head, even; by default `embed // heads`.
        use_bias: whether queries, keys and values have biases, which are initially zero.
        qk_norm: whether queries and keys are normalized over `head_dim`, before they are rotated.
        norm_eps: the `eps` of these norms.
        window: how many tokens a token sees at most, itself among them; by default all before it.
        rope_theta: the base of the rotary frequencies.
        rope_scaling: a hashable function that changes the rotary frequencies, such as `ft.nn.Llama3Rope`.
        attention: what computes it: `"auto"`, `"xla"`, `"chunked"`, `"splash"`, `"cudnn"`, or a function of the
            arguments of `jax.nn.dot_product_attention`. By default the kernel of the platform that the program is
            lowered for, and elsewhere in chunks, so that no array of all queries by all keys is held.
        init: the initializer of the four weights. It makes each as a matrix, whose first dimension is the one that is
            summed over; by default truncated normal with variance 1 / (size summed over).
        key: the key for the weights.
        param_dtype: the dtype of the parameters.
        compute_dtype: the dtype to which they are cast in the computation; `None`: that of `x`.

    Raises:
        FunctreeError: a size is not a positive integer, `kv_heads` does not divide `heads`, or `head_dim` is odd.

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
    compute_dtype: np.dtype | None = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        use_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        window: int | None = None,
        rope_theta: float = 10_000.0,
        rope_scaling: Scaling | None = None,
        attention: Implementation = "auto",
        init: Initializer = fan_in,
        key: PRNGKeyArray,
        param_dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike | None = None,
    ):
        # First: a default below divides by `heads`.
        check(
            "Attention cannot be built",
            embed=(embed, SIZE),
            heads=(heads, SIZE),
            kv_heads=(kv_heads, SIZE.or_none()),
            head_dim=(head_dim, SIZE.or_none()),
            use_bias=(use_bias, FLAG),
            qk_norm=(qk_norm, FLAG),
            norm_eps=(norm_eps, POSITIVE),
            window=(window, SIZE.or_none()),
            rope_theta=(rope_theta, POSITIVE),
            rope_scaling=(rope_scaling, SCALING),
            attention=(attention, IMPLEMENTATION),
            init=(init, FUNCTION),
            key=(key, KEY),
            param_dtype=(param_dtype, FLOATING),
            compute_dtype=(compute_dtype, FLOATING.or_none()),
        )
        kv_heads = heads if kv_heads is None else kv_heads
        head_dim = embed // heads if head_dim is None else head_dim
        check("Attention cannot be built", head_dim=(head_dim, SIZE))
        if problems := list(head_problems(heads, kv_heads, head_dim)):
            raise FunctreeError("Attention cannot be built", problems)
        query_key, key_key, value_key, out_key = jax.random.split(key, 4)

        def project(key: PRNGKeyArray, heads: int) -> Array:
            return init(key, (embed, heads * head_dim), param_dtype).reshape(embed, heads, head_dim)

        def bias(heads: int) -> Array | None:
            return jnp.zeros((heads, head_dim), param_dtype) if use_bias else None

        def norm() -> RMSNorm | None:
            return RMSNorm(head_dim, norm_eps, axes="head_dim", param_dtype=param_dtype) if qk_norm else None

        self.query = project(query_key, heads)
        self.key = project(key_key, kv_heads)
        self.value = project(value_key, kv_heads)
        self.out = init(out_key, (heads * head_dim, embed), param_dtype).reshape(heads, head_dim, embed)
        self.query_bias, self.key_bias, self.value_bias = bias(heads), bias(kv_heads), bias(kv_heads)
        self.query_norm, self.key_norm = norm(), norm()
        self.window, self.rope_theta, self.rope_scaling = window, rope_theta, rope_scaling
        self.attention = attention
        self.compute_dtype = dtype_or_none(compute_dtype)

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
        self,
        x: Any,
        positions: Any = None,
        segments: Any = None,
        filled: Any = None,
        *,
        cache: Any = None,
    ) -> Any:
        """Attend.

        Args:
            x: the tokens' vectors.
            positions: the position of each token, by which its queries and keys are rotated; by default 0, 1, 2, …
            segments: the segment of each token: a token sees only those of its own; by default all are in one.
            filled: how many tokens each row has in the cache.
            cache: keys and values of these tokens. The keys and values of the new ones are returned too.
        """
        x, *weights, out = cast(self.compute_dtype, x, self.query, self.key, self.value, self.out)
        biases = self.query_bias, self.key_bias, self.value_bias
        places = inputs(x, "heads head_dim", "kv_heads head_dim", "kv_heads head_dim")
        query, key, value = (
            _shifted(product(x, weight), bias) for x, weight, bias in zip(places, weights, biases, strict=True)
        )
        query = self._rotated(query, self.query_norm, positions)
        key = self._rotated(key, self.key_norm, positions)
        query = checkpoint_name(activation(query, "batch seq heads head_dim"), "attn_query")
        key = checkpoint_name(activation(key, "batch seq kv_heads head_dim"), "attn_key")
        value = checkpoint_name(activation(value, "batch seq kv_heads head_dim"), "attn_value")
        if cache is None or not cache[0].shape[1]:  # nothing is before them
            mixed = attend(query, key, value, implementation=self.attention, window=self.window, segments=segments)
        else:
            mixed = attend_cached(query, key, value, cache[0], cache[1], filled, window=self.window)
        mixed = checkpoint_name(activation(mixed, "batch seq heads head_dim"), "attn_mixed")
        y = checkpoint_name(activation(product(mixed, out, summed=2), "batch seq embed"), "attn_out")
        return y if cache is None else (y, (key, value))

    def _rotated(self, x: Array, norm: RMSNorm | None, positions: Positions) -> Array:
        x = x if norm is None else norm(x)
        return rope(x, theta=self.rope_theta, positions=positions, scaling=self.rope_scaling)


def _shifted(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + along(bias.astype(x.dtype), x)


def head_problems(heads: int, kv_heads: int, head_dim: int) -> Iterator[Problem]:
    """The problems of these numbers of heads, which are positive integers, for the layer and for the config of a model.

    Examples:
        >>> from functree.nn.attention.layer import head_problems
        >>> [problem.why for problem in head_problems(8, 3, 16)]
        ['it must divide heads=8: all key and value heads serve equally many query heads']
    """
    if heads % kv_heads:
        why = f"it must divide heads={heads}: all key and value heads serve equally many query heads"
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield Problem(None, None, f"kv_heads={kv_heads}", why, f"one of {divisors} for kv_heads")
    if head_dim % 2:
        why = "it must be even: rotary positions rotate pairs of dimensions"
        yield Problem(None, None, f"head_dim={head_dim}", why, f"head_dim={head_dim + 1}")
