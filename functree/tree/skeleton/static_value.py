"""A static value ─► `StaticValue`: compared and hashed by type and value, so that 1, True and 1.0 are three."""

import dataclasses
from typing import Any

from jax.tree_util import PyTreeDef


class StaticValue:
    """A static value that is equal to another only if their types are too, and those of what they hold.

    What they hold is compared in tuples (named ones too), lists, frozen sets, frozen dataclasses and tree structures.

    Raises:
        TypeError: (when hashed) the value cannot be hashed.
    """

    __slots__ = ("value",)
    value: Any

    def __init__(self, value: Any):
        self.value = value

    def differs(self, other: Any) -> bool:
        """Whether another value, not wrapped, is not this one."""
        return not same_value(self.value, other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticValue) and same_value(self.value, other.value)

    def __hash__(self) -> int:
        return _hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of equal types, down to what they hold."""
    if one is other:
        return True
    cls = type(one)
    if cls is not type(other):
        return False
    if cls in _NUMBERS:
        return repr(one) == repr(other)
    if cls is tuple or cls is list:
        return len(one) == len(other) and all(map(same_value, one, other))
    if cls is frozenset:
        return {StaticValue(x) for x in one} == {StaticValue(x) for x in other}
    if cls is PyTreeDef:
        # Not by its own `==`, for which the static fields 1 and True of a module are equal, and nan is not nan.
        return same_value(one.node_data(), other.node_data()) and same_value(one.children(), other.children())
    if not one == other:
        return False
    if isinstance(one, tuple):
        return all(map(same_value, one, other))
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not (parameters.frozen and parameters.eq):
        return True
    compared = (field.name for field in dataclasses.fields(one) if field.compare)
    return all(same_value(getattr(one, name), getattr(other, name)) for name in compared)


# 0.0 == -0.0, and nan is not equal to itself; their texts tell these apart.
_NUMBERS = (float, complex)


def _hash(value: Any) -> int:
    cls = type(value)
    if cls in _NUMBERS:
        return hash((cls, repr(value)))
    if cls is tuple or cls is frozenset:
        return hash((cls, cls(map(_hash, value))))
    if cls is PyTreeDef:
        return _structure_hash(value)
    return hash((cls, value))


def _structure_hash(treedef: Any) -> int:
    """JAX's own hash leaves out what nodes hold, so that all configurations of one model would have the same."""
    try:
        data = _hash(treedef.node_data())
    except TypeError:  # a class of nodes may hold what cannot be hashed, as a dict its list of keys
        data = 0
    return hash((data, *map(_structure_hash, treedef.children())))


def is_hashable(value: Any) -> bool:
    """Whether a value can be hashed."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
