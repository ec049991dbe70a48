"""`StaticValue` compares and hashes a leaf that is not an array by its type and value.

Static data of nodes is compared with `==`, as in JAX.
"""

from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, TypeGuard

import jax
import numpy as np

from functree.errors import USERS_ERRORS, FunctreeTypeError

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""The classes of most static values. Their instances hold no other objects."""


class StaticValue:
    """A static leaf, equal to static leaves with the same type and an equal value.

    `1`, `True` and `1.0` are therefore different leaves. `0.0` differs from `-0.0`, and `nan`
    equals itself. A value without a hash has the hash of its type.
    """

    __slots__ = ("value",)
    value: object

    def __init__(self, value: object):
        self.value = value

    def differs(self, other: object) -> bool:
        """Return whether an unwrapped leaf differs from this leaf."""
        if self.value is other:
            return False
        if isinstance(self.value, np.ndarray) and isinstance(other, np.ndarray):
            return self.value.dtype != other.dtype or not np.array_equal(self.value, other)
        return type(self.value) is not type(other) or not equal(
            _compared(self.value), _compared(other)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticValue) and not self.differs(other.value)

    def __hash__(self) -> int:
        cls = type(self.value)
        try:
            return hash((cls, _compared(self.value)))
        except TypeError:
            return hash(cls)

    def __repr__(self) -> str:
        return repr(self.value)


def _compared(value: object) -> object:
    """Return the value that represents a leaf in comparisons."""
    # Numbers are compared as text, because 0.0 == -0.0, and nan is not equal to itself.
    if isinstance(value, float | complex | np.number):
        return repr(value)
    if _is_float0(value):
        return value.shape
    return value


def equal(one: object, other: object) -> bool:
    """Return whether two static values are the same object, or compare equal with `==`.

    Raises:
        FunctreeTypeError: if `==` raises an error.
    """
    try:
        # Not `one != other`: some classes define `__eq__` without a matching `__ne__`.
        return one is other or bool(one == other)
    except USERS_ERRORS as error:
        raise FunctreeTypeError(
            f"static data of class {type(one).__name__} cannot be compared: its `==` raises "
            f"{type(error).__name__}: {error}; give the class an `__eq__` that returns True or "
            "False, and a `__hash__`; for an array, remove `static=True` from the field"
        ) from error


def _is_float0(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Return whether a value has dtype float0, as JAX's gradients of integers do."""
    return isinstance(value, np.ndarray) and value.dtype == jax.dtypes.float0


def is_hashable(value: object) -> bool:
    """Return whether a value can be hashed."""
    if _is_float0(value):
        return True
    try:
        hash(value)
    except TypeError:
        return False
    return True


def runs_once(value: object) -> bool:
    """Return whether a value, such as a generator, can be iterated or awaited only once.

    Only Python's own classes count. An iterator of another class, such as a data loader, may be
    static.
    """
    return (
        isinstance(value, Iterator | AsyncIterator | Awaitable)
        and type(value).__module__ in _PYTHONS_OWN
    )


_PYTHONS_OWN = ("builtins", "itertools")
