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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from functree.nn.attention.mask import CAUSAL, Index, Mask, padded
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
    mask: Mask = CAUSAL,
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
        >>> x = jnp.arange(6.0).reshape(1, 3, 1, 2)
        >>> chunked(x, x, x)[0, 0]  # the first token attends only to itself
        Array([[0., 1.]], dtype=float32)
    """
    seq, keys = query.shape[1], key.shape[1]
    if max(seq, keys) <= chunk:
        return unchunked(query, [(key, value)], mask, attends_to_some=mask.is_one_sequence)
    chunk = int(chunk)
    # All chunks have the same size, so that the loops have a single body.
    more_queries, more_keys = -seq % chunk, -keys % chunk
    mixed: Queries = _in_chunks(
        chunk,
        padded(grouped(query, key.shape[2]), more_queries, 3),
        padded(heads_first(key), more_keys, 2),
        padded(heads_first(value), more_keys, 2),
        mask.padded(more_queries, more_keys, keys),
    )
    return ungrouped(mixed[:, :, :, :seq])


def unchunked(
    query: Float[Array, "batch seq heads head_dim"],
    parts: Sequence[tuple[Array, Array]],
    mask: Mask,
    attends_to_some: bool,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute attention like `chunked`, but with one array of scores for all queries and keys.

    Args:
        query: the queries.
        parts: pairs of keys and values, each of shape (batch, keys, kv_heads, head_dim). A cache
            and new tokens are two parts: joining them would copy the whole cache.
        mask: which keys each query attends to, with the keys of all parts in order.
        attends_to_some: whether each query attends to at least one key.
    """
    queries = grouped(query, parts[0][0].shape[2])
    of_parts = [(heads_first(key), heads_first(value)) for key, value in parts]
    # The scores are joined, not the keys, because the scores of a few queries are smaller: for each
    # head, a key has one score per query, but `head_dim` numbers.
    scores = jnp.concatenate([_scores(queries, key) for key, _ in of_parts], -1)
    visible = mask.visible(query.shape[1], scores.shape[-1])
    # Masked scores are set to the lowest finite number. With -inf, a query that attends to no key
    # would have NaN weights, and the gradients of all keys would be NaN. With the finite number,
    # the weights of such a query are equal, and are set to zero below.
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min))
    if not attends_to_some:
        weights = jnp.where(visible, weights, 0)
    # The weights are cast to the inputs' dtype, so that the product has narrow operands and a wide
    # sum.
    weights = weights.astype(query.dtype)
    products: list[Array] = []
    first = 0
    for key, value in of_parts:
        last = first + key.shape[2]
        products.append(_einsum("bkgst,bktd->bkgsd", weights[..., first:last], value))
        first = last
    return ungrouped(functools.reduce(jnp.add, products).astype(query.dtype))


_Sums = tuple[Array, Array, Array]


