"""A mask determines which keys each query attends to, from positions, segments and a window."""

from collections.abc import Callable
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

    A negative position marks padding or an empty slot of a cache: its key is not attended to.

    Attributes:
        query_positions: the position of each query in its sequence.
        key_positions: the position of each key.
        query_segments: the segment of each query, if a sequence packs several texts; None if there
            is only one segment.
        key_segments: the segment of each key; None if there is only one segment.
        window: the maximum number of keys that a query attends to, including its own; None for all.

    Examples:
        >>> from functree.nn.attention.mask import Mask, in_order
        >>> mask = Mask(in_order(3), in_order(3), window=2)
        >>> mask.visible[0, 0, 0].astype(int)
        Array([[1, 0, 0],
               [1, 1, 0],
               [0, 1, 1]], dtype=int32)
    """

    # `batch` is 1 if all rows have the same positions.
    query_positions: Int[Array, "#batch seq"]
    key_positions: Int[Array, "#batch keys"]
    query_segments: Int[Array, "batch seq"] | None = None
    key_segments: Int[Array, "batch keys"] | None = None
    # The window is static, so that no comparison is traced if there is no window.
    window: int | None = eqx.field(static=True, default=None)

    @property
    def visible(self) -> Bool[Array, "#batch 1 1 seq keys"]:
        """Whether each query attends to each key; the same for all heads."""
        queries, keys = self.query_positions[:, :, None], self.key_positions[:, None, :]
        visible = (keys >= 0) & (keys <= queries)
        if self.window is not None:
            visible &= queries - keys < self.window
        if self.query_segments is not None and self.key_segments is not None:
            visible &= self.query_segments[:, :, None] == self.key_segments[:, None, :]
        return visible[:, None, None]

    def visible_chunks(self, size: int) -> Bool[Array, "query_chunks key_chunks"]:
        """Return whether positions allow a query of each chunk to attend to a key of each chunk."""
        queries, keys = (
            positions.reshape(positions.shape[0], -1, size)
            for positions in (self.query_positions, self.key_positions)
        )
        far = jnp.iinfo(jnp.int32).max
        first_query = jnp.where(queries < 0, far, queries).min((0, 2))[:, None]
        first_key = jnp.where(keys < 0, far, keys).min((0, 2))[None]
        visible = first_key <= queries.max((0, 2))[:, None]
        if self.window is not None:
            visible &= first_query - keys.max((0, 2))[None] < self.window
        return visible

    def chunk(self, i: Index, j: Index, size: int) -> "Mask":
        """Return the mask of chunk `i` of the queries and chunk `j` of the keys."""
        return self._changed(
            lambda of_queries: chunk_of(of_queries, i, size, 1),
            lambda of_keys: chunk_of(of_keys, j, size, 1),
        )

    def padded(self, queries: int, keys: int) -> "Mask":
        """Add padding, which has position -1, at the end of the mask."""
        return self._changed(
            lambda of_queries: padded(of_queries, queries, 1, -1),
            lambda of_keys: padded(of_keys, keys, 1, -1),
        )

    def _changed(
        self, of_queries: Callable[[Array], Array], of_keys: Callable[[Array], Array]
    ) -> "Mask":
        """Apply functions to the positions and segments of the queries and of the keys."""
        queries = jax.tree.map(of_queries, (self.query_positions, self.query_segments))
        keys = jax.tree.map(of_keys, (self.key_positions, self.key_segments))
        return Mask(queries[0], keys[0], queries[1], keys[1], self.window)


def in_order(number: int, first: Index = 0) -> Int[Array, "1 tokens"]:
    """Return the positions of consecutive tokens, for all rows.

    Examples:
        >>> from functree.nn.attention.mask import in_order
        >>> in_order(3)
        Array([[0, 1, 2]], dtype=int32)
    """
    return jnp.arange(number, dtype=jnp.int32)[None] + first


def chunk_of(x: Array, i: Index, size: int, axis: int) -> Array:
    """Return chunk `i` along a dimension.

    Examples:
        >>> from functree.nn.attention.mask import chunk_of
        >>> chunk_of(jnp.arange(6), 1, 2, 0)
        Array([2, 3], dtype=int32)
    """
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


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
