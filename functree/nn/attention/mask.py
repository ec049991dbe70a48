"""A mask determines which keys each query attends to, from positions, segments and a window."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from functree.nn.activations import HEADS, KV_HEADS

Index = int | Int[Array, ""]

AXES = (HEADS, KV_HEADS, KV_HEADS, "batch seq")
"""The axes of queries, keys, values and segments, in the form that `on_shards` takes."""


class Inputs(NamedTuple):
    """The arrays from which attention is computed.

    Attributes:
        query: the queries; head `h` uses key and value head `h // (heads / kv_heads)`.
        key: the keys.
        value: the values.
        segments: the segment of each token; None if there is only one segment.
        positions: the position of each token; None if the tokens are in order.
    """

    query: Float[Array, "*batch seq heads head_dim"]
    key: Float[Array, "*batch keys kv_heads head_dim"]
    value: Float[Array, "*batch keys kv_heads head_dim"]
    segments: Int[Array, "*batch keys"] | None = None
    positions: Int[Array, "*#batch keys"] | None = None

    @property
    def arrays(self) -> list[Array]:
        """The arrays that are not None."""
        return jax.tree.leaves(self)

    @property
    def names(self) -> list[str]:
        """The names of each array's dimensions, in the form that `on_shards` takes."""
        names = [*AXES[:3]]
        if self.segments is not None:
            names.append(AXES[3])
        if self.positions is not None:
            names.append(AXES[3] if self.positions.ndim > 1 else "seq")
        return names


class Mask(eqx.Module):
    """A causal mask: a query attends to keys in its segment and window that are not after it.

    Attributes:
        query_positions: the position of each query in its sequence; None for 0, 1, 2, …
        key_positions: the position of each key; None for 0, 1, 2, … An empty slot of a cache has a
            negative position, and nothing attends to it.
        query_segments: the segment of each query, if a sequence packs several texts; None if there
            is only one segment.
        key_segments: the segment of each key; None if there is only one segment.
        window: the maximum number of keys that a query attends to, including its own; None for all.
        offset: without positions, the number of tokens from the first key to the first query. None
            if queries and keys are from the same part of a sequence.
        keys: the number of keys before the padding; None if no padding has to be masked.

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
    # The window is static, so that no comparison is traced if there is no window, and the loops can
    # skip chunks outside the window.
    window: int | None = eqx.field(static=True, default=None)
    offset: Int[Array, ""] | None = None
    keys: int | None = eqx.field(static=True, default=None)

    @property
    def is_one_sequence(self) -> bool:
        """Whether queries and keys are from the same tokens.

        If they are, each query attends at least to its own key, and chunk `i` of the queries
        attends to no chunk of keys after `i`.
        """
        return self.is_by_order and self.offset is None

    @property
    def is_by_order(self) -> bool:
        """Whether the index of a query or key determines its position."""
        return self.query_positions is None and self.key_positions is None

    def visible(
        self, seq: int, keys: int, first_query: Index = 0, first_key: Index = 0
    ) -> Bool[Array, "#batch 1 1 seq keys"]:
        """Compute whether each query attends to each key.

        Args:
            seq: the number of queries.
            keys: the number of keys.
            first_query: the index of the first query in its sequence, if there are no positions.
            first_key: the index of the first key in its sequence, if there are no positions.
        """
        query_positions, key_positions = self.query_positions, self.key_positions
        if query_positions is None:
            ahead = 0 if self.offset is None else self.offset
            query_positions = (jnp.arange(seq) + (first_query + ahead))[None]
        if key_positions is None:
            key_positions = (jnp.arange(keys) + first_key)[None]
        # The shapes are (batch, seq, 1) and (batch, 1, keys). `batch` is 1 if all rows have the
        # same positions.
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
        """Return the mask of chunk `i` of the queries and chunk `j` of the keys."""
        return dataclasses.replace(
            self,
            query_positions=_chunk(self.query_positions, i, size),
            key_positions=_chunk(self.key_positions, j, size),
            query_segments=_chunk(self.query_segments, i, size),
            key_segments=_chunk(self.key_segments, j, size),
        )

    def padded(self, queries: int, keys: int, has: int) -> "Mask":
        """Add padding at the end of the mask; no query before the padding attends to padded keys.

        Padding has position -1. Without positions, the padded keys come after all queries that are
        not padding. If queries and keys are from different parts of a sequence, the padded keys are
        masked instead, using `has`, the number of keys before the padding.
        """
        is_shifted = self.offset is not None and keys > 0
        return dataclasses.replace(
            self,
            query_positions=_padded(self.query_positions, queries),
            key_positions=_padded(self.key_positions, keys),
            query_segments=_padded(self.query_segments, queries),
            key_segments=_padded(self.key_segments, keys),
            keys=has if is_shifted else self.keys,
        )


CAUSAL = Mask()
"""The causal mask without positions, segments or a window."""


def _chunk(x: Array | None, i: Index, size: int) -> Array | None:
    return None if x is None else jax.lax.dynamic_slice_in_dim(x, i * size, size, 1)


def _padded(x: Array | None, more: int) -> Array | None:
    return None if x is None else padded(x, more, 1, -1)


def padded(x: Array, more: int, axis: int, value: int = 0) -> Array:
    """Pad `x` at the end of a dimension.

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