class _Chunks(NamedTuple):
    """The chunks of queries and keys.

    Attributes:
        mask: which keys each query attends to.
        size: the number of queries or keys in a chunk.
        queries: the number of chunks of queries.
        keys: the number of chunks of keys.
    """

    mask: Mask
    size: int
    queries: int
    keys: int

    def keys_of(self, i: Index) -> tuple[Index, Index]:
        """Return the range of the chunks of keys that chunk `i` of the queries attends to.

        With explicit positions, the range covers all chunks, since the positions are known only
        when the program runs.
        """
        if not self.mask.is_by_order:
            return 0, self.keys
        if self.mask.offset is None:
            # The chunk's first query has index i * size, and attends to the window - 1 keys before
            # its own.
            return self._not_before(i * self.size), i + 1
        first = i * self.size + self.mask.offset
        return self._not_before(first), jnp.clip(
            (first + self.size - 1) // self.size + 1, 0, self.keys
        )

    def _not_before(self, query: Index) -> Index:
        """Return the first chunk of keys in a query's window."""
        if self.mask.window is None:
            return 0
        return jnp.maximum(0, query - self.mask.window + 1) // self.size

    def queries_of(self, j: Index) -> tuple[Index, Index]:
        """Return the range of the chunks of queries that attend to chunk `j` of the keys."""
        if not self.mask.is_by_order:
            return 0, self.queries
        first, last = j, self.queries
        offset = 0
        if self.mask.offset is not None:
            offset = self.mask.offset
            first = jnp.maximum(0, j * self.size - offset) // self.size
        if self.mask.window is not None:
            # The last key has index (j + 1) * size - 1. The query of the same token attends to this
            # key, as do the window - 1 queries after it.
            of_key = ((j + 1) * self.size + self.mask.window - 2 - offset) // self.size
            last = jnp.clip(of_key + 1, 0, self.queries)
        return first, last

    def over(
        self,
        add: Callable[[Index, _Sums], _Sums],
        chunks: tuple[Index, Index],
        start: _Sums,
        pair: Callable[[Index], tuple[Index, Index]],
    ) -> _Sums:
        """Apply `add` to sums, chunk by chunk, but skip chunks in which no query attends to a key.

        With explicit positions, chunks are skipped at run time. About half of them are skipped if
        the tokens of each chunk are close to each other in the sequence, as after `ft.nn.zigzag`.

        Args:
            add: adds one chunk to the sums.
            chunks: the first chunk, and the chunk after the last.
            start: the sums before the first chunk.
            pair: returns the chunk of the queries and the chunk of the keys for a loop index.
        """
        if self.mask.is_by_order:
            return jax.lax.fori_loop(*chunks, add, start)

        def add_visible(i: Index, sums: _Sums) -> _Sums:
            meets = self._meets(*pair(i))
            return jax.lax.cond(meets, lambda sums: add(i, sums), lambda sums: sums, sums)

        return jax.lax.fori_loop(*chunks, add_visible, start)

    def _meets(self, i: Index, j: Index) -> Bool[Array, ""]:
        """Return whether positions allow a query of chunk `i` to attend to a key of chunk `j`."""
        mask = self.mask.chunk(i, j, self.size)
        queries, keys = mask.query_positions, mask.key_positions
        if queries is None or keys is None:
            return jnp.bool_(True)
        # A negative position marks padding or an empty slot: neither its key nor its query is used.
        far = jnp.iinfo(jnp.int32).max
        meets = jnp.where(keys < 0, far, keys).min() <= queries.max()
        if self.mask.window is not None:
            meets &= jnp.where(queries < 0, far, queries).min() - keys.max() < self.mask.window
        return meets

    def take(self, x: Array, i: Index, axis: int) -> Array:
        """Return chunk `i` along a dimension."""
        return jax.lax.dynamic_slice_in_dim(x, i * self.size, self.size, axis)

    def scores(self, query: Queries, key: Keys, i: Index, j: Index) -> Scores:
        """Compute the scores of chunk `i` of the queries and chunk `j` of the keys.

        The score of a masked key is -inf. This score causes no NaN, since `mix` and `gradients`
        never subtract -inf from it.
        """
        mask = self.mask.chunk(i, j, self.size)
        visible = mask.visible(self.size, self.size, i * self.size, j * self.size)
        return jnp.where(visible, _scores(query, key), -jnp.inf)


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
    chunks = _Chunks(mask, chunk, query.shape[3] // chunk, key.shape[2] // chunk)

    def of_queries(i: Index) -> tuple[Queries, PerQuery]:
        queries = chunks.take(query, i, 3)

        def add(j: Index, carry: _Sums) -> _Sums:
            largest, total, mixed = carry
            scores = chunks.scores(queries, chunks.take(key, j, 2), i, j)
            new = jnp.maximum(largest, scores.max(-1))
            # For a query that has attended to nothing yet, -inf - -inf would be NaN.
            finite = jnp.where(new == -jnp.inf, 0, new)
            # The sums so far are relative to exp(largest), and become relative to exp(new).
            weights, shrink = jnp.exp(scores - finite[..., None]), jnp.exp(largest - finite)
            values = chunks.take(value, j, 2)
            added = _einsum("bkgst,bktd->bkgsd", weights.astype(value.dtype), values)
            return new, shrink * total + weights.sum(-1), shrink[..., None] * mixed + added

        none = jnp.full_like(queries[..., 0], -jnp.inf, dtype)
        start = none, jnp.zeros_like(none), jnp.zeros_like(queries, dtype)
        largest, total, mixed = chunks.over(add, chunks.keys_of(i), start, lambda j: (i, j))
        attends = total > 0
        total = jnp.where(attends, total, 1)
        # A query that attends to nothing gets inf, so that its weights are zero in the backward
        # pass.
        log_total = jnp.where(attends, largest + jnp.log(total), jnp.inf)
        return mixed / total[..., None], log_total

    mixed, log_total = (_joined(x, 3) for x in jax.lax.map(of_queries, jnp.arange(chunks.queries)))
    return mixed, log_total


def _backward(chunk: int, kept: Kept, cotangent: Queries) -> tuple[Queries, Keys, Keys, None]:
    query, key = kept[:2]
    d_query, d_key, d_value = gradients(chunk, kept, cotangent, key.dtype)
    return d_query.astype(query.dtype), d_key, d_value, None


def gradients(
    chunk: int, kept: Kept, cotangent: Queries, of_keys: DTypeLike
) -> tuple[Queries, Keys, Keys]:
    """Run algorithm 4 of FlashAttention, which loops over chunks of keys.

    With weights `p`, values `v`, scores `s = q kᵀ` before scaling, and the cotangent `do` of the
    result `o`:

        dv = pᵀ do, dp = do vᵀ, ds = scale * p * (dp - o · do), dq = ds k, dk = dsᵀ q

    Returns:
        The gradients of the queries (in the dtype of the sums), and of the keys and values (in the
        dtype `of_keys`).
    """
    query, key, value, mask, mixed, log_total = kept
    dtype, scale = accumulator(query.dtype), _scale(query)
    chunks = _Chunks(mask, chunk, query.shape[3] // chunk, key.shape[2] // chunk)
    # This is o · do for each query. It equals the sum of p * dp over all keys, but computing that
    # sum would need all chunks of keys at once.
    common = (mixed.astype(dtype) * cotangent.astype(dtype)).sum(-1)

    def of_chunk(d_query: Array, j: Index) -> tuple[Array, tuple[Array, Array]]:
        keys, values = chunks.take(key, j, 2), chunks.take(value, j, 2)

        def add(i: Index, carry: _Sums) -> _Sums:
            d_query, d_keys, d_values = carry
            queries, given = chunks.take(query, i, 3), chunks.take(cotangent, i, 3)
            scores = chunks.scores(queries, keys, i, j)
            weights = jnp.exp(scores - chunks.take(log_total, i, 3)[..., None])
            d_weights = _einsum("bkgsd,bktd->bkgst", given, values)
            d_weights = d_weights - chunks.take(common, i, 3)[..., None]
            # Like the weights, the gradients of the scores are cast to the dtype of the inputs, so
            # that products have narrow operands.
            d_scores = (weights * d_weights * scale).astype(query.dtype)
            # `d_query` is updated in place. It is a sum over all chunks of keys, so both loops
            # carry it, in the wide dtype.
            d_queries = chunks.take(d_query, i, 3) + _einsum("bkgst,bktd->bkgsd", d_scores, keys)
            return (
                jax.lax.dynamic_update_slice_in_dim(d_query, d_queries, i * chunk, 3),
                d_keys + _einsum("bkgst,bkgsd->bktd", d_scores, queries),
                d_values + _einsum("bkgst,bkgsd->bktd", weights.astype(value.dtype), given),
            )

        start = d_query, jnp.zeros_like(keys, dtype), jnp.zeros_like(values, dtype)
        d_query, d_keys, d_values = chunks.over(add, chunks.queries_of(j), start, lambda i: (i, j))
        return d_query, (d_keys.astype(of_keys), d_values.astype(of_keys))

    d_query, parts = jax.lax.scan(of_chunk, jnp.zeros_like(query, dtype), jnp.arange(chunks.keys))
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
