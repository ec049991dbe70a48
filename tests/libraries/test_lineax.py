"""lineax: its operators, its solvers and their states as arguments, results and parameters."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax import Array

import functree as ft
from tests.lib.meshes import MESH, assert_lies
from tests.libraries.alike import assert_alike, assert_parts, jit_alike

N = 4


def matrix() -> Array:
    """A symmetric positive definite one."""
    a = jax.random.normal(jax.random.key(0), (N, N))
    return a @ a.T + N * jnp.eye(N)


def vector() -> Array:
    return jnp.arange(1.0, N + 1)


def definite() -> lx.MatrixLinearOperator:
    return lx.MatrixLinearOperator(matrix(), lx.positive_semidefinite_tag)


def nonlinear(x: Array, args: Array) -> Array:
    return matrix() @ x + args * jnp.sin(x)


def operators() -> dict[str, lx.AbstractLinearOperator]:
    """One of each kind, that map vectors to vectors."""
    structure = jax.ShapeDtypeStruct((N,), jnp.float32)
    linear = eqx.nn.Linear(N, N, use_bias=False, key=jax.random.key(1))
    jacobian = lx.JacobianLinearOperator(nonlinear, vector(), jnp.array(0.5))
    ones = jnp.ones(N - 1)
    return {
        "diagonal": lx.DiagonalLinearOperator(vector()),
        "function": lx.FunctionLinearOperator(linear, structure),
        "jacobian": jacobian,
        "linearised": lx.linearise(jacobian),
        "matrix": definite(),
        "product": definite() @ lx.MatrixLinearOperator(matrix()),
        "pytree": lx.PyTreeLinearOperator(matrix(), structure),
        "tagged": lx.TaggedLinearOperator(2.0 * definite(), lx.symmetric_tag),
        "tridiagonal": lx.TridiagonalLinearOperator(4 + vector(), ones, ones),
    }


def all_products(operators: dict[str, Any], x: Array) -> dict[str, Array]:
    return {name: operator.mv(x) for name, operator in operators.items()}


def test_operators_are_arguments_results_and_parts():
    def program(operators: dict[str, Any], x: Array) -> Any:
        return operators, all_products(operators, x)

    again, _ = jit_alike(program, operators(), vector())
    assert_parts(again)
    # A state that a step returns is that of the next one: compiled once.
    ft.testing.assert_closed(ft.jit(program), (operators(), vector()))


SOLVERS: dict[str, Any] = {
    "CG": lx.CG(1e-6, 1e-6),
    "Cholesky": lx.Cholesky(),
    "LU": lx.LU(),
    "SVD": lx.SVD(),
}


def test_solvers_and_their_states_are_arguments_and_results():
    def states(solvers: dict[str, Any], operator: Any) -> dict[str, Any]:
        return {name: solver.init(operator, {}) for name, solver in solvers.items()}

    def solve(solvers: dict[str, Any], operator: Any, states: dict[str, Any], x: Array) -> Any:
        found = {}
        for name, solver in solvers.items():
            found[name] = lx.linear_solve(operator, x, solver, state=states[name])
        return found

    made = jit_alike(states, SOLVERS, definite(), tolerance=1e-4)
    assert_parts(made)
    solutions = jit_alike(solve, SOLVERS, definite(), made, vector(), tolerance=1e-4)
    for solution in solutions.values():
        assert solution.result == lx.RESULTS.successful
        np.testing.assert_allclose(matrix() @ solution.value, vector(), 1e-3, 1e-3)


def test_an_operator_is_laid_out_by_its_own_annotations(tmp_path: Path):
    operator = definite()  # lineax itself annotates its matrix "a b"
    rules = ft.AxisRules({"a": "data", "b": "model"})
    placed = ft.shard(operator, rules, MESH)
    assert_lies(placed.matrix, "data", "model")
    assert placed.tags == operator.tags
    ft.save(tmp_path / "x", placed)
    restored = ft.restore(tmp_path / "x", ft.abstract(definite)(), rules, MESH)
    assert_alike(restored, operator)
    assert_lies(restored.matrix, "data", "model")
