"""coordax: fields, whose class checks what it is built with, as parameters, arguments and
results."""

from pathlib import Path
from typing import Any

import coordax as cx
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import functree as ft
from tests.lib.meshes import MESH, SIZES, assert_lies
from tests.libraries.alike import assert_alike, assert_parts, jit_alike

X = cx.LabeledAxis("x", np.linspace(0.0, 1.0, 8))
Y = cx.SizedAxis("y", 4)


class Diffusion(eqx.Module):
    """A step of a small model of the atmosphere: parameters that have coordinates."""

    forcing: cx.Field
    rates: dict[str, cx.Field]
    mix: eqx.nn.Linear

    @classmethod
    def create(cls, key: Array) -> "Diffusion":
        forcing = jax.random.normal(key, (8, 4))
        rates = {"slow": cx.field(jnp.ones(8), X), "fast": cx.field(jnp.float32(2.0))}
        return cls(cx.field(forcing, X, Y), rates, eqx.nn.Linear(4, 4, key=key))

    def __call__(self, u: cx.Field) -> cx.Field:
        mixed = cx.cmap(self.mix)(u.untag("y")).tag("y")
        return mixed * self.rates["slow"] + self.forcing * self.rates["fast"]


def model() -> Diffusion:
    return Diffusion.create(jax.random.key(0))


def state() -> cx.Field:
    return cx.field(jnp.arange(32.0).reshape(8, 4) / 32, X, Y)


def loss(model: Diffusion, u: cx.Field) -> Array:
    return jnp.mean(model(u).data ** 2)


def fields() -> dict[str, Any]:
    return {
        "model": model(),
        "name only": cx.field(jnp.ones((8, 2)), "time", None),
        "scalar": cx.field(jnp.float32(1.0)),
        "with coordinates": state(),
    }


def test_fields_are_arguments_results_and_parts():
    found = jit_alike(lambda fields: jax.tree.map(lambda x: 2 * x, fields), fields())
    assert jax.tree.structure(found) == jax.tree.structure(fields())
    assert_parts(found)
    static, some, others = ft.split(found, ft.has_ndim(2), ...)
    assert_alike(ft.merge(static, some, others), found)


def test_a_step_and_its_gradient():
    jit_alike(ft.value_and_grad(loss), model(), state(), plain=eqx.filter_value_and_grad(loss))


def test_training_beside_plain_steps(tmp_path: Path):
    tx = optax.adam(1e-2)
    rules = ft.StateSharding({"forcing.**": ft.P("model"), ...: ft.P()})
    assert ft.plan(model(), rules, SIZES)["forcing.0.0"].spec == ft.P("model", None)
    ts = ft.TrainState.create(model(), tx, layout=rules, mesh=MESH)
    assert_lies(ts.model.forcing.data, "model")
    assert_lies(ts.opt_state[0].mu.forcing.data, "model")

    @ft.jit(rules=rules, donate="ts")
    def step(ts: Any, u: cx.Field) -> Any:
        value, gradients = ft.value_and_grad(loss)(ts.model, u)
        return ft.apply_gradients(ts, gradients), value

    @eqx.filter_jit
    def plain(model: Any, opt_state: Any, u: cx.Field) -> Any:
        value, gradients = eqx.filter_value_and_grad(loss)(model, u)
        updates, opt_state = tx.update(gradients, opt_state)
        return eqx.apply_updates(model, updates), opt_state, value

    u = ft.shard(state(), ft.P(), MESH)
    other, opt_state = model(), tx.init(eqx.filter(model(), eqx.is_array))
    for _ in range(2):
        ts, found = step(ts, u)
        other, opt_state, expected = plain(other, opt_state, state())
        assert_alike(found, expected)
    assert_alike(ts.model, other)
    assert len(step.compilations) == 1
    ft.save(tmp_path / "x", ts)
    assert_alike(ft.restore(tmp_path / "x", ts), ts)


def test_the_state_of_an_optimizer_is_planned_and_made():
    rules, tx = ft.StateSharding({"forcing.**": ft.P("model"), ...: ft.P()}), optax.adam(1e-2)
    plan = ft.plan_optimizer(tx, model(), rules, SIZES)
    assert plan["0.mu.forcing.0.0"].spec == ft.P("model", None)
    made = ft.init_optimizer(tx, model(), rules, MESH)
    assert_lies(made[0].mu.forcing.data, "model")


def test_a_step_over_fields_is_closed():
    def step(model: Diffusion, u: cx.Field) -> Any:
        return model, model(u)

    ft.testing.assert_closed(ft.jit(step, donate="model"), (model(), state()))


def test_fields_are_made_sharded():
    rules = ft.StateSharding({"forcing.**": ft.P("model"), ...: ft.P()})
    made = ft.init(Diffusion.create, rules, mesh=MESH)(jax.random.key(0))
    assert_lies(made.forcing.data, "model")
    assert_alike(made, model())
