"""pdequinox: a neural operator, trained sharded."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pdequinox as pdeqx
from jax import Array

import functree as ft
from tests.lib.meshes import assert_lies
from tests.libraries.alike import train_alike


def loss(model: Any, x: Array) -> Array:
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


def test_an_operator_is_trained_sharded():
    """A Fourier neural operator."""
    sizes = {"hidden_channels": 4, "num_modes": 2, "num_blocks": 1}
    model = pdeqx.arch.ClassicFNO(1, 1, 1, **sizes, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 1, 8))
    layout = ft.FSDP("model", min_size=16, otherwise=ft.P())
    ts = train_alike(model, loss, optax.sgd(1e-2), x, layout, tolerance=1e-4)
    assert_lies(ts.model.blocks[0].spectral_conv.weights_real, None, "model")
