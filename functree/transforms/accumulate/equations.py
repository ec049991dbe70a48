"""An equation of a traced function ─► the functions that it calls."""

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from functree.tree.jaxprs import Program

Function = Program
"""A traced function."""

Equation = Any
"""An equation of a traced function, for which JAX's type says less than what it has."""

Atom = Any
"""A variable or a literal."""

CALLS = frozenset({"jit", "pjit", "remat2", "checkpoint"})
"""Equations that run a function once, with their operands as its parameters."""


def inner(function: Function) -> Any:
    """The equations of a function. In later versions of JAX the two classes are one."""
    return function.jaxpr if isinstance(function, ClosedJaxpr) else function


def constants(function: Function) -> list[Any]:
    """The constants of a function."""
    return list(getattr(function, "consts", ()))


def closed(function: Any) -> ClosedJaxpr:
    """A function without constants, as JAX runs it."""
    return ClosedJaxpr(function, ()) if ClosedJaxpr is not Jaxpr else function
