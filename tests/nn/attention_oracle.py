"""Attention in float64, as it is defined: every query by every key."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functree.nn.attention.mask import Mask, in_order


def causal(seq: int, segments: Any = None, window: int | None = None) -> Mask:
    """The mask of tokens in order."""
    return Mask(in_order(seq), in_order(seq), segments, segments, window)


def visible(mask: Mask) -> np.ndarray:
    """Which keys each query attends to: (batch, queries, keys)."""
    rows, columns = np.asarray(mask.query_positions), np.asarray(mask.key_positions)
    found = (columns[:, None] <= rows[:, :, None]) & (columns[:, None] >= 0)
    if mask.window is not None:
        found = found & (rows[:, :, None] - columns[:, None] < mask.window)
    if mask.query_segments is not None and mask.key_segments is not None:
        segments = np.asarray(mask.query_segments), np.asarray(mask.key_segments)
        found = found & (segments[0][:, :, None] == segments[1][:, None])
    return found


def oracle(query: Any, key: Any, value: Any, mask: Mask) -> jax.Array:
    """The result for heads (batch, seq, heads, head_dim)."""
    with jax.enable_x64(True):
        query, key, value = (jnp.asarray(x, jnp.float64) for x in (query, key, value))
        key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], 2) for x in (key, value))
        scores = jnp.einsum("bshd,bthd->bhst", query, key) / query.shape[-1] ** 0.5
        weights = jnp.where(visible(mask)[:, None], jnp.exp(scores), 0)
        total = weights.sum(-1, keepdims=True)
        return jnp.einsum("bhst,bthd->bshd", weights / jnp.where(total > 0, total, 1), value)


def oracle_gradients(given: Any, *heads: Any, mask: Mask) -> tuple[jax.Array, ...]:
    """The result, and the gradients of query, key and value for a cotangent of the result."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in heads]
        result, pull = jax.vjp(lambda *heads: oracle(*heads, mask), *wide)
        return result, *pull(jnp.asarray(given, jnp.float64))
