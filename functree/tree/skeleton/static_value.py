"""A static value ─► `StaticValue`: compared and hashed by type and value, so that 1, True and 1.0
are different."""

import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Iterator
from decimal import Decimal
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import PyTreeDef

from functree.errors import USERS_ERRORS, FunctreeTypeError
from functree.tree.arrays import TreeDef

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""The classes of most static values: there is nothing in these, and they are compared by their own
`==` or their text."""

# Asked first, since all that a trace does not know yet is hashed.
_OWN_HASH = (PLAIN - {float, complex}) | {type, FunctionType}


class StaticValue:
    """A static value that is equal to another one only if their types, and the types of the values
    in them, are equal.

    The values in tuples (named tuples too), lists, dicts, sets, dataclasses and treedefs are
    compared this way, and arrays by all of their values. Other objects are compared by their type
    and their own `==`, as JAX compares the static data of nodes. Values without a hash of their own
    have that of their type.
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
        return static_hash(self.value)

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
    if cls is list or is_plain_tuple(cls):
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
    # Not by the class: that of a traced array is no subclass of `jax.Array`.
    if isinstance(one, np.ndarray | jax.Array):
        return _same_array(one, other)
    if _differ_in_hash(one, other):
        return False
    return _by_its_own(one, other)


def _by_its_own(one: object, other: object) -> bool:
    """Whether two values of a class are equal by its `==`. Raises FunctreeTypeError if that
    raises."""
    try:
        # Not `one != other`, which some classes do not define together with `__eq__`.
        return bool(one == other)
    except USERS_ERRORS as error:
        raise FunctreeTypeError(
            f"static data of class {type(one).__name__} cannot be compared: its `==` raises "
            f"{type(error).__name__}: {error}; give it an `__eq__` that returns True or False, "
            "and a `__hash__`"
        ) from error


def _same_array(one: Any, other: Any) -> bool:
    """Whether two arrays have equal values of one dtype; arrays whose values cannot be read here
    are different."""
    if one.dtype != other.dtype or one.shape != other.shape or isinstance(one, Tracer):
        return False
    if isinstance(one, jax.Array):
        if not (one.is_fully_addressable and other.is_fully_addressable):
            return False
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            with jax.ensure_compile_time_eval():  # also while another function is traced
                one, other = jax.random.key_data(one), jax.random.key_data(other)
        one, other = np.asarray(one), np.asarray(other)
    # A subclass may have more than its values, such as the mask of a masked array.
    if type(one) is not np.ndarray:
        return False
    if one.dtype.hasobject:
        return same_value(one.tolist(), other.tolist())
    # By bytes, so that nan is equal to itself and 0.0 differs from -0.0.
    return one.tobytes() == other.tobytes()


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
    """The fields by which a dataclass is compared; None for a class that is compared by its own
    `==`."""
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.eq:
        return None
    # One that can be changed and has a hash all the same: a user wrote it, perhaps by identity.
    if not parameters.frozen and cls.__hash__ is not None:
        return None
    # An `__eq__` that was generated is that of the fields. One that a user wrote may compare
    # something else.
    if cls.__eq__.__code__.co_filename != "<string>":
        return None
    return tuple(field.name for field in dataclasses.fields(cls) if field.compare)


def is_plain_tuple(cls: type) -> bool:
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


def static_hash(value: Any) -> int:
    """A hash that is the same for values that are `same_value`; that of its type, and of the length
    of a list or dict, for a value without a hash."""
    cls = type(value)
    if cls in _OWN_HASH:
        return hash((cls, value))
    # Such as the keys of a dict, in a treedef. Not what is in it, since it can be changed.
    if cls is list or cls is dict:
        return hash((cls, len(value)))
    if _is_number(cls):
        return hash((cls, repr(value)))
    if cls is frozenset:
        return hash((cls, frozenset(map(static_hash, value))))
    if is_plain_tuple(cls):
        return hash((cls, *map(static_hash, value)))
    if _is_float0(value):
        return hash((cls, value.shape))
    if cls is PyTreeDef:
        return _structure_hash(value)
    fields = _compared_fields(cls)
    if fields is not None:
        return hash((cls, *[static_hash(getattr(value, name)) for name in fields]))
    try:
        return hash((cls, value))
    except TypeError:
        return hash(cls)


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
    found: list[object] = []
    waiting = [treedef]
    while waiting:
        one = waiting.pop()
        children = one.children()
        found += static_hash(one.node_data()), len(children)
        # Most children are leaves or None, which need no hash of their own: their number is enough.
        waiting += [child for child in children if child.num_nodes > 1 or _has_data(child)]
    return hash(tuple(found))


def _is_leaf(treedef: TreeDef) -> bool:
    """Whether a treedef is that of a leaf. That of `None` has one node too, and no leaf."""
    return treedef.num_leaves == 1 and treedef.num_nodes == 1


def _has_data(treedef: TreeDef) -> bool:
    """Whether the one node of a treedef has static data, as an empty module may have it."""
    data = treedef.node_data()
    return data is not None and data[1] is not None


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
