"""An array ─► a text of its type, and of its values or of how it is sharded."""

import zlib
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from functree.devices.specs import spec_text
from functree.tree.arrays import AnyArray, array_text
from functree.tree.bits import is_key


def any_array_text(array: AnyArray) -> str:
    """The text of an array, which is the same in all processes if it is: of one of this process
    with its values, of one of all processes with how it is sharded."""
    if has_values_here(array):
        return own_text(array)
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return f"{array_text(array)} {spec_text(sharding.spec)}"
    return array_text(array)


def has_values_here(array: AnyArray) -> bool:
    """Whether an array is concrete, and all of its values are in this process."""
    if isinstance(array, jax.ShapeDtypeStruct | Tracer):
        return False
    # Of an array of all processes a part is elsewhere, and JAX raises an error if it is read.
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def own_text(array: AnyArray) -> str:
    """The type and the values of an array of this process; of many values a checksum."""
    text = array_text(array)
    words: Any = array
    if is_key(array.dtype):
        words = jax.random.key_data(words)
    host = np.asarray(words)
    if host.size <= _FEW:
        return f"{text} {host.tolist()}"
    return f"{text} with the checksum {checksum(host):08x}"


_FEW = 8  # the most values that a message shows


def checksum(array: np.ndarray) -> int:
    """A checksum of the values of an array."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
