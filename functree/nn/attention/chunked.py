"""Queries, keys and values ─► their mix, without an array of all queries by all keys.

The softmax is accumulated over chunks of keys. The backward pass computes the weights of each chunk again, from the
logarithms of their sums: Dao et al., "FlashAttention" (2022), algorithms 1 and 4.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from functree.nn.weights import accumulator

CHUNK = 512
"""The number of queries, and of keys, whose weights are held at one time."""


class Places(NamedTuple):
    """Where queries and keys are. A query sees the keys that are not behind it, in its segment, and within the window.

    Attributes:
        query: the index of each query in its sequence; None for 0, 1, 2, …
        key: the index of each key, likewise; nobody sees a key with a negative one.
        query_segment: the segment of each query; None if all are in one.
        key_segment: the segment of each key, likewise.
    """

    query: Int[Array, "batch seq"] | None = None
    key: Int[Array, "batch keys"] | None = None
    query_segment: Int[Array, "batch seq"] | None = None
    key_segment: Int[Array, "batch keys"] | None = None

    @property
    def of_one_sequence(self) -> bool:
        """Whether queries and keys are those of the same tokens, so that each query sees its own key at least."""
        return self.query is None and self.key is None


ONE_SEQUENCE = Places()


def chunked(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    places: Places = ONE_SEQUENCE,
    window: int | None = None,
    chunk: float = CHUNK,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention of grouped heads. A query that sees no key gets zeros.

    Products are summed, and the softmax is computed, in float32 or wider.

    Args:
        query: the queries; head `h` uses key and value head `h // (heads / kv_heads)`.
        key: the keys.
        value: the values.
        places: where they are; by default in one sequence.
        window: how many keys a query sees at most, its own among them; None for all.
        chunk: the number of queries, and of keys, whose weights are held at one time; infinite for all.

    Examples:
        >>> from functree.nn.attention.chunked import chunked
        >>> x = jnp.arange(6.0).reshape(1, 3, 1, 2)
        >>> chunked(x, x, x)[0, 0]  # the first token sees only itself
        Array([[0., 1.]], dtype=float32)
    """
    seq, keys = query.shape[1], key.shape[1]
    grouped = in_groups(query, key.shape[2])
    key, value = (x.transpose(0, 2, 1, 3) for x in (key, value))
    if max(seq, keys) <= chunk:
        mixed = _whole(grouped, key, value, places, window)
    else:
        chunk = int(chunk)
        more = [-seq % chunk, -keys % chunk]
        grouped, key, value = _padded(grouped, more[0], 3), _padded(key, more[1], 2), _padded(value, more[1], 2)
        padded: Queries = _in_chunks(window, chunk, grouped, key, value, _padded_places(places, *more))
        mixed = padded[:, :, :, :seq]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(query.shape)


Queries = Float[Array, "batch kv_heads group seq head_dim"]
Keys = Float[Array, "batch kv_heads keys head_dim"]
Scores = Float[Array, "batch kv_heads group seq keys"]


def in_groups(query: Float[Array, "batch seq heads head_dim"], kv_heads: int) -> Queries:
    """The queries, by the key and value head that they use."""
    batch, seq, heads, head_dim = query.shape
    return query.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)


def _whole(query: Queries, key: Keys, value: Keys, places: Places, window: int | None) -> Queries:
    """Attention with an array of all queries by all keys."""
    visible = seen(places, window, jnp.arange(query.shape[3]), jnp.arange(key.shape[2]))
    weights = softmax(scores(query, key), visible, not places.of_one_sequence)
    return summed("bkgst,bktd->bkgsd", weights.astype(value.dtype), value).astype(query.dtype)


