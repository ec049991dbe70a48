"""Context parallelism computes attention over sequences that are sharded over several devices.

The functions here run inside a shard_map over the mesh axes that shard the sequence. Each device
has the queries, keys and values of its own part, for all of its heads. There are three ways to
attend to the tokens of other parts:

- Devices exchange heads for parts of the sequence (Jacobs et al., "DeepSpeed Ulysses", 2023).
- Devices gather all keys and values (Grattafiori et al., "The Llama 3 herd of models", 2024).
- Devices pass keys and values around a ring. Each device adds the contribution of the received keys
  and values to the results of its own queries (Liu et al., "Ring attention", 2023).
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.errors import FunctreeValueError
from functree.nn.attention.chunked import (
    Kept,
    Keys,
    PerQuery,
    Queries,
    gradients,
    mix,
    padded_to,
)
from functree.nn.attention.mask import Index, Inputs, Mask, in_order
from functree.nn.weights import accumulator

S = TypeVar("S")
T = TypeVar("T")

Context = Literal["auto", "gather", "heads", "ring"]
"""The name of the method by which the parts of a sequence attend to each other."""


class Parts(NamedTuple):
    """The division of sequences into parts inside attention.

    Attributes:
        axes: the mesh axes that shard the sequence; empty if it is unsharded.
        number: the number of parts.
        how: how a part attends to the other parts; None if the sequence is unsharded.
    """

    axes: tuple[str, ...] = ()
    number: int = 1
    how: Literal["gather", "heads", "ring"] | None = None


WHOLE = Parts()


def parts_of(axes: tuple[str, ...], count: int, context: Context, heads: int) -> Parts:
    """Choose how a part of a sequence attends to the other parts.

    Args:
        axes: the mesh axes that shard the sequence but no heads.
        count: the number of devices along these axes.
        context: the requested method.
        heads: the number of query heads on a device.

    Raises:
        FunctreeError: if `context="heads"` and the number of parts does not divide the number of
            heads.

    Examples:
        >>> from functree.nn.attention.context import parts_of
        >>> parts_of(("context",), 4, "auto", heads=8).how
        'heads'
        >>> parts_of(("context",), 4, "auto", heads=2).how
        'gather'
    """
    if count == 1:
        return WHOLE
    divides = heads % count == 0
    if context == "auto":
        return Parts(axes, count, "heads" if divides else "gather")
    if context == "heads" and not divides:
        raise FunctreeValueError(
            f'context="heads": the query heads on a device ({heads}) cannot be divided among the '
            f"{count} parts of the sequence (over {', '.join(axes)}). Shard the sequence over "
            'fewer devices, or pass context="gather" or "ring"'
        )
    return Parts(axes, count, context)


def by_heads(
    own: Inputs, parts: Parts, whole: Callable[[Inputs], Array]
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute attention over the whole sequence on each device, for some of the heads.

    Args:
        own: the device's part.
        parts: how the sequence is divided.
        whole: a function that computes attention over a whole sequence on one device.
    """
    key, value = own.key, own.value
    # If the number of parts does not divide the number of key heads, the key heads are repeated.
    # Each device then gets the key heads that its query heads use.
    more = parts.number // math.gcd(parts.number, key.shape[2])
    if more > 1:
        key, value = (jnp.repeat(x, more, axis=2) for x in (key, value))

    def into(x: Array) -> Array:
        return jax.lax.all_to_all(x, parts.axes, split_axis=2, concat_axis=1, tiled=True)

    of_tokens = _gathered((own.segments, own.positions), parts)
    mixed = whole(Inputs(into(own.query), into(key), into(value), *of_tokens))
    return jax.lax.all_to_all(mixed, parts.axes, split_axis=1, concat_axis=2, tiled=True)


OfPart = Callable[[Inputs, Inputs, Array], Array]
"""A function that computes attention of a part's queries to all keys. It takes the part, all keys
with their values, and the index of the first query."""


