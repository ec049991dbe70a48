"""A static value ─► `StaticValue`: compared and hashed by type and value, so that 1, True and 1.0 are different."""

import dataclasses
from decimal import Decimal
from typing import Any

import numpy as np
from jax.tree_util import PyTreeDef


class StaticValue:
    """A static value that is equal to another one only if their types, and the types of the values in them, are equal.

    The values in tuples (named tuples too), lists, frozen sets, frozen dataclasses and treedefs are compared this way.
    Other objects are compared by their type and their own `==`.

    Raises:
        TypeError: (when hashed) the value cannot be hashed.
    """

    __slots__ = ("value",)
    value: Any

    def __init__(self, value: Any):
        self.value = value

    def differs(self, other: Any) -> bool:
        """Whether another value, which is not wrapped, differs from this one."""
        return not same_value(self.value, other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticValue) and same_value(self.value, other.value)

    def __hash__(self) -> int:
        return _hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values, and the values in them, are equal and of equal types."""
    # Also for a value that is not equal to itself, such as nan: it is the same static value.
    if one is other:
        return True
    cls = type(one)
    if cls is not type(other):
        return False
    if _is_number(cls):
        return repr(one) == repr(other)
    if cls is tuple or cls is list:
        return len(one) == len(other) and all(map(same_value, one, other))
    if cls is frozenset:
        return {StaticValue(x) for x in one} == {StaticValue(x) for x in other}
    if cls is PyTreeDef:
        # A treedef's own `==` compares static fields by `==`: 1 and True would be equal, and nan different from nan.
        return same_value(one.node_data(), other.node_data()) and same_value(one.children(), other.children())
    # Not `one != other`, which some classes do not define together with `__eq__`.
    if not one == other:
        return False
    # What follows only refines their own `==`, which says that (1,) is equal to (True,).
    if isinstance(one, tuple):
        return all(map(same_value, one, other))
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not (parameters.frozen and parameters.eq):
        return True
    compared = (field.name for field in dataclasses.fields(one) if field.compare)
    return all(same_value(getattr(one, name), getattr(other, name)) for name in compared)


def _is_number(cls: type) -> bool:
    """Whether values of a class are compared by their text, because 0.0 == -0.0, and nan is not equal to itself."""
    return cls is float or cls is complex or cls is Decimal or issubclass(cls, np.number)


def _hash(value: Any) -> int:
    """A hash that is the same for values that are `same_value`. Raises TypeError for a value without a hash."""
    cls = type(value)
    if _is_number(cls):
        return hash((cls, repr(value)))
    if cls is tuple or cls is frozenset:
        return hash((cls, cls(map(_hash, value))))
    if cls is PyTreeDef:
        return _structure_hash(value)
    return hash((cls, value))


def _structure_hash(treedef: Any) -> int:
    """The hash of a treedef, with the static data of its nodes.

    JAX's own hash leaves them out, so all configurations of one model would have the same hash.
    """
    try:
        data = _hash(treedef.node_data())
    except TypeError:  # the static data of a dict is the list of its keys, which has no hash
        data = 0
    return hash((data, *map(_structure_hash, treedef.children())))


def is_hashable(value: Any) -> bool:
    """Whether a value can be hashed."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
