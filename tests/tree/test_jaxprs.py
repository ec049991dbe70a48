"""The operations of a program and of those inside of it: each program once, wherever it is."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from functree.tree.jaxprs import all_equations, inner_programs


@jax.jit
def inner(x: Any) -> Any:
    return jnp.sin(x)


@jax.custom_jvp
def with_rule(x: Any) -> Any:
    return jnp.sin(x)


with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), *tangents))


PROGRAMS: dict[str, Any] = {
    "itself": jnp.sin,
    "jit": inner,
    "called twice": lambda x: inner(x) + inner(x),
    "checkpoint": jax.checkpoint(jnp.sin),
    "a loop": lambda x: jax.lax.map(jnp.sin, x),
    "while": lambda x: jax.lax.while_loop(lambda x: x[0] < 0, jnp.sin, x),
    "a condition": lambda x: jax.lax.while_loop(lambda x: jnp.sin(x[0]) < 0, lambda x: x, x),
    "a branch": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.negative, x),
    "a rule": with_rule,
    "nested": lambda x: jax.lax.map(lambda y: jax.lax.cond(y > 0, inner, jnp.negative, y), x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_operation_is_found_once_in_any_program(name: str) -> None:
    program = jax.make_jaxpr(PROGRAMS[name])(jnp.ones(3))
    names = [equation.primitive.name for equation in all_equations(program)]
    assert names.count("sin") == 1
    assert ("sin" in [one.primitive.name for one in program.eqns]) == (name == "itself")


def test_branches_are_inner_programs() -> None:
    program = jax.make_jaxpr(PROGRAMS["a branch"])(jnp.ones(3))
    found = [list(inner_programs(equation)) for equation in program.eqns]
    assert sorted(map(len, found))[-1] == 2 and sum(map(len, found)) == 2
