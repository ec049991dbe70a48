"""diffrax: solves, their adjoints and their solutions, and a neural differential equation that is
trained."""

from pathlib import Path
from typing import Any

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

import functree as ft
from tests.lib.meshes import assert_lies
from tests.libraries.alike import assert_alike, assert_parts, jit_alike, train_alike


class VectorField(eqx.Module):
    """A neural network as a vector field, as in diffrax' example of a neural ODE."""

    mlp: eqx.nn.MLP

    def __call__(self, t: Array, y: Array, args: Any) -> Array:
        return self.mlp(y)


def field() -> VectorField:
    return VectorField(eqx.nn.MLP(2, 2, 8, 1, jax.nn.softplus, key=jax.random.key(0)))


def y0() -> Array:
    return jnp.array([1.0, -0.5])


STATES = ("solver_state", "controller_state", "made_jump")


def adaptive(field: Any, y: Array, **options: Any) -> dfx.Solution:
    """A solve that saves everything."""
    saveat = dfx.SaveAt(t1=True, dense=True, **dict.fromkeys(STATES, True))
    steps = dfx.PIDController(1e-3, 1e-3)
    options = {"saveat": saveat, "stepsize_controller": steps, "max_steps": 32, **options}
    return dfx.diffeqsolve(dfx.ODETerm(field), dfx.Bosh3(), 0.0, 1.0, 0.1, y, **options)


def test_solutions_are_results_arguments_and_parts(tmp_path: Path):
    solution = jit_alike(adaptive, field(), y0())
    assert solution.result == dfx.RESULTS.successful
    assert_parts(solution)
    ft.save(tmp_path / "x", solution)
    assert_alike(ft.restore(tmp_path / "x", solution), solution)

    def continued(field: Any, before: dfx.Solution) -> Any:
        states = {name: getattr(before, name) for name in STATES}
        return before.evaluate(0.5), adaptive(field, before.ys[-1], **states).ys

    jit_alike(continued, field(), solution)


def loss(field: Any, y: Array, adjoint: dfx.AbstractAdjoint) -> Array:
    def slope(t: Array, y: Array, field: Any) -> Array:
        return jax.vmap(field, (None, 0, None))(t, y, None)

    solver, options = dfx.Euler(), {"args": field, "adjoint": adjoint, "max_steps": 2}
    ys = dfx.diffeqsolve(dfx.ODETerm(slope), solver, 0.0, 1.0, 0.5, y, **options).ys
    return jnp.mean(ys**2)


def test_the_gradient_by_backsolve():
    """The adjoint is an argument too. That by checkpoints is in the training below."""
    jit_alike(
        ft.value_and_grad(loss),
        field(),
        jnp.stack([y0(), -y0()]),
        dfx.BacksolveAdjoint(),
        plain=eqx.filter_value_and_grad(loss),
        tolerance=1e-4,
    )


def test_noise_is_an_argument_and_a_result():
    def solve(noise: Any, y: Array) -> Any:
        terms = dfx.ControlTerm(lambda t, y, args: 0.1 * jnp.eye(2), noise)
        options = {"adjoint": dfx.ForwardMode(), "max_steps": 2}
        return dfx.diffeqsolve(terms, dfx.Euler(), 0.0, 1.0, 0.5, y, **options).ys, noise

    jit_alike(solve, dfx.UnsafeBrownianPath((2,), jax.random.key(0)), y0())


def test_a_neural_ode_is_trained_sharded():
    rules = ft.StateSharding({"**.mlp.layers.0.weight": ft.P("model"), ...: ft.P()})
    y, adjoint = jax.random.normal(jax.random.key(1), (8, 2)), dfx.RecursiveCheckpointAdjoint()

    def with_checkpoints(field: Any, y: Array) -> Array:
        return loss(field, y, adjoint)

    ts = train_alike(field(), with_checkpoints, optax.sgd(1e-2), y, rules, tolerance=1e-4)
    assert_lies(ts.model.mlp.layers[0].weight, "model")
