"""optimistix: loops with functions as arguments, auxiliary outputs, and their states taken apart."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import optimistix as optx
from jax import Array

import functree as ft
from tests.libraries.alike import assert_alike, assert_parts, jit_alike

TOL = {"rtol": 1e-5, "atol": 1e-5}
Args = tuple[Callable[[Array], Array], Array]
Values = dict[str, Array]


def residuals(y: Values, args: Args) -> tuple[Values, Values]:
    """A problem whose arguments have a function, with an auxiliary output."""
    f, target = args
    out = {"a": f(y["a"]) - target, "b": y["b"] - jnp.sum(y["a"]) / 4}
    return out, {"seen": y["b"]}


def squares(y: Values, args: Args) -> tuple[Array, Values]:
    out, aux = residuals(y, args)
    return jnp.sum(out["a"] ** 2) + jnp.sum(out["b"] ** 2), aux


def start() -> Values:
    return {"a": jnp.array([0.3, 0.5, 0.2]), "b": jnp.array([0.1])}


ARGS = (jnp.tanh, jnp.array(0.25))
NEWTON, BFGS = optx.Newton(**TOL), optx.BFGS(**TOL)


def test_solutions_are_results_arguments_and_parts():
    def solve(args: Args) -> dict[str, optx.Solution]:
        return {
            "root": optx.root_find(residuals, NEWTON, start(), args, has_aux=True),
            "minimum": optx.minimise(squares, BFGS, start(), args, has_aux=True),
        }

    solutions = jit_alike(solve, ARGS)
    assert all(one.result == optx.RESULTS.successful for one in solutions.values())
    assert_parts(solutions)
    jit_alike(lambda solutions: solutions, solutions)


def test_a_gradient_through_a_loop():
    def loss(args: Args) -> Array:
        found = optx.root_find(residuals, NEWTON, start(), args, has_aux=True)
        return jnp.sum(found.value["a"] ** 2)

    jit_alike(ft.value_and_grad(loss), ARGS, plain=eqx.filter_value_and_grad(loss))


def test_a_loop_step_by_step():
    """As optimistix' page on interactive solves has it: the state of a solver, with its linear
    operators and the jaxprs in them, is an argument and a result of a compiled step."""
    solver, fn = optx.LevenbergMarquardt(**TOL), residuals
    f_struct, aux_struct = eqx.filter_eval_shape(fn, start(), ARGS)

    def init(y: Values) -> Any:
        return solver.init(fn, y, ARGS, {}, f_struct, aux_struct, frozenset())

    def step(y: Values, state: Any) -> Any:
        y, state, _ = solver.step(fn, y, ARGS, {}, state, frozenset())
        return y, state, solver.terminate(fn, y, ARGS, {}, state, frozenset())

    jitted, plain = ft.jit(step), eqx.filter_jit(step)
    found = expected = (start(), eqx.filter_jit(init)(start()))
    for _ in range(3):
        found, expected = jitted(*found[:2]), plain(*expected[:2])
        assert_alike(found, expected)
    assert len(jitted.compilations) == 1
    assert_parts(found)
