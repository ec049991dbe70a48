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
from tests.lib.meshes import assert_lies
from tests.libraries.alike import jit_alike, train_alike


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
    layout = ft.FSDP("model", min_size=8, otherwise=ft.P())
    ts = train_alike(model(), loss, optax.adam(1e-2), batch(), layout, after=klax.apply)
    assert_lies(ts.model.layers[0].weight.parameter, None, "model")
