"""Gradients whose specs XLA's partitioner computes wrong numbers for, without a first constraint."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

import functree as ft
from functree.layout.layout import as_layout
from functree.placing.constrain import has_axis_rules

MESH = ft.make_mesh(a=2, b=2, c=2)
X = np.random.default_rng(0).normal(size=(8, 6, 8))
W = np.random.default_rng(1).normal(size=(8, 4, 8))


class Heads(eqx.Module):
    w: Float[Array, "embed heads head_dim"]

    def __call__(self, x: Array) -> Array:
        if not has_axis_rules():
            return jnp.einsum("ekh,bse->bskh", self.w, x)
        x = ft.constrain(x, "batch seq embed")
        # In this order: the gradient is a product of the result's gradient and the input.
        heads = jnp.einsum("ekh,bse->bskh", self.w, x)
        return ft.constrain(heads, "batch seq heads head_dim")


def rules(*pairs: tuple[str, str | tuple[str, ...] | None]) -> ft.AxisRules:
    return ft.AxisRules([("batch", "b"), *pairs, (..., None)])


LAYOUTS: dict[str, ft.Layout] = {
    "one mesh axis in two names": (
        rules(("embed", ("a", "c")), ("heads", "c"), ("heads", None)) | ft.FSDP("b", min_size=0)
    ),
    "in two names, and not in the parameter": ft.StateSharding(
        {"w": P(None, "b"), ...: rules(("embed", ("a", "c")), ("heads", "c"))}
    ),
    "in another order than in the mesh": (rules(("embed", ("c", "a"))) | ft.FSDP("b", min_size=0)),
    "of the heads": (
        rules(("heads", ("a", "c")), ("embed", "c"), ("embed", None)) | ft.FSDP("b", min_size=0)
    ),
    "a rule that falls back to the mesh axis of the batch": rules(
        ("embed", ("a", "c")), ("heads", "c"), ("heads", "b")
    ),
    "specs, of which nobody says what is summed over": as_layout(P(("a", "c"), "b")),
    "tensor and FSDP": rules(("heads", "c")) | ft.FSDP("b", min_size=0),
}


def loss(model: Heads, x: Float[Array, "batch seq embed"]) -> Array:
    return jnp.mean(jnp.sin(model(x)) ** 2)


def gradient(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    heads = np.einsum("ekh,bse->bskh", w, x)
    return np.einsum("bskh,bse->ekh", np.sin(2 * heads), x) / heads.size


# Each function that lays out a gradient.
DOORS: dict[str, Callable[[ft.Layout], Callable[..., Any]]] = {
    "grad": lambda layout: ft.grad(loss),
    "grad, layout=": lambda layout: ft.grad(loss, layout=layout),
    "accumulate, layout=": lambda layout: ft.accumulate(ft.grad(loss, layout=layout), 2),
    "accumulate, over=": lambda layout: ft.accumulate(ft.grad(loss), 2, over="b"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_device(name: str, door: str) -> None:
    layout = LAYOUTS[name]
    model = ft.shard(Heads(jnp.asarray(W, jnp.float32)), layout, MESH)
    x = ft.shard(jnp.asarray(X, jnp.float32), P("b"), MESH)
    compute = ft.jit(DOORS[door](layout), rules=layout, mesh=MESH)
    found = compute(model, x)
    assert found.w.sharding == model.w.sharding
    expected = gradient(W, X)
    np.testing.assert_allclose(found.w, expected, rtol=2e-4, atol=2e-4 * abs(expected).max())
