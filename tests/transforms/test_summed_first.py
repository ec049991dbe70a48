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
from functree.labels.leaves import read
from functree.layout.layout import as_layout
from functree.placing.ambient import has_axis_rules
from functree.transforms.grad.parameters import SummedFirst

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


# The layout, and what the gradient is constrained to first.
LAYOUTS: dict[str, tuple[ft.Layout, P | None]] = {
    "one mesh axis in two names": (
        rules(("embed", ("a", "c")), ("heads", "c"), ("heads", None)) | ft.FSDP("b", min_size=0),
        P(("a", "c"), None, None),
    ),
    "in two names, and not in the parameter": (
        ft.StateSharding({"w": P(None, "b"), ...: rules(("embed", ("a", "c")), ("heads", "c"))}),
        P(None, None, None),
    ),
    "in another order than in the mesh": (
        rules(("embed", ("c", "a"))) | ft.FSDP("b", min_size=0),
        P(("c", "a"), None, None),
    ),
    "of the heads": (
        rules(("heads", ("a", "c")), ("embed", "c"), ("embed", None)) | ft.FSDP("b", min_size=0),
        P(None, ("a", "c"), None),
    ),
    "a rule that falls back to the mesh axis of the batch": (
        rules(("embed", ("a", "c")), ("heads", "c"), ("heads", "b")),
        P(("a", "c"), None, None),
    ),
    "specs, of which nobody says what is summed over": (
        as_layout(P(("a", "c"), "b")), P("a", "b", None),
    ),
    # What is right without: nothing is added.
    "tensor and FSDP": (rules(("heads", "c")) | ft.FSDP("b", min_size=0), None),
    "FSDP over two mesh axes": (
        ft.AxisRules({"batch": ("a", "b"), "heads": "c", ...: None}) | ft.FSDP(("a", "b"), min_size=0),
        None,
    ),
    "two mesh axes, and no FSDP": (rules(("embed", ("a", "c")), ("heads", "c"), ("heads", None)), None),
}  # fmt: skip


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
    layout, _ = LAYOUTS[name]
    model = ft.shard(Heads(jnp.asarray(W, jnp.float32)), layout, MESH)
    x = ft.shard(jnp.asarray(X, jnp.float32), P("b"), MESH)
    compute = ft.jit(DOORS[door](layout), rules=layout, mesh=MESH)
    found = compute(model, x)
    assert found.w.sharding == model.w.sharding
    expected = gradient(W, X)
    np.testing.assert_allclose(found.w, expected, rtol=2e-4, atol=2e-4 * abs(expected).max())


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_summed_first(name: str) -> None:
    layout, first = LAYOUTS[name]
    model = Heads(jnp.asarray(W))
    (leaf,) = read(model).leaves
    wanted = ft.plan(model, layout, MESH)["w"].spec
    assert SummedFirst([as_layout(layout)], MESH).spec(leaf, wanted) == first
