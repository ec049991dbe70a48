"""pdequinox: a neural operator, trained sharded."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pdequinox as pdeqx
from jax import Array

import functree as ft
from tests.lib.meshes import MESH, assert_lies, lay
from tests.libraries.alike import assert_alike


def loss(model: Any, x: Array) -> Array:
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


def test_an_operator_is_trained_sharded():
    """A Fourier neural operator."""
    sizes = {"hidden_channels": 4, "num_modes": 2, "num_blocks": 1}
    model, tx = pdeqx.arch.ClassicFNO(1, 1, 1, **sizes, key=jax.random.key(0)), optax.sgd(1e-2)
    layout = ft.FSDP("model", min_size=16, otherwise=ft.P())
    # Donated, and what is not sharded may be the model's own arrays.
    ts = ft.TrainState.create(ft.copy(model), tx, layout=layout, mesh=MESH)
    x = jax.random.normal(jax.random.key(1), (4, 1, 8))

    @ft.jit(rules=layout, donate="ts")
    def step(ts: Any, x: Array) -> Any:
        value, gradients = ft.value_and_grad(loss)(ts.model, x)
        return ft.apply_gradients(ts, gradients), value

    @eqx.filter_jit
    def plain(model: Any, state: Any, x: Array) -> Any:
        value, gradients = eqx.filter_value_and_grad(loss)(model, x)
        updates, state = tx.update(gradients, state)
        return eqx.apply_updates(model, updates), state, value

    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(2):
        ts, found = step(ts, lay(x, "data"))
        model, state, expected = plain(model, state, x)
        assert_alike(found, expected, 1e-4)
    assert_alike(ts.model, model, 1e-3)
    assert_lies(ts.model.blocks[0].spectral_conv.weights_real, None, "model")
    assert len(step.compilations) == 1
