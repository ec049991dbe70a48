"""A traced program ─► its operations, and those of the programs that they run."""

from collections.abc import Iterator
from typing import TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

Program: TypeAlias = ClosedJaxpr | Jaxpr
"""A traced program. In later versions of JAX the two are one class."""


def inner_programs(equation: JaxprEqn) -> Iterator[Program]:
    """The programs that an operation has among its parameters.

    Args:
        equation: the operation.
    """
    for value in equation.params.values():
        # `cond` has a tuple of programs, others have single ones.
        several = value if isinstance(value, tuple | list) else (value,)
        for one in several:
            if isinstance(one, ClosedJaxpr | Jaxpr):
                yield one


def all_equations(program: Program) -> Iterator[JaxprEqn]:
    """All operations of a program: its own, and those of the programs inside of it.

    Args:
        program: the program, as `jax.make_jaxpr` returns it.

    Examples:
        >>> from functree.tree.programs import all_equations
        >>> program = jax.make_jaxpr(lambda x: jax.lax.map(jnp.sin, x))(
        ...     jnp.ones(3)
        ... )
        >>> [one.primitive.name for one in all_equations(program)]
        ['scan', 'sin']
    """
    waiting, seen = [program], set[int]()
    while waiting:
        one = waiting.pop()
        # A function that is called several times is one program.
        if id(one) in seen:
            continue
        seen.add(id(one))
        for equation in one.eqns:
            yield equation
            waiting += inner_programs(equation)
