"""Gradients that are laid out without a trace, of losses whose gradients are on no mesh by
themselves."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

import functree as ft
from tests.lib.meshes import MESH

P = ft.P
RULES = ft.AxisRules({"embed": None, "hidden": "model"})


class Dense(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


PLAIN = Dense(jnp.arange(32.0).reshape(4, 8), jnp.ones(8))
MODEL = ft.shard(PLAIN, RULES, MESH)
X = jnp.ones((8, 4))

Loss = Callable[[Dense, Array], Array]
LOSSES: dict[str, Loss] = {
    "linear": lambda m, x: m.w.sum() + 2 * m.b.sum(),
    "affine": lambda m, x: (x @ m.w).sum() + m.b.sum(),
    "of one only": lambda m, x: (m.w**2).sum(),
    "quadratic": lambda m, x: (m.w**2).sum() + (m.b**2).sum(),
}


def beside(m: Dense) -> Array:
    """The batch on all devices of the model."""
    return jax.device_put(X, NamedSharding(m.w.sharding.mesh, P()))  # pyright: ignore


# A way to a gradient with the structure of the model.
Way = Callable[[Loss, Dense, Any], Any]


def ambient(loss: Loss, m: Dense, layout: Any) -> Any:
    with ft.axis_rules(layout):
        return ft.grad(loss)(m, X)


WAYS: dict[str, Way] = {
    "grad": lambda f, m, layout: ft.grad(f, layout=layout)(m, X),
    "value_and_grad": lambda f, m, layout: ft.value_and_grad(f, layout=layout)(m, X)[1],
    "accumulate": lambda f, m, layout: jax.tree.map(
        lambda g, like: g * (2 if f is LOSSES["affine"] and like.ndim == 2 else 1),
        ft.accumulate(ft.grad(f, layout=layout), 2)(m, beside(m)),
        m,
    ),
    "ambient": ambient,
    "jvp": lambda f, m, layout: jax.jvp(lambda m: ft.grad(f, layout=layout)(m, X), (m,), (m,))[0],
    "vjp": lambda f, m, layout: jax.vjp(lambda m: ft.grad(f, layout=layout)(m, X), m)[0],
    "jit": lambda f, m, layout: jax.jit(ft.grad(f, layout=layout))(m, X),
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_laid_out(way: str, kind: str):
    gradient = WAYS[way](LOSSES[kind], MODEL, RULES)
    expected = jax.grad(LOSSES[kind])(PLAIN, X)
    for one, other, like in zip(*map(jax.tree.leaves, (gradient, expected, MODEL)), strict=True):
        assert one.sharding.is_equivalent_to(like.sharding, one.ndim)
        np.testing.assert_allclose(one, other)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("model", [MODEL, PLAIN], ids=["placed", "not placed"])
def test_under_an_eager_vmap(kind: str, model: Dense):
    """The type of a gradient may name a mesh that JAX has cached for the other model."""
    gradient = jax.vmap(lambda x: ft.grad(LOSSES[kind], layout=RULES)(model, x))(jnp.stack([X, X]))
    assert gradient.w.shape == (2, 4, 8)
    if model is MODEL:
        assert gradient.w.sharding.spec == P(None, None, "model")


def test_of_models_that_are_stacked():
    models = jax.tree.map(lambda x: jnp.stack([x, x]), MODEL)
    gradient = jax.vmap(lambda m: ft.grad(LOSSES["linear"], layout=RULES)(m, X))(models)
    assert gradient.b.sharding.spec == P(None, "model")


def test_a_parameter_beside_placed_ones():
    """By itself its gradient is placed; an eager transform hides the devices."""
    mixed = eqx.tree_at(lambda m: m.b, MODEL, jnp.ones(8))

    def gradient(m: Dense) -> Any:
        return ft.grad(LOSSES["linear"], layout=RULES)(m, X)

    assert gradient(mixed).b.sharding.spec == P("model")
    found = jax.vjp(gradient, mixed)[0]
    assert found.w.sharding.spec == P(None, "model") and found.b.tolist() == [2.0] * 8
    with jax.set_mesh(MESH):
        assert jax.vjp(gradient, mixed)[0].b.sharding.spec == P("model")
    assert jax.jit(gradient)(mixed).b.sharding.spec == P("model")