def by_gathering(
    own: Inputs, parts: Parts, of_part: OfPart
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute attention of a part's queries to the gathered keys and values of all parts.

    Args:
        own: the device's part.
        parts: how the sequence is divided.
        of_part: computes attention of a part's queries to all keys.
    """
    first = jax.lax.axis_index(parts.axes) * own.query.shape[1]
    whole = Inputs(own.query, *_gathered(own[1:], parts))
    return of_part(own, whole, first)


def _gathered(arrays: T, parts: Parts) -> T:
    """Gather arrays along the sequence, with the parts in order."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, parts.axes, axis=1, tiled=True), arrays)


# In a ring, devices pass keys and values on, one part at a time


class _OfKeys(NamedTuple):
    """The arrays that devices pass around the ring.

    Attributes:
        key: the keys of a part.
        value: the values of this part.
        positions: the position of each key; None if the parts are in order.
        segments: the segment of each key; None if there is only one segment.
    """

    key: Keys
    value: Keys
    positions: Int[Array, "#batch keys"] | None
    segments: Int[Array, "batch keys"] | None


_Sums = tuple[Queries, PerQuery]
"""Weighted values, and the logsumexp of each query's scores."""


class _Ring(NamedTuple):
    """The static properties of a ring.

    Attributes:
        axes: the mesh axes of the parts.
        parts: the number of parts.
        chunk: the number of queries or keys in a chunk.
        seq: the number of tokens in a part.
        in_order: whether the positions of keys follow from the part that they are in.
    """

    axes: tuple[str, ...]
    parts: int
    chunk: int
    seq: int
    in_order: bool

    def on(self, arrays: T) -> T:
        """Pass arrays to the next device, and return the previous device's arrays."""
        to_next = [(i, (i + 1) % self.parts) for i in range(self.parts)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, to_next), arrays)

    def round(
        self,
        add: Callable[[Index, _OfKeys, S, T], tuple[S, T]],
        key: Keys,
        value: Keys,
        own: Mask,
        sums: S,
        of_keys: T,
    ) -> tuple[S, T]:
        """Apply `add` to sums for the keys of each part.

        Args:
            add: adds one part to the sums. The first argument is the number of times that the keys
                were passed on.
            key: the keys of this device.
            value: the values of this device.
            own: the mask of this device's queries and keys.
            sums: the sums of this device.
            of_keys: sums that are passed on together with the keys, and finally returned to the
                keys' own device.
        """
        positions = None if self.in_order else own.key_positions

        def step(carry: tuple[_OfKeys, S, T], i: Array) -> tuple[tuple[_OfKeys, S, T], None]:
            keys, sums, of_keys = carry
            # Keys and values are sent before they are read, so that communication and computation
            # overlap.
            following = self.on(keys)
            sums, of_keys = add(i, keys, sums, of_keys)
            return (following, sums, self.on(of_keys)), None

        start = _OfKeys(key, value, positions, own.key_segments), sums, of_keys
        (keys, sums, of_keys), _ = jax.lax.scan(step, start, jnp.arange(self.parts - 1))
        sums, of_keys = add(self.parts - 1, keys, sums, of_keys)
        return sums, self.on(of_keys)

    def mask(self, step: Index, own: Mask, keys: _OfKeys) -> Mask:
        """Return the mask for a device's queries, and for keys that were passed on `step` times."""
        positions = keys.positions
        if positions is None:
            here = jax.lax.axis_index(self.axes)
            # The number of parts by which these keys come after the device's own keys.
            ahead = (here - step) % self.parts - here
            moved = own.key_positions + ahead * self.seq
            positions = jnp.where(own.key_positions < 0, -1, moved)
        segments = own.query_segments, keys.segments
        return Mask(own.query_positions, positions, *segments, own.window)


def by_ring(
    own: Inputs, parts: Parts, *, window: int | None = None, chunk: float = math.inf
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute attention while devices pass keys and values around a ring.

    Args:
        own: the device's part.
        parts: how the sequence is divided.
        window: the maximum number of keys that a query attends to; None for all.
        chunk: the number of queries or keys in a chunk.
    """
    seq, positions = own.query.shape[1], own.positions
    if positions is None:
        positions = in_order(seq, jax.lax.axis_index(parts.axes) * seq)
    size = int(min(chunk, seq))
    ring = _Ring(parts.axes, parts.number, size, seq, own.positions is None)
    mask = Mask(positions, positions, own.segments, own.segments, window)
    passed_round = functools.partial(_passed_round, ring)
    return padded_to(size, passed_round, own.query, own.key, own.value, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _passed_round(ring: _Ring, query: Queries, key: Keys, value: Keys, own: Mask) -> Queries:
    return _forward(ring, query, key, value, own)[0]


def _forward(
    ring: _Ring, query: Queries, key: Keys, value: Keys, own: Mask
) -> tuple[Queries, Kept]:
    def add(step: Index, keys: _OfKeys, sums: _Sums, _: None) -> tuple[_Sums, None]:
        mask = ring.mask(step, own, keys)
        return _joined(sums, mix(ring.chunk, query, keys.key, keys.value, mask)), None

    dtype = accumulator(query.dtype)
    none = jnp.zeros_like(query, dtype), jnp.full_like(query[..., 0], jnp.inf, dtype)
    (mixed, log_total), _ = ring.round(add, key, value, own, none, None)
    mixed = mixed.astype(query.dtype)
    return mixed, (query, key, value, own, mixed, log_total)


def _joined(first: _Sums, second: _Sums) -> _Sums:
    """Combine two results for the same queries and different keys."""
    # A query that attends to no key has inf as its logsumexp. Here, -inf replaces it, so that this
    # query's result has weight 0.
    logs = [jnp.where(log == jnp.inf, -jnp.inf, log) for _, log in (first, second)]
    total = jnp.logaddexp(*logs)
    attends = total > -jnp.inf
    weights = [jnp.exp(log - jnp.where(attends, total, 0))[..., None] for log in logs]
    mixed = weights[0] * first[0] + weights[1] * second[0]
    return mixed, jnp.where(attends, total, jnp.inf)


_Keys = tuple[Keys, Keys]


def _backward(ring: _Ring, kept: Kept, cotangent: Queries) -> tuple[Queries, Keys, Keys, None]:
    query, key, value, own, mixed, log_total = kept
    dtype = accumulator(key.dtype)

    def add(step: Index, keys: _OfKeys, d_query: Queries, d_keys: _Keys) -> tuple[Queries, _Keys]:
        mask = ring.mask(step, own, keys)
        given = query, keys.key, keys.value, mask, mixed, log_total
        more = gradients(ring.chunk, given, cotangent, dtype)
        return d_query + more[0], (d_keys[0] + more[1], d_keys[1] + more[2])

    # The gradients of keys and values have the dtype of the sums while they are passed on.
    zeros = jnp.zeros_like(key, dtype), jnp.zeros_like(value, dtype)
    start = jnp.zeros_like(query, dtype)
    d_query, (d_key, d_value) = ring.round(add, key, value, own, start, zeros)
    return (
        d_query.astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
        None,
    )


_passed_round.defvjp(_forward, _backward)
