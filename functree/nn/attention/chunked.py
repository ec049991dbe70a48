"""Queries, keys and values ─► the values, weighted: without an array of all queries by all keys.

The softmax is accumulated over chunks of keys. The backward pass computes the weights of each chunk
again, from the logarithms of their sums: Dao et al., "FlashAttention" (2022), algorithms 1 and 4.

Inside, heads are grouped by the key and value head that they use (Ainslie et al., "GQA", 2023), and
`group` is the number of query heads to one of those.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from functree.nn.weights import accumulator

CHUNK = 512
"""The number of queries, and of keys, whose weights are held at one time."""

Queries = Float[Array, "batch kv_heads group seq head_dim"]
Keys = Float[Array, "batch kv_heads keys head_dim"]
Scores = Float[Array, "batch kv_heads group seq keys"]
PerQuery = Float[Array, "batch kv_heads group seq"]
Index = int | Int[Array, ""]


class Mask(eqx.Module):
    """Which keys each query attends to: those that are not after it, in its segment, in its window.

    Attributes:
        query_positions: the position of each query in its sequence; None for 0, 1, 2, …
        key_positions: the position of each key, likewise. Nothing attends to a key at a negative
            one: an empty slot of a cache.
        query_segments: the segment of each query, such as a text of several in one sequence; None
            if all are in one.
        key_segments: the segment of each key, likewise.
        window: how many keys a query attends to at most, its own among them; None for all.

    Examples:
        >>> from functree.nn.attention.chunked import Mask
        >>> Mask(window=2).visible(3, 3)[0, 0, 0].astype(int)
        Array([[1, 0, 0],
               [1, 1, 0],
               [0, 1, 1]], dtype=int32)
    """

    query_positions: Int[Array, "batch seq"] | None = None
    key_positions: Int[Array, "batch keys"] | None = None
    query_segments: Int[Array, "batch seq"] | None = None
    key_segments: Int[Array, "batch keys"] | None = None
    # Static: without a window no comparison with it is traced, and chunks outside of it are left
    # out of the loops.
    window: int | None = eqx.field(static=True, default=None)

    @property
    def is_one_sequence(self) -> bool:
        """Whether queries and keys are those of the same tokens.

        Then each query attends to its own key at least, and chunk `i` of the queries to no chunk of
        keys after `i`.
        """
        return self.query_positions is None and self.key_positions is None

    def visible(
        self, seq: int, keys: int, first_query: Index = 0, first_key: Index = 0
    ) -> Bool[Array, "#batch 1 1 seq keys"]:
        """Whether each query attends to each key.

        Args:
            seq: the number of queries.
            keys: the number of keys.
            first_query: the index of the first query in its sequence, if there are no positions.
            first_key: the index of the first key, likewise.
        """
        query_positions, key_positions = self.query_positions, self.key_positions
        if query_positions is None:
            query_positions = (jnp.arange(seq) + first_query)[None]
        if key_positions is None:
            key_positions = (jnp.arange(keys) + first_key)[None]
        # (batch, seq, 1) and (batch, 1, keys): the batch is 1 if all rows have the same positions.
        query_positions, key_positions = query_positions[:, :, None], key_positions[:, None, :]
        visible = key_positions <= query_positions
        if self.key_positions is not None:
            visible &= key_positions >= 0
        if self.window is not None:
            visible &= query_positions - key_positions < self.window
        if self.query_segments is not None and self.key_segments is not None:
            visible &= self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return visible[:, None, None]  # the same for all heads

    def chunk(self, i: Index, j: Index, size: int) -> "Mask":
        """The mask of chunk `i` of the queries and chunk `j` of the keys."""
        return Mask(
            _optional_chunk(self.query_positions, i, size),
            _optional_chunk(self.key_positions, j, size),
            _optional_chunk(self.query_segments, i, size),
            _optional_chunk(self.key_segments, j, size),
            self.window,
        )

    def padded(self, queries: int, keys: int) -> "Mask":
        """The mask with more queries and keys at the end; no query of before attends to these keys.

        Positions are -1 there. Without positions the keys are after all queries.
        """
        return Mask(
            _optional_padded(self.query_positions, queries),
            _optional_padded(self.key_positions, keys),
            _optional_padded(self.query_segments, queries),
            _optional_padded(self.key_segments, keys),
            self.window,
        )


CAUSAL = Mask()
"""All keys that are not after a query."""


def chunked(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    mask: Mask = CAUSAL,
    chunk: float = CHUNK,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention of grouped heads. A query that attends to no key gets zeros.

    Products are summed, and the softmax is computed, in float32 or wider.

    Args:
        query: the queries; head `h` uses key and value head `h // (heads / kv_heads)`.
        key: the keys.
        value: the values.
        mask: which keys each query attends to.
        chunk: the number of queries, and of keys, whose weights are held at one time; infinite for
            all.

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
    # All chunks have one size, so that the loops over them are loops of one body.
    more_queries, more_keys = -seq % chunk, -keys % chunk
    mixed: Queries = _in_chunks(
        chunk,
        _padded(_grouped(query, key.shape[2]), more_queries, 3),
        _padded(_heads_first(key), more_keys, 2),
        _padded(_heads_first(value), more_keys, 2),
        mask.padded(more_queries, more_keys),
    )
    return _ungrouped(mixed[:, :, :, :seq])


def unchunked(
    query: Float[Array, "batch seq heads head_dim"],
    parts: Sequence[tuple[Array, Array]],
    mask: Mask,
    attends_to_some: bool,
) -> Float[Array, "batch seq heads head_dim"]:
    """As `chunked`, with one array of all queries by all keys.

    Args:
        query: the queries.
        parts: keys and values, (batch, keys, kv_heads, head_dim). Those of a cache and those of new
            tokens are two parts: joined in one array, the whole cache would be copied.
        mask: which keys each query attends to, of all parts one after the other.
        attends_to_some: whether each query attends to some key.
    """
    grouped = _grouped(query, parts[0][0].shape[2])
    heads_first = [(_heads_first(key), _heads_first(value)) for key, value in parts]
    # The scores are joined in place of the keys: for each head and key they have one number, and a
    # key has `head_dim`.
    scores = jnp.concatenate([_scores(grouped, key) for key, _ in heads_first], -1)
    visible = mask.visible(query.shape[1], scores.shape[-1])
    # Not -inf: of a query that attends to nothing all weights would be NaN, and so would be the
    # gradients of all keys. With the least number they are equal, and zeros below.
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min))
    if not attends_to_some:
        weights = jnp.where(visible, weights, 0)
    # Cast to the dtype of the values, for a product of two narrow arrays with a wide sum.
    weights = weights.astype(query.dtype)
    products: list[Array] = []
    first = 0
    for key, value in heads_first:
        last = first + key.shape[2]
        products.append(_einsum("bkgst,bktd->bkgsd", weights[..., first:last], value))
        first = last
    return _ungrouped(functools.reduce(jnp.add, products).astype(query.dtype))


class _Chunks(NamedTuple):
    """Queries and keys in chunks.

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
        """The first chunk of keys that queries of chunk `i` attend to, and the one after them.

        With positions from elsewhere these are all: where a query is is known only by its value.
        """
        if not self.mask.is_one_sequence:
            return 0, self.keys
        if self.mask.window is None:
            return 0, i + 1
        # The first query of the chunk is i * size, and attends to window - 1 keys before its own.
        return jnp.maximum(0, i * self.size - self.mask.window + 1) // self.size, i + 1

    def queries_of(self, j: Index) -> tuple[Index, Index]:
        """The first chunk of queries that attend to keys of chunk `j`, and the one after them."""
        if not self.mask.is_one_sequence:
            return 0, self.queries
        if self.mask.window is None:
            return j, self.queries
        # The last key of the chunk is (j + 1) * size - 1: its own query and window - 1 after it.
        last = ((j + 1) * self.size + self.mask.window - 2) // self.size
        return j, jnp.minimum(self.queries, last + 1)

    def take(self, x: Array, i: Index, axis: int) -> Array:
        """Chunk `i` along a dimension."""
        return jax.lax.dynamic_slice_in_dim(x, i * self.size, self.size, axis)

    def scores(self, query: Queries, key: Keys, i: Index, j: Index) -> Scores:
        """The scores of chunk `i` of the queries and chunk `j` of the keys; -inf if not visible.

        Here -inf gives no NaN: `_forward` and `_backward` subtract a finite number from it.
        """
        mask = self.mask.chunk(i, j, self.size)
        visible = mask.visible(self.size, self.size, i * self.size, j * self.size)
        return jnp.where(visible, _scores(query, key), -jnp.inf)


