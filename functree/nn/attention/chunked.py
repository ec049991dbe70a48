"""Chunked attention sums weighted values without holding the weights of all queries and keys.

The softmax is accumulated over chunks of keys. The backward pass recomputes the weights of each
chunk from the logsumexp of each query's scores (Dao et al., "FlashAttention", 2022, algorithms 1
and 4).

Here, query heads are grouped by the key and value head that they use (Ainslie et al., "GQA", 2023).
`group` is the number of query heads in a group.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from functree.nn.attention.mask import Index, Mask, chunk_of, padded
from functree.nn.weights import accumulator

CHUNK = 512
"""The default number of queries or keys in a chunk."""

Queries = Float[Array, "batch kv_heads group seq head_dim"]
Keys = Float[Array, "batch kv_heads keys head_dim"]
Scores = Float[Array, "batch kv_heads group seq keys"]
PerQuery = Float[Array, "batch kv_heads group seq"]


def chunked(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    mask: Mask,
    chunk: float = CHUNK,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute causal attention with grouped heads; a query that attends to no key gets zeros.

    Products are summed, and the softmax is computed, in float32 or wider.

    Args:
        query: the queries; head `h` uses key and value head `h // (heads / kv_heads)`.
        key: the keys.
        value: the values.
        mask: which keys each query attends to.
        chunk: the number of queries or keys in a chunk; infinity for a single chunk.

    Examples:
        >>> from functree.nn.attention.chunked import chunked
        >>> from functree.nn.attention.mask import Mask, in_order
        >>> x = jnp.arange(6.0).reshape(1, 3, 1, 2)
        >>> mask = Mask(in_order(3), in_order(3))
        >>> chunked(x, x, x, mask)[0, 0]  # the first token attends only to itself
        Array([[0., 1.]], dtype=float32)
    """
    if max(query.shape[1], key.shape[1]) <= chunk:
        return unchunked(query, [(key, value)], mask)
    chunk = int(chunk)
    return padded_to(chunk, functools.partial(_in_chunks, chunk), query, key, value, mask)


def padded_to(
    chunk: int,
    mixed: Callable[[Queries, Keys, Keys, Mask], Queries],
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    mask: Mask,
) -> Float[Array, "batch seq heads head_dim"]:
    """Call `mixed` with grouped heads, and with padding up to a multiple of the chunk size."""
    # All chunks have the same size, so that the loops have a single body.
    seq, keys = query.shape[1], key.shape[1]
    more_queries, more_keys = -seq % chunk, -keys % chunk
    result = mixed(
        padded(grouped(query, key.shape[2]), more_queries, 3),
        padded(heads_first(key), more_keys, 2),
        padded(heads_first(value), more_keys, 2),
        mask.padded(more_queries, more_keys),
    )
    return ungrouped(result[:, :, :, :seq])


