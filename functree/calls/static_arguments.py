"""These functions wrap the static arguments of a call, and refuse values that cannot be static."""

from collections.abc import Sequence
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.tree_util import default_registry

from functree.calls.signature import NOT_GIVEN, Partial, Record, Signature
from functree.errors import FunctreeTypeError, Problem, count
from functree.tree.arrays import Tree, is_array, is_unheld_number, unheld, value_text
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton
from functree.tree.skeleton.static_value import PLAIN, StaticValue, is_hashable, runs_once

JAX_VALUE = "is a JAX value, but not an array", "use its arrays instead, such as `ref[...]`"
"""The reason and the remedy for a value that `is_jax_value` recognizes."""


def is_jax_value(value: object) -> bool:
    """Return whether JAX treats a value as data, although it is neither an array nor a pytree.

    Examples are a `jax.Ref`, a value with a type from `jax.experimental.hijax`, and an instance of
    a class with a `__jax_array__` method.
    """
    try:
        return not isinstance(jax.typeof(value), ShapedArray)
    except (TypeError, ValueError):
        # Looked up on the class, as Python does for special methods.
        return hasattr(type(value), "__jax_array__")


class StaticArgument(StaticValue):
    """A static argument as one leaf of a call, compared by type and value.

    Raises:
        TypeError: (when hashed) if the value is not hashable.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        hash(self.value)  # raises an error if the value is not hashable, and so cannot be static
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


def with_static(call: Record, names: frozenset[str]) -> Record:
    """Return a call in which the named arguments are static leaves.

    The name `more.mode` stands for the argument `mode` in `**more`.
    """
    values: list[Tree] = []
    for name, value in zip(call._fields, call, strict=True):
        if name in names and value is not NOT_GIVEN:
            values.append(StaticArgument(value))
        elif type(value) is dict:  # possibly `**more`, in which each argument may be static
            static = {k: StaticArgument(x) for k, x in value.items() if f"{name}.{k}" in names}
            values.append({**value, **static})
        else:
            values.append(value)
    return type(call)(*values)


def opened(call: Sequence[Tree]) -> list[Tree]:
    """Return the values of a call for the user's function, with static leaves unwrapped."""
    values: list[Tree] = []
    for value in call:
        # Possibly `**more`. Static arguments are never nested deeper.
        if type(value) is dict:
            values.append({key: _opened(x) for key, x in value.items()})
        else:
            values.append(_opened(value))
    return values


def _opened(value: Tree) -> Tree:
    if isinstance(value, StaticArgument):
        return value.value
    return value


def check_static(skeleton: Skeleton) -> None:
    """Refuse values of a call that cannot be static.

    Raises:
        FunctreeError: if a value cannot be static; the error lists the paths.
    """
    problems: list[Problem] = []
    for keys, static in skeleton.statics:
        why = _not_static(static)
        if why is not None:
            problems.append(Problem(Path(keys), None, *why))
    # These problems come first, since their remedies differ from the remedy for unhashable leaves.
    if problems:
        raise FunctreeTypeError(f"{count(len(problems), 'leaf')} cannot be static", problems)
    skeleton.check_hashable()


def _not_static(static: object) -> tuple[str, str, str] | None:
    """Describe a value that cannot be static, with the reason and a remedy.

    Return None for all other values.
    """
    if type(static) in PLAIN:
        return None
    # For a static argument, the value that the user passed.
    value = _opened(static)
    kind = type(value).__name__
    why = unheld(static)
    if why is not None and (is_unheld_number(static) or not is_hashable(static)):
        return kind, *why
    if is_jax_value(static):
        return kind, *JAX_VALUE
    if runs_once(value):
        why = "would be exhausted by the trace, and its arrays would be constants of the program"
        return kind, why, "pass a list or an array"
    if isinstance(static, StaticArgument) and not is_hashable(static):
        remedy = "make the argument hashable, or do not declare it static"
        return value_text(value), "is declared static, but is not hashable", remedy
    return None


# Objects that are compared by identity


def check_identity(signature: Signature, call: Record) -> None:
    """Refuse arguments of a call, including bound arguments, that are compared by identity.

    Their arrays would be constants of the program, and later changes to the arguments would go
    unnoticed. A leaf inside a tree may be compared by identity, as in `eqx.filter_jit`.

    Raises:
        FunctreeError: if an argument is compared by identity.
    """
    problems: list[Problem] = []
    for path, value in signature.each(call):
        cls = _by_identity(value)
        if cls is not None:
            problems.append(Problem(path, None, cls, _BY_IDENTITY, _remedy(cls)))
    if problems:
        arguments = count(len(problems), "argument")
        raise FunctreeTypeError(
            f"{signature.name}: {arguments} would be static and compared by identity", problems
        )


def check_wrapped(door: str, fun: object) -> None:
    """Refuse a function that contains an object compared by identity.

    The function may be the object itself, or a wrapper of the object or of its bound method, such
    as a result of `jax.vmap`.

    Raises:
        FunctreeError: if the function contains an object compared by identity.
    """
    inner: Any = fun
    while inner is not None:
        cls = _by_identity(Partial.of(inner).fun)
        if cls is not None:
            problem = Problem(None, None, cls, _BY_IDENTITY, _remedy(cls))
            raise FunctreeTypeError(
                f"{door}: the function would be static and compared by identity", [problem]
            )
        inner = getattr(inner, "__wrapped__", None)
        # The instance of a bound method in a wrapper is not an argument of the wrapper.
        if isinstance(inner, MethodType) and _by_identity(inner) is not None:
            inner = inner.__self__


_BY_IDENTITY = (
    "does not define `__eq__`, so its arrays would be constants of the program, and later changes "
    "to it would go unnoticed"
)


def _remedy(cls: str) -> str:
    return (
        f"make {cls} an `eqx.Module`, or close over the object in a lambda, "
        "`lambda x: obj.method(x)`. `ft.jit` also accepts the object as an argument named "
        "in `static_argnames=`"
    )


def _by_identity(value: Any) -> str | None:
    """Return the class name of an object that is compared by identity, or None for other values."""
    # A bound method is compared by its instance.
    if isinstance(value, MethodType):
        return _by_identity(value.__self__)
    cls = type(value)
    if cls.__eq__ is not object.__eq__ or isinstance(value, _EXEMPT):
        return None
    # Functions of any kind, and JAX objects.
    if cls.__module__.partition(".")[0] in _LIBRARIES or hasattr(value, "__wrapped__"):
        return None
    if is_array(value) or default_registry.flatten_one_level(value) is not None:
        return None
    return cls.__name__


_EXEMPT = type | Enum | partial | np.ufunc
_LIBRARIES = ("builtins", "functools", "jax", "jaxlib")
