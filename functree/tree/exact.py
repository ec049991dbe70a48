"""A static value ─► `Exact`: compared and hashed by type and value, so that 1, True and 1.0 are three."""

import dataclasses
from typing import Any

from jax.tree_util import PyTreeDef


class Exact:
    """A static value that is equal to another only if their types are too, and those of what they hold.

    What they hold is looked at in tuples (named ones too), frozen sets, frozen dataclasses and tree structures.

    Raises:
        TypeError: (when hashed) the value cannot be hashed.
    """

    __slots__ = ("value",)
    value: Any

    def __init__(self, value: Any):
        self.value = value

    def differs(self, other: Any) -> bool:
        """Whether another value, not wrapped, is not this one."""
        return not _same(self.value, other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exact) and _same(self.value, other.value)

    def __hash__(self) -> int:
        return _hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    cls = type(one)
    if cls is not type(other):
        return False
    if cls in _NUMBERS:
        return repr(one) == repr(other)
    if cls is tuple or cls is list:
        return len(one) == len(other) and all(map(_same, one, other))
    if cls is frozenset:
        return {Exact(x) for x in one} == {Exact(x) for x in other}
    if not one == other:
        return False
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    if cls is PyTreeDef:
        return _same(one.node_data(), other.node_data()) and all(map(_same, one.children(), other.children()))
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not (parameters.frozen and parameters.eq):
        return True
    compared = (field.name for field in dataclasses.fields(one) if field.compare)
    return all(_same(getattr(one, name), getattr(other, name)) for name in compared)


_NUMBERS = (float, complex)  # 0.0 == -0.0, and nan is no nan; their texts tell


def _hash(value: Any) -> int:
    cls = type(value)
    if cls in _NUMBERS:
        return hash((cls, repr(value)))
    if cls is tuple or cls is frozenset:
        return hash((cls, cls(map(_hash, value))))
    return hash((cls, value))
