"""Positions, segments and a window ─► which keys each query attends to."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from functree.nn.activations import HEADS, KV_HEADS

Index = int | Int[Array, ""]

AXES = (HEADS, KV_HEADS, KV_HEADS, "batch seq")
"""The axes of queries, keys, values and segments, as `on_shards` takes them."""


class Inputs(NamedTuple):
    """What attention is computed of.

    Attributes:
        query: the queries; head `h` uses key and value head `h // (heads / kv_heads)`.
        key: the keys.
        value: the values.
        segments: the segment of each token; None if all are in one.
        positions: the position of each token; None if they are in order.
    """

    query: Float[Array, "*batch seq heads head_dim"]
    key: Float[Array, "*batch keys kv_heads head_dim"]
    value: Float[Array, "*batch keys kv_heads head_dim"]
    segments: Int[Array, "*batch keys"] | None = None
    positions: Int[Array, "*#batch keys"] | None = None

    @property
    def arrays(self) -> list[Array]:
        """Those that are there."""
        return jax.tree.leaves(self)

    @property
    def names(self) -> list[str]:
        """The names of the dimensions of each of them, as `on_shards` takes them."""
        found = [*AXES[:3]]
        if self.segments is not None:
            found.append(AXES[3])
        if self.positions is not None:
            found.append(AXES[3] if self.positions.ndim > 1 else "seq")
        return found


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
        offset: without positions, how far the first query is behind the first key, where these are
            of two parts of a sequence; None if queries and keys are of the same tokens.
        keys: how many keys there are, if others fill the last chunk; None for all.

    Examples:
        >>> from functree.nn.attention.mask import Mask
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
    offset: Int[Array, ""] | None = None
    keys: int | None = eqx.field(static=True, default=None)

    @property
    def is_one_sequence(self) -> bool:
        """Whether queries and keys are those of the same tokens.

        Then each query attends to its own key at least, and chunk `i` of the queries to no chunk of
        keys after `i`.
        """
        return self.is_by_order and self.offset is None

    @property
    def is_by_order(self) -> bool:
        """Whether where a query or a key is, is known by its index."""
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
            ahead = 0 if self.offset is None else self.offset
            query_positions = (jnp.arange(seq) + (first_query + ahead))[None]
        if key_positions is None:
            key_positions = (jnp.arange(keys) + first_key)[None]
        # (batch, seq, 1) and (batch, 1, keys): the batch is 1 if all rows have the same positions.
        query_positions, key_positions = query_positions[:, :, None], key_positions[:, None, :]
        visible = key_positions <= query_positions
        if self.key_positions is not None:
            visible &= key_positions >= 0
        elif self.keys is not None:
            visible &= key_positions < self.keys
        if self.window is not None:
            visible &= query_positions - key_positions < self.window
        if self.query_segments is not None and self.key_segments is not None:
            visible &= self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return visible[:, None, None]  # the same for all heads

    def chunk(self, i: Index, j: Index, size: int) -> "Mask":
        """The mask of chunk `i` of the queries and chunk `j` of the keys."""
        return Mask(
            _chunk(self.query_positions, i, size),
            _chunk(self.key_positions, j, size),
            _chunk(self.query_segments, i, size),
            _chunk(self.key_segments, j, size),
            self.window,
            self.offset,
            self.keys,
        )

    def padded(self, queries: int, keys: int, has: int) -> "Mask":
        """The mask with more queries and keys at the end; no query of before attends to these keys.

        Positions are -1 there. Without positions the keys are after all queries, unless queries
        and keys are of two parts: so of those there are not more than it `has`.
        """
        is_shifted = self.offset is not None and keys > 0
        return Mask(
            _padded(self.query_positions, queries),
            _padded(self.key_positions, keys),
            _padded(self.query_segments, queries),
            _padded(self.key_segments, keys),
            self.window,
            self.offset,
            has if is_shifted else self.keys,
        )


CAUSAL = Mask()
"""All keys that are not after a query."""


def _chunk(x: Array | None, i: Index, size: int) -> Array | None:
    return None if x is None else jax.lax.dynamic_slice_in_dim(x, i * size, size, 1)


def _padded(x: Array | None, more: int) -> Array | None:
    return None if x is None else padded(x, more, 1, -1)


def padded(x: Array, more: int, axis: int, value: int = 0) -> Array:
    """`x`, longer by `more` along a dimension.

    Examples:
        >>> from functree.nn.attention.mask import padded
        >>> padded(jnp.ones(2), 1, 0)
        Array([1., 1., 0.], dtype=float32)
    """
    if not more:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, more)
    return jnp.pad(x, widths, constant_values=value)
