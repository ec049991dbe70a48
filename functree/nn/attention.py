"""Vectors of a sequence ─► causal self-attention over them, with rotary positions and grouped keys and values."""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from functree.errors import FunctreeError, Problem
from functree.nn.activations import activation
from functree.nn.products import product
from functree.nn.rope import rope
from functree.nn.weights import Initializer, cast, dtype_or_none, fan_in
from functree.parameters import FLOATING, FUNCTION, KEY, POSITIVE, SIZE, check


class Attention(eqx.Module):
    """Causal self-attention: each token attends to itself and to the tokens before it.

    Query head `h` uses key and value head `h // (heads / kv_heads)`. The softmax is computed in float32. (Under
    `jax_numpy_dtype_promotion="strict"`, JAX raises for its gradient in bfloat16.)

    For `ft.offload` and other policies these values have names: the queries, keys and values of the heads are
    `"attn_query"`, `"attn_key"` (both after the rotation) and `"attn_value"`, the results of the heads are
    `"attn_mixed"`, and the result of the layer is `"attn_out"`.

    Args:
        embed: the size of the input and of the result.
        heads: the number of query heads.
        kv_heads: the number of key and value heads, a divisor of `heads`; by default `heads`.
        head_dim: the size of one head, even; by default `embed // heads`.
        rope_theta: the base of the rotary frequencies.
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
    rope_theta: float = eqx.field(static=True)
    compute_dtype: np.dtype | None = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope_theta: float = 10_000.0,
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
            rope_theta=(rope_theta, POSITIVE),
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

        self.query = project(query_key, heads)
        self.key = project(key_key, kv_heads)
        self.value = project(value_key, kv_heads)
        self.out = init(out_key, (heads * head_dim, embed), param_dtype).reshape(heads, head_dim, embed)
        self.rope_theta = rope_theta
        self.compute_dtype = dtype_or_none(compute_dtype)

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        x, *weights, out = cast(self.compute_dtype, x, self.query, self.key, self.value, self.out)
        query, key, value = (product(x, weight) for weight in weights)
        query = activation(rope(query, theta=self.rope_theta), "batch seq heads head_dim")
        key = activation(rope(key, theta=self.rope_theta), "batch seq kv_heads head_dim")
        value = activation(value, "batch seq kv_heads head_dim")
        query = checkpoint_name(query, "attn_query")
        key = checkpoint_name(key, "attn_key")
        value = checkpoint_name(value, "attn_value")
        mixed = checkpoint_name(activation(attend(query, key, value), "batch seq heads head_dim"), "attn_mixed")
        return checkpoint_name(activation(product(mixed, out, summed=2), "batch seq embed"), "attn_out")


def attend(
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq kv_heads head_dim"],
) -> Float[Array, "*batch seq heads head_dim"]:
    """Causal attention by `jax.nn.dot_product_attention`, over any number of batch dimensions.

    Examples:
        >>> from functree.nn.attention import attend
        >>> x = jnp.arange(6.0).reshape(3, 1, 2)
        >>> attend(x, x, x)[0]  # the first token attends only to itself
        Array([[0., 1.]], dtype=float32)
    """

    def causal(query: Array, key: Array, value: Array) -> Array:
        # JAX's own code adds bfloat16 and float32, which strict promotion rejects. Its gradient does so too, but is
        # computed outside of this context: in bfloat16 it needs standard promotion (observed in jax 0.10 and 0.12).
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    for _ in range(query.ndim - 4):  # JAX's function takes at most one batch dimension
        causal = jax.vmap(causal)
    return causal(query, key, value)


def head_problems(heads: int, kv_heads: int, head_dim: int) -> Iterator[Problem]:
    """The problems of these numbers of heads, which are positive integers, for the layer and for the config of a model.

    Examples:
        >>> from functree.nn.attention import head_problems
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