class _Chunks(NamedTuple):
    """Queries and keys in chunks.

    Attributes:
        places: where they are.
        window: how many keys a query sees at most.
        size: the number of queries or keys in a chunk.
        queries: the number of chunks of queries.
        keys: the number of chunks of keys.
    """

    places: Places
    window: int | None
    size: int
    queries: int
    keys: int

    def of_keys(self, i: Any) -> tuple[Any, Any]:
        """The first chunk of keys that a query of chunk `i` sees, and the one behind the last."""
        if not self.places.of_one_sequence:
            return 0, self.keys
        first = 0 if self.window is None else jnp.maximum(0, i * self.size - self.window + 1) // self.size
        return first, i + 1

    def of_queries(self, j: Any) -> tuple[Any, Any]:
        """The first chunk of queries that see a key of chunk `j`, and the one behind the last."""
        if not self.places.of_one_sequence:
            return 0, self.queries
        if self.window is None:
            return j, self.queries
        last = ((j + 1) * self.size + self.window - 2) // self.size
        return j, jnp.minimum(self.queries, last + 1)

    def take(self, x: Array, i: Any, axis: int) -> Array:
        """Chunk `i` along a dimension."""
        return jax.lax.dynamic_slice_in_dim(x, i * self.size, self.size, axis)

    def scores(self, query: Queries, key: Keys, i: Any, j: Any) -> Scores:
        """The scores of chunk `i` of the queries and chunk `j` of the keys; -inf where a query does not see a key."""
        parts = zip(self.places, (i, j, i, j), strict=True)
        places = Places(*(None if x is None else self.take(x, at, 1) for x, at in parts))
        indices = (jnp.arange(self.size) + at * self.size for at in (i, j))
        return jnp.where(seen(places, self.window, *indices), scores(query, key), -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_chunks(window: int | None, chunk: int, query: Queries, key: Keys, value: Keys, places: Places) -> Queries:
    return _forward(window, chunk, query, key, value, places)[0]


def _forward(
    window: int | None, chunk: int, query: Queries, key: Keys, value: Keys, places: Places
) -> tuple[Queries, Any]:
    """The mix; and what the backward pass needs, the logarithm of each query's sum of weights too."""
    dtype = accumulator(query.dtype)
    chunks = _Chunks(places, window, chunk, query.shape[3] // chunk, key.shape[2] // chunk)

    def mix(i: Any) -> tuple[Array, Array]:
        queries = chunks.take(query, i, 3)

        def add(j: Any, carry: Any) -> Any:
            largest, total, mixed = carry
            scores = chunks.scores(queries, chunks.take(key, j, 2), i, j)
            new = jnp.maximum(largest, scores.max(-1))
            finite = jnp.where(new == -jnp.inf, 0, new)  # of queries that have seen nothing yet
            weights, shrink = jnp.exp(scores - finite[..., None]), jnp.exp(largest - finite)
            added = summed("bkgst,bktd->bkgsd", weights.astype(value.dtype), chunks.take(value, j, 2))
            return new, shrink * total + weights.sum(-1), shrink[..., None] * mixed + added

        none = jnp.full_like(queries[..., 0], -jnp.inf, dtype)
        start = none, jnp.zeros_like(none), jnp.zeros_like(queries, dtype)
        largest, total, mixed = jax.lax.fori_loop(*chunks.of_keys(i), add, start)
        sees = total > 0
        total = jnp.where(sees, total, 1)
        # Infinite for a query that sees nothing, so that its weights are zero.
        log_total = jnp.where(sees, largest + jnp.log(total), jnp.inf)
        return (mixed / total[..., None]).astype(query.dtype), log_total

    mixed, log_total = (_joined(x, 3) for x in jax.lax.map(mix, jnp.arange(chunks.queries)))
    return mixed, (query, key, value, places, mixed, log_total)


def _backward(window: int | None, chunk: int, kept: Any, cotangent: Queries) -> tuple[Queries, Keys, Keys, None]:
    query, key, value, places, mixed, log_total = kept
    dtype, scale = accumulator(query.dtype), _scale(query)
    chunks = _Chunks(places, window, chunk, query.shape[3] // chunk, key.shape[2] // chunk)
    # What the softmax takes off the derivatives of all weights of a query.
    common = (mixed.astype(dtype) * cotangent.astype(dtype)).sum(-1)

    def of_chunk(d_query: Array, j: Any) -> tuple[Array, tuple[Array, Array]]:
        keys, values = chunks.take(key, j, 2), chunks.take(value, j, 2)

        def add(i: Any, carry: Any) -> Any:
            d_query, d_keys, d_values = carry
            queries, given = chunks.take(query, i, 3), chunks.take(cotangent, i, 3)
            weights = jnp.exp(chunks.scores(queries, keys, i, j) - chunks.take(log_total, i, 3)[..., None])
            d_weights = summed("bkgsd,bktd->bkgst", given, values) - chunks.take(common, i, 3)[..., None]
            d_scores = (weights * d_weights * scale).astype(query.dtype)
            d_queries = chunks.take(d_query, i, 3) + summed("bkgst,bktd->bkgsd", d_scores, keys)
            return (
                jax.lax.dynamic_update_slice_in_dim(d_query, d_queries, i * chunk, 3),
                d_keys + summed("bkgst,bkgsd->bktd", d_scores, queries),
                d_values + summed("bkgst,bkgsd->bktd", weights.astype(value.dtype), given),
            )

        start = d_query, jnp.zeros_like(keys, dtype), jnp.zeros_like(values, dtype)
        d_query, d_keys, d_values = jax.lax.fori_loop(*chunks.of_queries(j), add, start)
        return d_query, (d_keys.astype(key.dtype), d_values.astype(value.dtype))

    d_query, parts = jax.lax.scan(of_chunk, jnp.zeros_like(query, dtype), jnp.arange(chunks.keys))
    d_key, d_value = (_joined(x, 2) for x in parts)
    return d_query.astype(query.dtype), d_key, d_value, None


_in_chunks.defvjp(_forward, _backward)


def seen(
    places: Places,
    window: int | None,
    query_index: Int[Array, "*#batch seq"],
    key_index: Int[Array, "*#batch keys"],
) -> Bool[Array, "#batch 1 1 seq keys"]:
    """Whether a query sees a key. The indices are for places that have none."""
    queries = _rows(query_index if places.query is None else places.query)[:, :, None]
    keys = _rows(key_index if places.key is None else places.key)[:, None, :]
    visible = keys <= queries
    if places.key is not None:
        visible &= keys >= 0
    if window is not None:
        visible &= queries - keys < window
    if places.query_segment is not None and places.key_segment is not None:
        visible &= places.query_segment[:, :, None] == places.key_segment[:, None, :]
    return visible[:, None, None]


def _rows(index: Int[Array, "*batch seq"]) -> Int[Array, "#batch seq"]:
    return index if index.ndim == 2 else index[None]


def scores(query: Queries, key: Keys) -> Scores:
    """The products of queries and keys, divided by the root of the size of a head."""
    return summed("bkgsd,bktd->bkgst", query, key) * _scale(query)


def softmax(scores: Scores, visible: Bool[Array, "#batch 1 1 seq keys"], may_see_nothing: bool) -> Scores:
    """The weights of the keys that a query sees; zeros if it sees none."""
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min))
    return jnp.where(visible, weights, 0) if may_see_nothing else weights


def _scale(query: Queries) -> float:
    return 1 / math.sqrt(query.shape[-1])


def summed(equation: str, a: Array, b: Array) -> Array:
    """A sum of products, in float32 or wider."""
    return jnp.einsum(equation, a, b, preferred_element_type=accumulator(a.dtype))


def _padded(x: Array, more: int, axis: int, value: int = 0) -> Array:
    """`x`, longer by `more` along a dimension."""
    widths = [(0, more if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if more else x


def _padded_places(places: Places, queries: int, keys: int) -> Places:
    """The places with more queries and keys at the end. No query sees these keys: they are behind it, or at -1."""
    more = (queries, keys, queries, keys)
    return Places(*(None if x is None else _padded(x, n, 1, -1) for x, n in zip(places, more, strict=True)))


def _joined(chunks: Array, axis: int) -> Array:
    """Chunks along the first dimension, joined along another one."""
    moved = jnp.moveaxis(chunks, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
