"""What is static in a call: the arguments that are declared so, and an error for what cannot be."""

from typing import Any

import jax
from jax.core import ShapedArray

from functree.errors import FunctreeError, Problem, count
from functree.tree.arrays import is_array, value_text
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton
from functree.tree.skeleton.static_value import StaticValue, is_hashable, runs_once


class StaticArgument(StaticValue):
    """A static argument as one leaf of a call, compared by type and value."""

    __slots__ = ()


def with_static(call: Any, names: frozenset[str]) -> Any:
    """A call with static leaves for some parameters; the name `more.mode` is the argument `mode` in `**more`."""
    if not names:
        return call
    return type(call)(*[_static(name, value, names) for name, value in zip(call._fields, call, strict=True)])


def _static(name: str, value: Any, names: frozenset[str]) -> Any:
    """The value of one parameter, as a static leaf if its name is among the names."""
    if name in names:
        return StaticArgument(value)
    # The dict of `**kwargs`, in which single arguments may be static.
    if type(value) is dict and any(f"{name}.{key}" in names for key in value):
        return {key: StaticArgument(x) if f"{name}.{key}" in names else x for key, x in value.items()}
    return value


def opened(call: Any) -> list[Any]:
    """The values of a call for the function itself: static leaves are replaced by their values."""
    values = []
    for value in call:
        if type(value) is dict:
            values.append({key: _opened(x) for key, x in value.items()})
        else:
            values.append(_opened(value))
    return values


def _opened(value: Any) -> Any:
    return value.value if isinstance(value, StaticArgument) else value


def check_static(skeleton: Skeleton) -> None:
    """Raise FunctreeError for values of a call that cannot be static. The error lists them by path."""
    # Static arguments first: they have another remedy than leaves that are not arrays.
    found = ((keys, _not_static(static)) for keys, static in skeleton.statics)
    problems = [Problem(Path(keys), None, *why) for keys, why in found if why is not None]
    if problems:
        raise FunctreeError(f"{count(len(problems), 'leaf')} cannot be static", problems)
    skeleton.check_hashable()


def _not_static(static: Any) -> tuple[str, str, str] | None:
    """What a value is that cannot be static, why, and the remedy; None for other values."""
    value, kind = _opened(static), type(_opened(static)).__name__
    if isinstance(static, jax.Ref):
        return "Ref", "is mutable, so it can be neither an argument nor static", "pass its value, `ref[...]`"
    if isinstance(static, ShapedArray):
        remedy = "pass `jax.ShapeDtypeStruct(x.shape, x.dtype)`"
        return kind, "is the type of an array, which is neither an array nor static", remedy
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