def unchunked(
    query: Float[Array, "batch seq heads head_dim"],
    parts: Sequence[tuple[Array, Array]],
    mask: Mask,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute attention like `chunked`, but with one array of scores for all queries and keys.

    Args:
        query: the queries.
        parts: pairs of keys and values, each of shape (batch, keys, kv_heads, head_dim). A cache
            and new tokens are two parts: joining them would copy the whole cache.
        mask: which keys each query attends to, with the keys of all parts in order.
    """
    queries = grouped(query, parts[0][0].shape[2])
    of_parts = [(heads_first(key), heads_first(value)) for key, value in parts]
    # The scores are joined, not the keys, because the scores of a few queries are smaller: for each
    # head, a key has one score per query, but `head_dim` numbers.
    scores = jnp.concatenate([_scores(queries, key) for key, _ in of_parts], -1)
    # Masked scores are set to the lowest finite number. With -inf, a query that attends to no key
    # would have NaN weights, and the gradients of all keys would be NaN. With the finite number,
    # the weights of such a query are equal, and its result is set to zero below.
    visible = mask.visible
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min))
    # The weights are cast to the inputs' dtype, so that the product has narrow operands and a wide
    # sum.
    weights = weights.astype(query.dtype)
    products: list[Array] = []
    first = 0
    for key, value in of_parts:
        last = first + key.shape[2]
        products.append(_einsum("bkgst,bktd->bkgsd", weights[..., first:last], value))
        first = last
    mixed = jnp.where(visible.any(-1, keepdims=True), functools.reduce(jnp.add, products), 0)
    return ungrouped(mixed.astype(query.dtype))


_Sums = tuple[Array, Array, Array]


def _listed(visible: Bool[Array, "rows chunks"]) -> tuple[Array, Array, Array]:
    """Return each row's index, its chunks with the visible chunks first, and their number.

    The loops below skip chunks in which no query attends to a key: in order, half of them, or all
    outside the window. After `ft.nn.zigzag`, about half are skipped too.
    """
    chunks = jnp.argsort(~visible, axis=1, stable=True)
    return jnp.arange(visible.shape[0]), chunks, visible.sum(1, dtype=jnp.int32)


def _visible_scores(query: Queries, key: Keys, mask: Mask) -> Scores:
    """Compute the scores of a chunk of queries and a chunk of keys.

    The score of a masked key is -inf. This score causes no NaN, since `mix` and `gradients` never
    subtract -inf from it.
    """
    return jnp.where(mask.visible, _scores(query, key), -jnp.inf)


Kept = tuple[Queries, Keys, Keys, Mask, Queries, PerQuery]
"""The values that the backward pass needs: queries, keys, values, the mask, the result, and the
logsumexp of each query's scores."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(chunk: int, query: Queries, key: Keys, value: Keys, mask: Mask) -> Queries:
    return _forward(chunk, query, key, value, mask)[0]


def _forward(
    chunk: int, query: Queries, key: Keys, value: Keys, mask: Mask
) -> tuple[Queries, Kept]:
    mixed, log_total = mix(chunk, query, key, value, mask)
    mixed = mixed.astype(query.dtype)
    return mixed, (query, key, value, mask, mixed, log_total)


def mix(chunk: int, query: Queries, key: Keys, value: Keys, mask: Mask) -> tuple[Queries, PerQuery]:
    """Run algorithm 1 of FlashAttention, which rescales the softmax's sums for each chunk of keys.

    Returns:
        The result in the dtype of the sums, and the logsumexp of each query's scores. For a query
        that attends to no key, inf replaces the logsumexp.
    """
    dtype = accumulator(query.dtype)

    def of_queries(row: tuple[Array, Array, Array]) -> tuple[Queries, PerQuery]:
        i, chunks, number = row
        queries = chunk_of(query, i, chunk, 3)

        def add(j: Index, carry: _Sums) -> _Sums:
            largest, total, mixed = carry
            keys, values = chunk_of(key, j, chunk, 2), chunk_of(value, j, chunk, 2)
            scores = _visible_scores(queries, keys, mask.chunk(i, j, chunk))
            new = jnp.maximum(largest, scores.max(-1))
            # For a query that has attended to nothing yet, -inf - -inf would be NaN.
            finite = jnp.where(new == -jnp.inf, 0, new)
            # The sums so far are relative to exp(largest), and become relative to exp(new).
            weights, shrink = jnp.exp(scores - finite[..., None]), jnp.exp(largest - finite)
            added = _einsum("bkgst,bktd->bkgsd", weights.astype(value.dtype), values)
            return new, shrink * total + weights.sum(-1), shrink[..., None] * mixed + added

        none = jnp.full_like(queries[..., 0], -jnp.inf, dtype)
        start = none, jnp.zeros_like(none), jnp.zeros_like(queries, dtype)
        sums = jax.lax.fori_loop(0, number, lambda n, sums: add(chunks[n], sums), start)
        largest, total, mixed = sums
        attends = total > 0
        total = jnp.where(attends, total, 1)
        # A query that attends to nothing gets inf, so that its weights are zero in the backward
        # pass.
        log_total = jnp.where(attends, largest + jnp.log(total), jnp.inf)
        return mixed / total[..., None], log_total

    parts = jax.lax.map(of_queries, _listed(mask.visible_chunks(chunk)))
    mixed, log_total = (_joined(x, 3) for x in parts)
    return mixed, log_total


def _backward(chunk: int, kept: Kept, cotangent: Queries) -> tuple[Queries, Keys, Keys, None]:
    query, key = kept[:2]
    d_query, d_key, d_value = gradients(chunk, kept, cotangent, key.dtype)
    return d_query.astype(query.dtype), d_key, d_value, None


def gradients(
    chunk: int, kept: Kept, cotangent: Queries, wanted: DTypeLike
) -> tuple[Queries, Keys, Keys]:
    """Run algorithm 4 of FlashAttention, which loops over chunks of keys.

    With weights `p`, values `v`, scores `s = q kᵀ` before scaling, and the cotangent `do` of the
    result `o`:

        dv = pᵀ do, dp = do vᵀ, ds = scale * p * (dp - o · do), dq = ds k, dk = dsᵀ q

    Returns:
        The gradients of the queries (in the dtype of the sums), and of the keys and values (in the
        dtype `wanted`).
    """
    query, key, value, mask, mixed, log_total = kept
    dtype, scale = accumulator(query.dtype), _scale(query)
    # This is o · do for each query. It equals the sum of p * dp over all keys, but computing that
    # sum would need all chunks of keys at once.
    common = (mixed.astype(dtype) * cotangent.astype(dtype)).sum(-1)

    def of_keys(
        d_query: Array, row: tuple[Array, Array, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        j, chunks, number = row
        keys, values = chunk_of(key, j, chunk, 2), chunk_of(value, j, chunk, 2)

        def add(i: Index, carry: _Sums) -> _Sums:
            d_query, d_keys, d_values = carry
            queries, given = chunk_of(query, i, chunk, 3), chunk_of(cotangent, i, chunk, 3)
            scores = _visible_scores(queries, keys, mask.chunk(i, j, chunk))
            weights = jnp.exp(scores - chunk_of(log_total, i, chunk, 3)[..., None])
            d_weights = _einsum("bkgsd,bktd->bkgst", given, values)
            d_weights = d_weights - chunk_of(common, i, chunk, 3)[..., None]
            # Like the weights, the gradients of the scores are cast to the dtype of the inputs, so
            # that products have narrow operands.
            d_scores = (weights * d_weights * scale).astype(query.dtype)
            # `d_query` is updated in place. It is a sum over all chunks of keys, so both loops
            # carry it, in the wide dtype.
            d_queries = chunk_of(d_query, i, chunk, 3)
            d_queries += _einsum("bkgst,bktd->bkgsd", d_scores, keys)
            return (
                jax.lax.dynamic_update_slice_in_dim(d_query, d_queries, i * chunk, 3),
                d_keys + _einsum("bkgst,bkgsd->bktd", d_scores, queries),
                d_values + _einsum("bkgst,bkgsd->bktd", weights.astype(value.dtype), given),
            )

        start = d_query, jnp.zeros_like(keys, dtype), jnp.zeros_like(values, dtype)
        sums = jax.lax.fori_loop(0, number, lambda n, sums: add(chunks[n], sums), start)
        d_query, d_keys, d_values = sums
        return d_query, (d_keys.astype(wanted), d_values.astype(wanted))

    rows = _listed(mask.visible_chunks(chunk).T)
    d_query, parts = jax.lax.scan(of_keys, jnp.zeros_like(query, dtype), rows)
    d_key, d_value = (_joined(x, 2) for x in parts)
    return d_query, d_key, d_value


_in_chunks.defvjp(_forward, _backward)


def _scores(query: Queries, key: Keys) -> Scores:
    """Multiply queries and keys, and divide by the square root of `head_dim`."""
    return _einsum("bkgsd,bktd->bkgst", query, key) * _scale(query)


def _scale(query: Queries) -> float:
    return 1 / math.sqrt(query.shape[-1])


def _einsum(equation: str, a: Array, b: Array) -> Array:
    """Compute an einsum whose sums are in float32 or wider."""
    return jnp.einsum(equation, a, b, preferred_element_type=accumulator(a.dtype))


def grouped(query: Float[Array, "batch seq heads head_dim"], kv_heads: int) -> Queries:
    """Group neighboring query heads that use the same key and value head."""
    batch, seq, heads, head_dim = query.shape
    return query.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)


def ungrouped(mixed: Queries) -> Float[Array, "batch seq heads head_dim"]:
    batch, kv_heads, group, seq, head_dim = mixed.shape
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, seq, kv_heads * group, head_dim)


def heads_first(x: Float[Array, "batch keys kv_heads head_dim"]) -> Keys:
    return x.transpose(0, 2, 1, 3)


def _joined(chunks: Array, axis: int) -> Array:
    """Concatenate chunks, which are stacked along the first dimension, along dimension `axis`."""
    moved = jnp.moveaxis(chunks, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
