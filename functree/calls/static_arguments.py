"""Values that `static_argnums` or `static_argnames` keep out of tracing, whatever they hold."""

from typing import Any

from functree.errors import FunctreeError, Problem, count
from functree.tree.arrays import is_array, value_text
from functree.tree.skeleton.skeleton import Skeleton
from functree.tree.skeleton.static_value import StaticValue, is_hashable


class StaticArgument(StaticValue):
    """One leaf of a call, equal by type and value."""

    __slots__ = ()


def with_static(call: Any, names: frozenset[str]) -> Any:
    """A call in which the values of some parameters are such leaves; `more.mode` is one among any names."""
    if not names:
        return call
    return type(call)(*[_static(name, value, names) for name, value in zip(call._fields, call, strict=True)])


def _static(name: str, value: Any, names: frozenset[str]) -> Any:
    if name in names:
        return StaticArgument(value)
    if type(value) is dict and any(f"{name}.{key}" in names for key in value):
        return {key: StaticArgument(x) if f"{name}.{key}" in names else x for key, x in value.items()}
    return value


def opened(call: Any) -> list[Any]:
    """The values of a call as the function is given them, without such leaves around them."""
    return [{key: _opened(x) for key, x in value.items()} if type(value) is dict else _opened(value) for value in call]


def _opened(value: Any) -> Any:
    return value.value if isinstance(value, StaticArgument) else value


def check_static(skeleton: Skeleton) -> None:
    """Raise FunctreeError for static values of a call that cannot be hashed, by path."""
    problems: list[Problem] = []
    for path, static in skeleton.statics:
        if isinstance(static, StaticArgument) and not is_hashable(static):
            why, value = "is declared static, and cannot be hashed", static.value
            remedy = "make it hashable"
            if is_array(value):
                remedy = "leave it out of `static_argnums` and `static_argnames`"
            problems.append(Problem(path, None, value_text(value), why, remedy))
    if problems:
        raise FunctreeError(f"{count(len(problems), 'leaf')} cannot be static", problems)
    skeleton.check_hashable()
