"""klax: constrained models and its own step of training, which takes a tree as its leaves and its
treedef. It needs Python 3.12."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import klax
import optax
from jax import Array

import functree as ft
from tests.lib.meshes import MESH, assert_lies, lay
from tests.libraries.alike import assert_alike, jit_alike


def model() -> klax.nn.MLP:
    return klax.nn.MLP(2, 1, [8], weight_wrap=klax.NonNegative, key=jax.random.key(0))


def batch() -> tuple[Array, Array]:
    x = jax.random.normal(jax.random.key(1), (8, 2))
    return x, x[:, :1]


def loss(model: Any, batch: Any) -> Array:
    return klax.mse(model, batch, None)


def test_its_own_step_takes_leaves_and_a_treedef():
    tx = optax.with_extra_args_support(optax.adam(1e-2))
    opt_state = tx.init(eqx.filter(model(), eqx.is_inexact_array))
    state = klax.TrainingState(model(), opt_state, None, jnp.array(0))
    leaves, treedef = jax.tree.flatten(state)
    jit_alike(klax.make_step.__wrapped__, leaves, treedef, batch(), klax.mse, tx)


def test_a_constrained_model_is_trained_sharded():
    tx, layout = optax.adam(1e-2), ft.FSDP("model", min_size=8, otherwise=ft.P())
    ts = ft.TrainState.create(model(), tx, layout=layout, mesh=MESH)
    assert_lies(ts.model.layers[0].weight.parameter, None, "model")

    @ft.jit(rules=layout, donate="ts")
    def step(ts: Any, batch: Any) -> Any:
        value, gradients = ft.value_and_grad(loss)(ts.model, batch)
        ts = ft.apply_gradients(ts, gradients)
        return eqx.tree_at(lambda ts: ts.model, ts, klax.apply(ts.model)), value

    @eqx.filter_jit
    def plain(model: Any, state: Any, batch: Any) -> Any:
        value, gradients = eqx.filter_value_and_grad(loss)(model, batch)
        updates, state = tx.update(gradients, state)
        return klax.apply(eqx.apply_updates(model, updates)), state, value

    other, state = model(), tx.init(eqx.filter(model(), eqx.is_inexact_array))
    for _ in range(2):
        ts, found = step(ts, lay(batch(), "data"))
        other, state, expected = plain(other, state, batch())
        assert_alike(found, expected)
    assert_alike(ts.model, other)
    assert len(step.compilations) == 1
