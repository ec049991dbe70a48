"""A leaf that is not an array ─► `StaticValue`, which is compared and hashed by type and value.

Static data inside of nodes is compared as JAX compares it, by `==`.
"""

from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, TypeGuard

import jax
import numpy as np

from functree.errors import USERS_ERRORS, FunctreeTypeError

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""The classes of most static values. They hold no other values."""


class StaticValue:
    """A static leaf. It equals another one of the same type whose value is equal.

    So `1`, `True` and `1.0` are different leaves; `0.0` and `-0.0` are too, and `nan` equals
    itself. A value without a hash has the hash of its type.
    """

    __slots__ = ("value",)
    value: object

    def __init__(self, value: object):
        self.value = value

    def differs(self, other: object) -> bool:
        """Whether a leaf, which is not wrapped, differs from this one."""
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
    """What stands for a leaf in comparisons."""
    # By the text, because 0.0 == -0.0, and nan is not equal to itself.
    if isinstance(value, float | complex | np.number):
        return repr(value)
    if _is_float0(value):
        return value.shape
    return value


def equal(one: object, other: object) -> bool:
    """Whether two static values are one object, or equal by `==`.

    Raises:
        FunctreeTypeError: if `==` raises.
    """
    try:
        # Not `one != other`, which some classes do not define together with `__eq__`.
        return one is other or bool(one == other)
    except USERS_ERRORS as error:
        raise FunctreeTypeError(
            f"static data of class {type(one).__name__} cannot be compared: its `==` raises "
            f"{type(error).__name__}: {error}; give it an `__eq__` that returns True or False, "
            "and a `__hash__`; an array is a field without `static=True`"
        ) from error


def _is_float0(value: object) -> TypeGuard[np.ndarray[Any, Any]]:
    """Whether a value is JAX's gradient of integers: an array without values."""
    return isinstance(value, np.ndarray) and value.dtype == jax.dtypes.float0


def is_hashable(value: object) -> bool:
    """Whether a value can be hashed."""
    if _is_float0(value):
        return True
    try:
        hash(value)
    except TypeError:
        return False
    return True


def runs_once(value: object) -> bool:
    """Whether a value is only a computation, which runs once, when it is iterated or awaited: a
    generator, a `map`.

    An object of another class that can be iterated, such as a loader of data, may be static.
    """
    return (
        isinstance(value, Iterator | AsyncIterator | Awaitable)
        and type(value).__module__ in _PYTHONS_OWN
    )


_PYTHONS_OWN = ("builtins", "itertools")
