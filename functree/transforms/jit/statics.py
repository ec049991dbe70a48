"""Values that `static_argnums` or `static_argnames` keep out of tracing, whatever they hold."""

from typing import Any

from functree.tree.exact import Exact


class StaticValue(Exact):
    """One leaf of a call, equal by type and value."""

    __slots__ = ()


def statically(call: Any, names: frozenset[str]) -> Any:
    """A call in which the values of some parameters are such leaves."""
    if not names:
        return call
    named = zip(call._fields, call, strict=True)
    return type(call)(*(StaticValue(x) if name in names else x for name, x in named))