_Kept = tuple[Queries, Keys, Keys, Mask, Queries, PerQuery]
"""What the backward pass needs: queries, keys, values, the mask, the result, and the logarithm of
each query's sum of weights."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(chunk: int, query: Queries, key: Keys, value: Keys, mask: Mask) -> Queries:
    return _forward(chunk, query, key, value, mask)[0]


def _forward(
    chunk: int, query: Queries, key: Keys, value: Keys, mask: Mask
) -> tuple[Queries, _Kept]:
    """Algorithm 1 of FlashAttention: the softmax is corrected with each chunk of keys."""
    dtype = accumulator(query.dtype)
    chunks = _Chunks(mask, chunk, query.shape[3] // chunk, key.shape[2] // chunk)

    def mix(i: Index) -> tuple[Queries, PerQuery]:
        queries = chunks.take(query, i, 3)

        def add(j: Index, carry: tuple[PerQuery, PerQuery, Queries]) -> tuple[Array, Array, Array]:
            largest, total, mixed = carry
            scores = chunks.scores(queries, chunks.take(key, j, 2), i, j)
            new = jnp.maximum(largest, scores.max(-1))
            # A query that has attended to nothing yet: -inf - -inf would be NaN.
            finite = jnp.where(new == -jnp.inf, 0, new)
            # What was summed so far was divided by exp(largest), and is now divided by exp(new).
            weights, shrink = jnp.exp(scores - finite[..., None]), jnp.exp(largest - finite)
            values = chunks.take(value, j, 2)
            added = _einsum("bkgst,bktd->bkgsd", weights.astype(value.dtype), values)
            return new, shrink * total + weights.sum(-1), shrink[..., None] * mixed + added

        none = jnp.full_like(queries[..., 0], -jnp.inf, dtype)
        start = none, jnp.zeros_like(none), jnp.zeros_like(queries, dtype)
        largest, total, mixed = jax.lax.fori_loop(*chunks.keys_of(i), add, start)
        attends = total > 0
        total = jnp.where(attends, total, 1)
        # Infinite for a query that attends to nothing, so that its weights are zero in the backward
        # pass.
        log_total = jnp.where(attends, largest + jnp.log(total), jnp.inf)
        return (mixed / total[..., None]).astype(query.dtype), log_total

    mixed, log_total = (_joined(x, 3) for x in jax.lax.map(mix, jnp.arange(chunks.queries)))
    return mixed, (query, key, value, mask, mixed, log_total)


def _backward(chunk: int, kept: _Kept, cotangent: Queries) -> tuple[Queries, Keys, Keys, None]:
    """Algorithm 4 of FlashAttention: by chunks of keys, with a sum over them for the queries.

    With weights p, values v, and the cotangent do of the result o: dv = pᵀ do, dp = do vᵀ,
    ds = p * (dp - o · do), dq = ds k, dk = dsᵀ q, where the scores s are scaled.
    """
    query, key, value, mask, mixed, log_total = kept
    dtype, scale = accumulator(query.dtype), _scale(query)
    chunks = _Chunks(mask, chunk, query.shape[3] // chunk, key.shape[2] // chunk)
    # o · do, for each query: equal to the sum of p * dp over all keys, for which all chunks of keys
    # would be needed.
    common = (mixed.astype(dtype) * cotangent.astype(dtype)).sum(-1)

    def of_keys(d_query: Array, j: Index) -> tuple[Array, tuple[Array, Array]]:
        keys, values = chunks.take(key, j, 2), chunks.take(value, j, 2)

        def add(i: Index, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_query, d_keys, d_values = carry
            queries, given = chunks.take(query, i, 3), chunks.take(cotangent, i, 3)
            scores = chunks.scores(queries, keys, i, j)
            weights = jnp.exp(scores - chunks.take(log_total, i, 3)[..., None])
            d_weights = _einsum("bkgsd,bktd->bkgst", given, values)
            d_weights = d_weights - chunks.take(common, i, 3)[..., None]
            # Cast to the dtype of the heads, as the weights are: products of two narrow arrays.
            d_scores = (weights * d_weights * scale).astype(query.dtype)
            # Added in place: the gradient of the queries is carried through both loops, in the wide
            # dtype, since it is a sum over all chunks of keys.
            d_queries = chunks.take(d_query, i, 3) + _einsum("bkgst,bktd->bkgsd", d_scores, keys)
            return (
                jax.lax.dynamic_update_slice_in_dim(d_query, d_queries, i * chunk, 3),
                d_keys + _einsum("bkgst,bkgsd->bktd", d_scores, queries),
                d_values + _einsum("bkgst,bkgsd->bktd", weights.astype(value.dtype), given),
            )

        start = d_query, jnp.zeros_like(keys, dtype), jnp.zeros_like(values, dtype)
        d_query, d_keys, d_values = jax.lax.fori_loop(*chunks.queries_of(j), add, start)
        return d_query, (d_keys.astype(key.dtype), d_values.astype(value.dtype))

    d_query, parts = jax.lax.scan(of_keys, jnp.zeros_like(query, dtype), jnp.arange(chunks.keys))
    d_key, d_value = (_joined(x, 2) for x in parts)
    return d_query.astype(query.dtype), d_key, d_value, None


_in_chunks.defvjp(_forward, _backward)


def _scores(query: Queries, key: Keys) -> Scores:
    """The products of queries and keys, divided by the root of the size of a head."""
    return _einsum("bkgsd,bktd->bkgst", query, key) * _scale(query)


def _scale(query: Queries) -> float:
    return 1 / math.sqrt(query.shape[-1])


def _einsum(equation: str, a: Array, b: Array) -> Array:
    """A sum of products, in float32 or wider."""
    return jnp.einsum(equation, a, b, preferred_element_type=accumulator(a.dtype))


def _grouped(query: Float[Array, "batch seq heads head_dim"], kv_heads: int) -> Queries:
    """The queries, by the key and value head that they use: neighbours are a group."""
    batch, seq, heads, head_dim = query.shape
    return query.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)


def _ungrouped(mixed: Queries) -> Float[Array, "batch seq heads head_dim"]:
    batch, kv_heads, group, seq, head_dim = mixed.shape
    return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, seq, kv_heads * group, head_dim)


def _heads_first(x: Float[Array, "batch keys kv_heads head_dim"]) -> Keys:
    return x.transpose(0, 2, 1, 3)


def _optional_chunk(x: Array | None, i: Index, size: int) -> Array | None:
    return None if x is None else jax.lax.dynamic_slice_in_dim(x, i * size, size, 1)


def _optional_padded(x: Array | None, more: int) -> Array | None:
    return None if x is None else _padded(x, more, 1, -1)


def _padded(x: Array, more: int, axis: int, value: int = 0) -> Array:
    """`x`, longer by `more` along a dimension."""
    if not more:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, more)
    return jnp.pad(x, widths, constant_values=value)


def _joined(chunks: Array, axis: int) -> Array:
    """Chunks along the first dimension, joined along another one."""
    moved = jnp.moveaxis(chunks, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
