"""Attention on one device ─► that of sequences whose parts are on several (context parallelism).

What is here is for the body of a shard_map over the mesh axes that shard the sequence. Each device
has the queries, keys and values of its own part, and all of its own heads. To attend to the tokens
of other parts, devices exchange heads for sequence (Jacobs et al., "DeepSpeed Ulysses", 2023), or
gather all keys and values (Grattafiori et al., "The Llama 3 herd of models", 2024), or pass them
round (`ring.py`).
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from functree.argument_checks import one_of
from functree.errors import FunctreeValueError
from functree.nn.attention.ring import ring

ContextName = Literal["auto", "gather", "heads", "ring"]
Context = Annotated[ContextName, one_of(get_args(ContextName))]
"""How a part of a sequence attends to the others, by its name."""

Axes = tuple[str, ...]


class Parts(NamedTuple):
    """How sequences are in parts while heads are mixed.

    Attributes:
        axes: the mesh axes that shard them; none if they are whole.
        number: the number of parts.
        how: how a part attends to the others; None if sequences are whole.
    """

    axes: Axes = ()
    number: int = 1
    how: Literal["gather", "heads", "ring"] | None = None


WHOLE = Parts()


def parts_of(axes: Axes, count: int, context: Context, heads: int) -> Parts:
    """How a part of a sequence attends to the others.

    Args:
        axes: the mesh axes that shard the sequence, and no heads.
        count: the number of devices along them.
        context: what was asked for.
        heads: the number of query heads of a device.

    Raises:
        FunctreeError: heads cannot be exchanged, since there are not as many on a device.

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
            f'context="heads": the sequence is in {count} parts (over {", ".join(axes)}), and a '
            f"device has {heads} query heads, which cannot be exchanged for sequence: the number "
            "of parts has to divide that of the heads. Use fewer parts, or "
            'context="gather" or "ring"'
        )
    return Parts(axes, count, context)


Whole = Callable[..., Array]
"""Attention of whole sequences on one device: of queries, keys and values, and, by name, of
`segments` and `positions`."""

OfPart = Callable[..., Array]
"""Attention of the queries of a part to all keys: of queries, keys, values and the index of the
first query, and, by name, of `segments` and `positions`, each a pair of those of the queries and
those of the keys."""


def by_heads(
    query: Shaped[Array, "batch seq heads head_dim"],
    key: Shaped[Array, "batch seq kv_heads head_dim"],
    value: Shaped[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
    positions: Int[Array, "#batch seq"] | None = None,
    *,
    parts: Parts,
    whole: Whole,
) -> Shaped[Array, "batch seq heads head_dim"]:
    """Each device gets the whole sequence of some heads, and gives the parts of the others back."""
    # With fewer key heads than parts, or with a number of them that these do not divide, they are
    # repeated so often that each device gets those of its query heads.
    more = parts.number // math.gcd(parts.number, key.shape[2])
    if more > 1:
        key, value = (jnp.repeat(x, more, axis=2) for x in (key, value))

    def into(x: Array) -> Array:
        return jax.lax.all_to_all(x, parts.axes, split_axis=2, concat_axis=1, tiled=True)

    mixed = whole(
        into(query),
        into(key),
        into(value),
        segments=_gathered(segments, parts),
        positions=_gathered(positions, parts),
    )
    return jax.lax.all_to_all(mixed, parts.axes, split_axis=1, concat_axis=2, tiled=True)


def by_gathering(
    query: Shaped[Array, "batch seq heads head_dim"],
    key: Shaped[Array, "batch seq kv_heads head_dim"],
    value: Shaped[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
    positions: Int[Array, "#batch seq"] | None = None,
    *,
    parts: Parts,
    of_part: OfPart,
) -> Shaped[Array, "batch seq heads head_dim"]:
    """Each device gets the keys and values of all parts."""
    first = jax.lax.axis_index(parts.axes) * query.shape[1]
    return of_part(
        query,
        _gathered(key, parts),
        _gathered(value, parts),
        first,
        segments=(segments, _gathered(segments, parts)),
        positions=(positions, _gathered(positions, parts)),
    )


def by_ring(
    query: Shaped[Array, "batch seq heads head_dim"],
    key: Shaped[Array, "batch seq kv_heads head_dim"],
    value: Shaped[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
    positions: Int[Array, "#batch seq"] | None = None,
    *,
    parts: Parts,
    window: int | None,
    chunk: float,
) -> Shaped[Array, "batch seq heads head_dim"]:
    """Keys and values are passed from device to device."""
    return ring(
        query,
        key,
        value,
        parts.axes,
        segments=segments,
        positions=positions,
        window=window,
        chunk=chunk,
    )


def _gathered(x: Array | None, parts: Parts) -> Array | None:
    """An array of tokens of the own part, with those of all parts in their order."""
    return None if x is None else jax.lax.all_gather(x, parts.axes, axis=1, tiled=True)
