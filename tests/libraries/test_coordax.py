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
from tests.libraries.alike import assert_alike, assert_parts, jit_alike, train_alike

X = cx.LabeledAxis("x", np.linspace(0.0, 1.0, 8))
Y = cx.SizedAxis("y", 4)
RULES = ft.StateSharding({"forcing.**": ft.P("model"), ...: ft.P()})


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


def test_fields_are_trained_sharded(tmp_path: Path):
    assert ft.plan(model(), RULES, SIZES)["forcing.0.0"].spec == ft.P("model", None)
    ts = train_alike(model(), loss, optax.adam(1e-2), state(), RULES, spec=ft.P())
    assert_lies(ts.model.forcing.data, "model")
    assert_lies(ts.opt_state[0].mu.forcing.data, "model")
    ft.save(tmp_path / "x", ts)
    assert_alike(ft.restore(tmp_path / "x", ts), ts)


def test_fields_are_made_sharded():
    made = ft.init(Diffusion.create, RULES, mesh=MESH)(jax.random.key(0))
    assert_lies(made.forcing.data, "model")
    assert_alike(made, model())
