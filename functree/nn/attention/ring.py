"""Parts of a sequence on several devices ─► attention by keys and values that are passed round.

Each device has the queries, keys and values of its own part. The keys and values go from device to
device, and each adds to its queries what it reads (Liu et al., "Ring attention", 2023). No device
ever holds more of them than two parts.
"""

import functools
import math
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.nn.attention.chunked import (
    Kept,
    Keys,
    PerQuery,
    Queries,
    gradients,
    grouped,
    heads_first,
    mix,
    ungrouped,
)
from functree.nn.attention.mask import Mask, padded
from functree.nn.weights import accumulator

Axes = tuple[str, ...]
T = TypeVar("T")


class _OfKeys(NamedTuple):
    """What is passed on.

    Attributes:
        key: the keys of a part.
        value: its values.
        positions: the position of each key; None if the parts are in order.
        segments: the segment of each; None if all are in one.
    """

    key: Keys
    value: Keys
    positions: Int[Array, "#batch keys"] | None
    segments: Int[Array, "batch keys"] | None


_Sums = tuple[Queries, PerQuery]
"""Weighted values, and the logarithm of each query's sum of weights."""


class _Ring(NamedTuple):
    """What is known while it is traced.

    Attributes:
        axes: the mesh axes of the parts.
        parts: how many there are.
        chunk: the number of queries, and of keys, whose weights are held at one time.
        seq: the number of tokens of a part.
        window: how many keys a query attends to at most; None for all.
    """

    axes: Axes
    parts: int
    chunk: int
    seq: int
    window: int | None

    def on(self, arrays: T) -> T:
        """What each device passes on to the next one; it gets that of the one before."""
        to_next = [(i, (i + 1) % self.parts) for i in range(self.parts)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, to_next), arrays)

    def mask(self, step: int | Array, own: Mask, of_keys: _OfKeys) -> Mask:
        """Which keys, that have been passed on so many times, the own queries attend to."""
        segments = own.query_segments, of_keys.segments
        if own.query_positions is not None:
            return Mask(own.query_positions, of_keys.positions, *segments, self.window)
        # Of the part that is so many parts before the own one, or after it: none of these is seen.
        here = jax.lax.axis_index(self.axes)
        before = here - (here - step) % self.parts
        more = of_keys.key.shape[2] - self.seq
        limit = self.seq if more else None
        return Mask(None, None, *segments, self.window, before * self.seq, limit)


def ring(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    axes: Axes,
    *,
    segments: Int[Array, "batch seq"] | None = None,
    positions: Int[Array, "#batch seq"] | None = None,
    window: int | None = None,
    chunk: float = math.inf,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention of the queries of a part to the keys of all parts.

    It is for the body of a shard_map over the axes.

    Args:
        query: the queries of the own part.
        key: its keys.
        value: its values.
        axes: the mesh axes that shard the sequence.
        segments: the segment of each token of the part; None if all are in one.
        positions: the position of each token of the part; None if the parts are in order.
        window: how many keys a query attends to at most; None for all.
        chunk: the number of queries, and of keys, whose weights are held at one time.
    """
    seq = query.shape[1]
    size = int(min(chunk, seq))
    more = -seq % size
    shape = _Ring(axes, jax.lax.axis_size(axes), size, seq, window)
    own = Mask(positions, positions, segments, segments).padded(more, more, seq)
    mixed: Queries = _passed_round(
        shape,
        padded(grouped(query, key.shape[2]), more, 3),
        padded(heads_first(key), more, 2),
        padded(heads_first(value), more, 2),
        own,
    )
    return ungrouped(mixed[:, :, :, :seq])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _passed_round(shape: _Ring, query: Queries, key: Keys, value: Keys, own: Mask) -> Queries:
    return _forward(shape, query, key, value, own)[0]


def _forward(
    shape: _Ring, query: Queries, key: Keys, value: Keys, own: Mask
) -> tuple[Queries, Kept]:
    def add(step: int | Array, of_keys: _OfKeys, sums: _Sums) -> _Sums:
        mask = shape.mask(step, own, of_keys)
        return _joined(sums, mix(shape.chunk, query, of_keys.key, of_keys.value, mask))

    def step(carry: tuple[_OfKeys, _Sums], i: Array) -> tuple[tuple[_OfKeys, _Sums], None]:
        of_keys, sums = carry
        # Sent before they are read, so that one goes on while the other is computed.
        following = shape.on(of_keys)
        return (following, add(i, of_keys, sums)), None

    dtype = accumulator(query.dtype)
    none = jnp.full_like(query[..., 0], jnp.inf, dtype)
    of_keys = _OfKeys(key, value, own.key_positions, own.key_segments)
    start = of_keys, (jnp.zeros_like(query, dtype), none)
    (of_keys, sums), _ = jax.lax.scan(step, start, jnp.arange(shape.parts - 1))
    mixed, log_total = add(shape.parts - 1, of_keys, sums)
    mixed = mixed.astype(query.dtype)
    return mixed, (query, key, value, own, mixed, log_total)


def _joined(one: _Sums, other: _Sums) -> _Sums:
    """The weighted values of the keys of both, and the logarithm of the sum of their weights."""
    # Infinite for a query that attends to none of them, whose sum of weights is 0.
    logs = [jnp.where(log == jnp.inf, -jnp.inf, log) for _, log in (one, other)]
    largest = jnp.maximum(*logs)
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weights = [jnp.exp(log - largest) for log in logs]
    total = weights[0] + weights[1]
    attends = total > 0
    total = jnp.where(attends, total, 1)
    mixed = weights[0][..., None] * one[0] + weights[1][..., None] * other[0]
    return mixed / total[..., None], jnp.where(attends, largest + jnp.log(total), jnp.inf)


_Keys = tuple[Keys, Keys]
_Gradient = tuple[Queries, _Keys]


def _backward(shape: _Ring, kept: Kept, cotangent: Queries) -> tuple[Queries, Keys, Keys, None]:
    query, key, value, own, mixed, log_total = kept
    dtype = accumulator(key.dtype)

    def add(step: int | Array, of_keys: _OfKeys, d_query: Queries, d_keys: _Keys) -> _Gradient:
        mask = shape.mask(step, own, of_keys)
        given = query, of_keys.key, of_keys.value, mask, mixed, log_total
        more = gradients(shape.chunk, given, cotangent, dtype)
        return d_query + more[0], (d_keys[0] + more[1], d_keys[1] + more[2])

    def step(
        carry: tuple[_OfKeys, Queries, _Keys], i: Array
    ) -> tuple[tuple[_OfKeys, Queries, _Keys], None]:
        of_keys, d_query, d_keys = carry
        following = shape.on(of_keys)
        d_query, d_keys = add(i, of_keys, d_query, d_keys)
        # Their gradients go round with them, in the dtype of the sums.
        return (following, d_query, shape.on(d_keys)), None

    zeros = jnp.zeros_like(key, dtype), jnp.zeros_like(value, dtype)
    of_keys = _OfKeys(key, value, own.key_positions, own.key_segments)
    start = of_keys, jnp.zeros_like(query, accumulator(query.dtype)), zeros
    (of_keys, d_query, d_keys), _ = jax.lax.scan(step, start, jnp.arange(shape.parts - 1))
    d_query, d_keys = add(shape.parts - 1, of_keys, d_query, d_keys)
    # Once more, to the devices that they are of.
    d_key, d_value = shape.on(d_keys)
    return (
        d_query.astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
        None,
    )


_passed_round.defvjp(_forward, _backward)
