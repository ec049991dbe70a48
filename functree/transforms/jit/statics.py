"""Values that `static_argnums` or `static_argnames` keep out of tracing, whatever they hold."""

from typing import Any

from functree.tree.exact import Exact


class StaticValue(Exact):
    """One leaf of a call, equal by type and value."""

    __slots__ = ()


def statically(call: Any, names: frozenset[str]) -> Any:
    """A call in which the values of some parameters are such leaves; `more.mode` is one among any names."""
    if not names:
        return call
    return type(call)(*(_static(name, x, names) for name, x in zip(call._fields, call, strict=True)))


def _static(name: str, value: Any, names: frozenset[str]) -> Any:
    if name in names:
        return StaticValue(value)
    if type(value) is dict and any(f"{name}.{key}" in names for key in value):
        return {key: StaticValue(x) if f"{name}.{key}" in names else x for key, x in value.items()}
    return value


def values_of(call: Any) -> list[Any]:
    """What the function is given: such leaves opened."""
    return [{k: _opened(x) for k, x in value.items()} if type(value) is dict else _opened(value) for value in call]


def _opened(value: Any) -> Any:
    return value.value if isinstance(value, StaticValue) else value
