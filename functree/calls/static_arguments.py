"""What is static in a call: the arguments that are declared so, and an error for what cannot be."""

from collections.abc import Sequence
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.tree_util import default_registry

from functree.calls.signature import Partial, Record, Signature
from functree.errors import FunctreeTypeError, Problem, count
from functree.tree.arrays import Tree, is_array, is_unheld_number, unheld, value_text
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton
from functree.tree.skeleton.static_value import PLAIN, StaticValue, is_hashable, runs_once

HIJAX_REMEDY = "use the arrays in it, or `jax.jit`, which takes such values"


def is_hijax(value: object) -> bool:
    """Whether a value that is not an array has a type for JAX: `jax.experimental.hijax` can define
    one for any class."""
    try:
        return not isinstance(jax.typeof(value), ShapedArray)
    except (TypeError, ValueError):  # ValueError for a value with a method `__jax_array__`
        return False


class StaticArgument(StaticValue):
    """A static argument as one leaf of a call, compared by type and value.

    Raises:
        TypeError: (when hashed) the value cannot be hashed.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        hash(self.value)  # raises for a value without a hash, which cannot be a static argument
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


def with_static(call: Record, names: frozenset[str]) -> Record:
    """A call with static leaves for some parameters; the name `more.mode` is the argument `mode` in
    `**more`."""
    values: list[Tree] = []
    for name, value in zip(call._fields, call, strict=True):
        if name in names:
            values.append(StaticArgument(value))
        elif type(value) is dict:  # perhaps `**more`, in which single arguments may be static
            static = {k: StaticArgument(x) for k, x in value.items() if f"{name}.{k}" in names}
            values.append({**value, **static})
        else:
            values.append(value)
    return type(call)(*values)


def opened(call: Sequence[Tree]) -> list[Tree]:
    """The values of a call for the function itself: static leaves are replaced by their values."""
    values: list[Tree] = []
    for value in call:
        # Perhaps `**more`. Deeper down there are no static arguments.
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
    """Raise FunctreeError for values of a call that cannot be static. The error lists them by
    path."""
    problems: list[Problem] = []
    for keys, static in skeleton.statics:
        why = _not_static(static)
        if why is not None:
            problems.append(Problem(Path(keys), None, *why))
    # These first: they have another remedy than leaves that are not arrays.
    if problems:
        raise FunctreeTypeError(f"{count(len(problems), 'leaf')} cannot be static", problems)
    skeleton.check_hashable()


def _not_static(static: object) -> tuple[str, str, str] | None:
    """What a value is that cannot be static, why, and the remedy; None for other values."""
    if type(static) in PLAIN:
        return None
    # Of a static argument, the value that the user has passed.
    value = _opened(static)
    kind = type(value).__name__
    why = unheld(static)
    if why is not None and (is_unheld_number(static) or not is_hashable(static)):
        return kind, *why
    if isinstance(static, jax.Ref):
        why = "is mutable, so it can be neither an argument nor static"
        return "Ref", why, "pass its value, `ref[...]`"
    if isinstance(static, ShapedArray):
        remedy = "pass `jax.ShapeDtypeStruct(x.shape, x.dtype)`"
        return kind, "is the type of an array, which is neither an array nor static", remedy
    if is_hijax(static):
        why = "is a value of a type that is defined by `jax.experimental.hijax`"
        return kind, why, HIJAX_REMEDY
    # By the class, as Python looks for such methods.
    if hasattr(type(static), "__jax_array__"):
        remedy = "register the class, or pass the array itself, `jnp.asarray(...)`"
        return kind, "has an array that JAX cannot see, because its class is no pytree", remedy
    if runs_once(value):
        why = "would be used up by the trace, and its arrays would be constants of the program"
        return kind, why, "pass a list or an array"
    if isinstance(static, StaticArgument) and not is_hashable(static):
        remedy = "make it hashable"
        if is_array(value):
            remedy = "leave it out of `static_argnums` and `static_argnames`"
        return value_text(value), "is declared static, but cannot be hashed", remedy
    return None


# Objects that are static by identity


def check_identity(signature: Signature, call: Record) -> None:
    """Raise FunctreeError for arguments of a call, bound ones among them, that are compared by
    identity: their arrays would be constants of the program, and changes of them would be missed.

    A leaf inside of a tree may be such an object, as in `eqx.filter_jit`.
    """
    problems: list[Problem] = []
    for path, value in signature.each(call):
        found = _by_identity(value)
        if found is not None:
            problems.append(Problem(path, None, found, _BY_IDENTITY, _remedy(found)))
    if problems:
        arguments = count(len(problems), "argument")
        raise FunctreeTypeError(
            f"{signature.name}: {arguments} would be static by identity", problems
        )


def check_wrapped(door: str, fun: object) -> None:
    """Raise FunctreeError for a function that has an object in it that is compared by identity: it
    is such an object itself, or a wrapper of one or of a bound method, such as `jax.vmap` makes."""
    inner: Any = fun
    while inner is not None:
        found = _by_identity(Partial.of(inner).fun)
        if found is not None:
            problem = Problem(None, None, found, _BY_IDENTITY, _remedy(found))
            raise FunctreeTypeError(f"{door}: the function would be static by identity", [problem])
        inner = getattr(inner, "__wrapped__", None)
        # A bound method in a wrapper is no argument of the wrapper.
        if isinstance(inner, MethodType) and _by_identity(inner) is not None:
            inner = inner.__self__


_BY_IDENTITY = (
    "has no `__eq__` of its own, so its arrays would be constants of the program, and later "
    "changes of it would be missed"
)


def _remedy(cls: str) -> str:
    return (
        f"make {cls} an `eqx.Module`, or close over the object in a lambda, "
        "`lambda x: obj.method(x)`; `static_argnames=` of `ft.jit` takes it as it is"
    )


def _by_identity(value: Any) -> str | None:
    """The class of an object that is compared by identity; None for all other values."""
    # A bound method is compared by what it is bound to.
    if isinstance(value, MethodType):
        return _by_identity(value.__self__)
    cls = type(value)
    if cls.__eq__ is not object.__eq__ or isinstance(value, _EXEMPT):
        return None
    # Functions of any kind, and objects of JAX.
    if cls.__module__.partition(".")[0] in _LIBRARIES or hasattr(value, "__wrapped__"):
        return None
    if is_array(value) or default_registry.flatten_one_level(value) is not None:
        return None
    return cls.__name__


_EXEMPT = type | Enum | partial | np.ufunc
_LIBRARIES = ("builtins", "functools", "jax", "jaxlib")
