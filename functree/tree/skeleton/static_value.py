"""A static value ─► `StaticValue`: compared and hashed by type and value, so that 1, True and 1.0
are different."""

import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Iterator
from decimal import Decimal
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from functree.tree.arrays import TreeDef


class StaticValue:
    """A static value that is equal to another one only if their types, and the types of the values
    in them, are equal.

    The values in tuples (named tuples too), lists, dicts, sets, frozen dataclasses and treedefs are
    compared this way. Other objects are compared by their type and their own `==`.

    Raises:
        TypeError: (when hashed) the value cannot be hashed.
    """

    __slots__ = ("value",)
    value: object

    def __init__(self, value: object):
        self.value = value

    def differs(self, other: object) -> bool:
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
    if cls is list or _is_plain_tuple(cls):
        return len(one) == len(other) and all(map(same_value, one, other))
    if cls is dict:
        return len(one) == len(other) and _values(one) == _values(other)
    if cls is frozenset or cls is set:
        return set(map(StaticValue, one)) == set(map(StaticValue, other))
    if _is_float0(one):
        return _is_float0(other) and one.shape == other.shape
    if cls is PyTreeDef:
        return _same_structure(one, other)
    fields = _compared_fields(cls)
    if fields is not None:
        return all(same_value(getattr(one, name), getattr(other, name)) for name in fields)
    # The comparison of two arrays has no single truth value.
    if issubclass(cls, np.ndarray | jax.Array) or _differ_in_hash(one, other):
        return False
    # Not `one != other`, which some classes do not define together with `__eq__`.
    return bool(one == other)


def _differ_in_hash(one: object, other: object) -> bool:
    """Whether two values cannot be equal, as a dict finds out, without calling an `__eq__` that may
    raise."""
    try:
        return hash(one) != hash(other)
    except TypeError:
        return False


def _values(mapping: dict[object, object]) -> dict[StaticValue, StaticValue]:
    """The same dict, with keys and values that are compared by type and value."""
    return {StaticValue(key): StaticValue(value) for key, value in mapping.items()}


@functools.cache
def _compared_fields(cls: type) -> tuple[str, ...] | None:
    """The fields by which a frozen dataclass is compared; None for a class that is compared by its
    own `==`."""
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not (parameters.frozen and parameters.eq):
        return None
    # An `__eq__` that was generated is that of the fields. One that a user wrote may compare
    # something else.
    if cls.__eq__.__code__.co_filename != "<string>":
        return None
    return tuple(field.name for field in dataclasses.fields(cls) if field.compare)


def _is_plain_tuple(cls: type) -> bool:
    """Whether values of a class are compared as tuples: tuples themselves, and most named
    tuples."""
    return issubclass(cls, tuple) and cls.__eq__ is tuple.__eq__


def _is_number(cls: type) -> bool:
    """Whether values of a class are compared by their text, because 0.0 == -0.0, and nan is not
    equal to itself."""
    return cls is float or cls is complex or cls is Decimal or issubclass(cls, np.number)


def _is_float0(value: object) -> bool:
    """Whether a value is what JAX returns as the gradient of integers: an array that holds only its
    shape."""
    return isinstance(value, np.ndarray) and value.dtype == jax.dtypes.float0


def _hash(value: Any) -> int:
    """A hash that is the same for values that are `same_value`. Raises TypeError for a value
    without a hash."""
    cls = type(value)
    if _is_number(cls):
        return hash((cls, repr(value)))
    if cls is frozenset:
        return hash((cls, frozenset(map(_hash, value))))
    if _is_plain_tuple(cls):
        return hash((cls, *map(_hash, value)))
    if _is_float0(value):
        return hash((cls, value.shape))
    if cls is PyTreeDef:
        return _structure_hash(value)
    fields = _compared_fields(cls)
    if fields is not None:
        return hash((cls, *[_hash(getattr(value, name)) for name in fields]))
    return hash((cls, value))


# Without recursion, because trees may be deeper than Python's stack.


def _same_structure(one: TreeDef, other: TreeDef) -> bool:
    """Whether two treedefs are equal, with the static data of their nodes.

    JAX's own `==` compares these by `==`: 1 and True would be equal, and nan different from nan.
    """
    waiting = [(one, other)]
    while waiting:
        one, other = waiting.pop()
        if _is_leaf(one) or _is_leaf(other):
            if _is_leaf(one) is not _is_leaf(other):
                return False
            continue
        children, others = one.children(), other.children()
        if len(children) != len(others) or not same_value(one.node_data(), other.node_data()):
            return False
        waiting += zip(children, others, strict=True)
    return True


def _structure_hash(treedef: TreeDef) -> int:
    """The hash of a treedef, with the static data of its nodes.

    JAX's own hash leaves them out, so all configurations of one model would have the same hash.
    """
    found: list[tuple[int, int]] = []
    waiting = [treedef]
    while waiting:
        one = waiting.pop()
        try:
            data = _hash(one.node_data())
        except TypeError:  # the static data of a dict is the list of its keys, which has no hash
            data = 0
        children = one.children()
        found.append((data, len(children)))
        # Most children are leaves, which need no hash of their own: their number is enough.
        waiting += [child for child in children if not _is_leaf(child)]
    return hash(tuple(found))


def _is_leaf(treedef: TreeDef) -> bool:
    """Whether a treedef is that of a leaf. That of `None` has one node too, and no leaf."""
    return treedef.num_leaves == 1 and treedef.num_nodes == 1


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
