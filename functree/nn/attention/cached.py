"""Queries of the next tokens, and keys and values of those before them ─► their mix."""

import itertools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.nn.attention.chunked import Places, chunked, in_groups, scores, seen, softmax, summed
from functree.nn.shards import HEADS, KV_HEADS, on_shards
from functree.nn.weights import accumulator

_FEW = 16
"""So few queries are computed with an array of their weights of all keys."""


def attend_cached(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    cached_key: Float[Array, "batch slots kv_heads head_dim"],
    cached_value: Float[Array, "batch slots kv_heads head_dim"],
    filled: Int[Array, "batch"],
    *,
    window: int | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention of tokens to those before them, in a cache, and to each other.

    Args:
        query: the queries of the tokens.
        key: their keys.
        value: their values.
        cached_key: the keys of the tokens before them.
        cached_value: the values of these.
        filled: how many tokens each row had before; the last of them are in the cache, at their positions modulo its
            length.
        window: how many tokens a token sees at most, itself among them; None for all before it.
    """

    def attend(query: Array, key: Array, value: Array, cached_key: Array, cached_value: Array, filled: Array) -> Array:
        new = next_positions(filled, query.shape[1])
        before = cached_positions(filled, cached_key.shape[1])
        if query.shape[1] > _FEW:
            keys, values = (jnp.concatenate(pair, 1) for pair in ((cached_key, key), (cached_value, value)))
            return chunked(query, keys, values, Places(new, jnp.concatenate([before, new], 1)), window)
        # The parts apart: joined in one array, the whole cache would be copied for each token.
        return _parts(query, [(cached_key, cached_value, before), (key, value, new)], new, window)

    arrays = query, key, value, cached_key, cached_value, filled
    return on_shards(attend, arrays, [HEADS, *[KV_HEADS] * 4, "batch"])


def next_positions(filled: Int[Array, "batch"], seq: int) -> Int[Array, "batch seq"]:
    """The positions of the next tokens."""
    return filled[:, None] + jnp.arange(seq, dtype=filled.dtype)[None]


def cached_positions(filled: Int[Array, "batch"], slots: int) -> Int[Array, "batch slots"]:
    """The position of the token in each slot of a cache; negative for an empty slot."""
    last = filled[:, None] - 1
    return last - (last - jnp.arange(slots)[None]) % slots


def _parts(
    query: Array, parts: list[tuple[Array, Array, Array]], places: Array, window: int | None
) -> Float[Array, "batch seq heads head_dim"]:
    """Attention to keys and values in several parts, each with their places."""
    grouped = in_groups(query, parts[0][0].shape[2])
    arrays = [(key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)) for key, value, _ in parts]
    every = jnp.concatenate([scores(grouped, key) for key, _ in arrays], -1)
    key_places = jnp.concatenate([at for _, _, at in parts], 1)
    visible = seen(Places(places, key_places), window, places, key_places)
    weights = softmax(every, visible, may_see_nothing=False).astype(query.dtype)
    ends = [0, *itertools.accumulate(key.shape[2] for key, _ in arrays)]
    mixed = jnp.zeros((), accumulator(query.dtype))
    for start, end, (_, value) in zip(ends[:-1], ends[1:], arrays, strict=True):
        mixed = mixed + summed("bkgst,bktd->bkgsd", weights[..., start:end], value)
    return mixed.astype(query.dtype).transpose(0, 3, 1, 2, 4).reshape(query.shape)
