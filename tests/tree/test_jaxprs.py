"""The operations of a program and of those inside of it, and what its outputs depend on, against
literal sets."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from functree.tree.jaxprs import all_equations, dependencies


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
    "a loop": lambda x: jax.lax.map(jnp.sin, x),
    "while": lambda x: jax.lax.while_loop(lambda x: x[0] < 0, jnp.sin, x),
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


# What outputs depend on

X = np.arange(3, dtype=np.float32)


@jax.custom_vjp
def twice(x: Any) -> Any:
    return x * 2


twice.defvjp(lambda x: (twice(x), None), lambda _, t: (t * 2,))


def loop(x: Any, y: Any, z: Any) -> Any:
    """The second value takes from the first, and the third from the second: after three rounds all
    of them depend on `x`."""

    def body(carry: Any) -> Any:
        i, a, b, c, d = carry
        return i + 1, a, b + a, c + b, d

    return lax.while_loop(lambda carry: carry[0] < 4, body, (0, x, y, y, z))[1:]


def ended_by(x: Any, y: Any, z: Any) -> Any:
    return lax.while_loop(lambda carry: carry[0][0] < 4, lambda c: (c[0] + 1, c[1] * z), (x, y))


def scanned(x: Any, y: Any, z: Any) -> Any:
    """Carried: (x, then also y); collected: slices of y, times z."""
    return lax.scan(lambda a, b: (a + b, b * z), x[0], y)


def chosen(x: Any, y: Any, z: Any) -> Any:
    return lax.cond(x[0] > 0, lambda: (y, z), lambda: (y * 2, y))


# The function of three arrays, and for each of its outputs the numbers of those it depends on.
CASES: dict[str, tuple[Callable[..., Any], list[set[int]]]] = {
    "each alone": (lambda x, y, z: (jnp.sin(x), y + 1, z), [{0}, {1}, {2}]),
    "concatenated": (lambda x, y, z: jnp.split(jnp.concatenate([x, y]), 2), [{0, 1}, {0, 1}]),
    "jit": (lambda x, y, z: jax.jit(lambda a, b: (b, a))(x, y), [{1}, {0}]),
    "remat": (lambda x, y, z: jax.checkpoint(lambda a, b: (jnp.sin(b), a))(x, y), [{1}, {0}]),
    "custom_vjp": (lambda x, y, z: (twice(x), twice(y)), [{0}, {1}]),
    "cond": (chosen, [{0, 1}, {0, 1, 2}]),
    "while": (loop, [{0}, {0, 1}, {0, 1}, {2}]),
    "while, ended by a value": (ended_by, [{0}, {0, 1, 2}]),
    "scan": (scanned, [{0, 1}, {1, 2}]),
    "map": (lambda x, y, z: (lax.map(jnp.sin, x), lax.map(lambda a: a * z[0], y)), [{0}, {1, 2}]),
    "a reduction by a function": (
        lambda x, y, z: lax.reduce((x, y), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1]), (0,)),
        [{0}, {1}],
    ),
    "scatter": (lambda x, y, z: x.at[0].add(y[0]), [{0, 1}]),
    "solve": (lambda x, y, z: (jnp.linalg.solve(jnp.eye(3) + x, y), z), [{0, 1}, {2}]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_outputs_depend_on(case: str):
    function, want = CASES[case]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        program = jax.make_jaxpr(function)(X, X, X)
    found = dependencies(program, [frozenset({i}) for i in range(3)])
    assert [set(one) for one in found] == want


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_random_numbers_depend_on_their_key(make: Any):
    def function(key: Any, x: Any) -> Any:
        return x + jax.random.normal(key, (3,)), jax.random.split(key)[0], x, key

    program = jax.make_jaxpr(function)(make(0), X)
    found = dependencies(program, [frozenset({0}), frozenset({1})])
    assert found == [{0, 1}, {0}, {1}, {0}]
