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
from typing import Annotated, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.argument_checks import TEXT, Takes
from functree.errors import FunctreeValueError
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
from functree.nn.attention.mask import Inputs, Mask, padded
from functree.nn.weights import accumulator

T = TypeVar("T")

_Name = Literal["auto", "gather", "heads", "ring"]
_NAMES = get_args(_Name)
Context = Annotated[
    _Name,
    Takes(f"one of {', '.join(map(repr, _NAMES))}", TEXT.fits, lambda value: value in _NAMES),
]
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
        window: the maximum number of keys that a query attends to; None for all.
    """

    axes: tuple[str, ...]
    parts: int
    chunk: int
    seq: int
    window: int | None

    def on(self, arrays: T) -> T:
        """Pass arrays to the next device, and return the previous device's arrays."""
        to_next = [(i, (i + 1) % self.parts) for i in range(self.parts)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, to_next), arrays)

    def mask(self, step: int | Array, own: Mask, of_keys: _OfKeys) -> Mask:
        """Return the mask for a device's queries, and for keys that were passed on `step` times."""
        segments = own.query_segments, of_keys.segments
        if own.query_positions is not None:
            return Mask(own.query_positions, of_keys.positions, *segments, self.window)
        # The number of parts by which these keys precede the queries. If it is negative, the keys
        # come after the queries, and no query attends to them.
        here = jax.lax.axis_index(self.axes)
        before = here - (here - step) % self.parts
        more = of_keys.key.shape[2] - self.seq
        limit = self.seq if more else None
        return Mask(None, None, *segments, self.window, before * self.seq, limit)


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
    seq, kv_heads = own.query.shape[1], own.key.shape[2]
    size = int(min(chunk, seq))
    more = -seq % size
    shape = _Ring(parts.axes, parts.number, size, seq, window)
    mask = Mask(own.positions, own.positions, own.segments, own.segments)
    mixed: Queries = _passed_round(
        shape,
        padded(grouped(own.query, kv_heads), more, 3),
        padded(heads_first(own.key), more, 2),
        padded(heads_first(own.value), more, 2),
        mask.padded(more, more, seq),
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
        # Keys and values are sent before they are read, so that communication and computation
        # overlap.
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


def _joined(first: _Sums, second: _Sums) -> _Sums:
    """Combine two results for the same queries and different keys."""
    # A query that attends to no key has inf as its logsumexp. Here, -inf replaces it, so that this
    # query's result has weight 0.
    logs = [jnp.where(log == jnp.inf, -jnp.inf, log) for _, log in (first, second)]
    largest = jnp.maximum(*logs)
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weights = [jnp.exp(log - largest) for log in logs]
    total = weights[0] + weights[1]
    attends = total > 0
    total = jnp.where(attends, total, 1)
    mixed = weights[0][..., None] * first[0] + weights[1][..., None] * second[0]
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
        # The keys and values are passed on together with their gradients, which have the dtype of
        # the sums.
        return (following, d_query, shape.on(d_keys)), None

    zeros = jnp.zeros_like(key, dtype), jnp.zeros_like(value, dtype)
    of_keys = _OfKeys(key, value, own.key_positions, own.key_segments)
    start = of_keys, jnp.zeros_like(query, accumulator(query.dtype)), zeros
    (of_keys, d_query, d_keys), _ = jax.lax.scan(step, start, jnp.arange(shape.parts - 1))
    d_query, d_keys = add(shape.parts - 1, of_keys, d_query, d_keys)
    # One more step returns the gradients to the devices that their keys and values came from.
    d_key, d_value = shape.on(d_keys)
    return (
        d_query.astype(query.dtype),
        d_key.astype(key.dtype),
        d_value.astype(value.dtype),
        None,
    )


_passed_round.defvjp(_forward, _backward)
