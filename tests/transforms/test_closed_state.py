"""Donated state keeps its shardings wherever it stands in the result."""

from itertools import permutations
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import raises
from tests.lib.covering import selected_cells
from tests.lib.meshes import EXPLICIT, MESH

P = ft.P


class Model(eqx.Module):
    up: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]
    act: Any = jnp.tanh


LAYOUT = ft.StateSharding({"up": P("data", "model"), "bias": P("model")})
X = jnp.ones((4, 8))


def make_model() -> Model:
    return Model(jnp.ones((8, 16)), jnp.zeros(16))


def loss(model: Model, x: Array) -> Array:
    return jnp.mean(model.act(x @ model.up + model.bias[None]) ** 2)


def specs(model: Any) -> tuple[P, P]:
    return model.up.sharding.spec, model.bias.sharding.spec


def lying(mesh: Any) -> tuple[Any, Any]:
    return ft.shard(make_model(), LAYOUT, mesh), ft.shard(X, P(), mesh)


WANTED = (P("data", "model"), P("model"))


ORDERS = selected_cells(list(permutations(["loss", "grads", "model", "state"])))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_in_any_order_beside_gradients(order: tuple[str, ...]):
    """Gradients have the form of the model: None in the place of its function makes no difference."""
    tx = optax.adam(1e-2)

    def step(model: Model, state: Any, x: Array) -> Any:
        value, grads = eqx.filter_value_and_grad(loss)(model, x)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(grads, state)
        found = {"loss": value, "grads": grads, "model": eqx.apply_updates(model, updates)}
        return tuple({**found, "state": state}[name] for name in order)

    model, x = lying(MESH)
    state = ft.init_optimizer(tx, model, LAYOUT, MESH)
    run = ft.jit(step, donate=("model", "state"))
    for _ in range(3):
        result = dict(zip(order, run(model, state, x), strict=True))
        model, state = result["model"], result["state"]
        assert specs(model) == specs(result["grads"]) == WANTED
        assert specs(state[0].mu) == specs(state[0].nu) == WANTED
    assert len(run.compilations) == 1


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_a_part_that_stands_twice(mesh: Any):
    model, x = lying(mesh)

    def twice(model: Model, x: Array) -> Any:
        new = jax.tree.map(lambda one: 2 * one if eqx.is_array(one) else one, model)
        return {"new": new, "list": [new, jnp.sum(x)], "bare": new.bias}

    found = ft.jit(twice, donate="model")(model, x)
    assert specs(found["new"]) == specs(found["list"][0]) == WANTED


def test_several_arguments_that_are_sharded_differently():
    (one, x), other = lying(MESH), ft.shard(make_model(), P(), MESH)

    def step(a: Model, b: Model, x: Array) -> Any:
        return {"grads": ft.grad(loss)(a, x), "new": [a, b]}

    with raises(
        "step: it is not known which shardings 3 parts of the result should keep",
        "grads, new.0, new.1",
        "has the structure of the donated arguments `a`, `b`, which are sharded differently",
        "Try: write `out_shardings=`",
        error=ft.ShardingError,
    ):
        ft.jit(step, donate=("a", "b"))(one, other, x)
    # The remedy, which may say it for some parts.
    layouts = {"grads": LAYOUT, "new": [LAYOUT, P()]}
    found = ft.jit(step, donate=("a", "b"), out_shardings=layouts)(one, other, x)
    assert specs(found["grads"]) == specs(found["new"][0]) == WANTED
    assert found["new"][1].up.sharding.is_fully_replicated
    # Nothing is asked where they are sharded alike, or no part has the form.
    one, two = (lying(MESH)[0] for _ in range(2))
    first, second = ft.jit(lambda a, b: (b, a), donate=("a", "b"))(one, two)
    assert specs(first) == specs(second) == WANTED
    one, _ = lying(MESH)
    other = ft.shard(make_model(), P(), MESH)
    assert ft.jit(lambda a, b: a.bias + b.bias, donate=("a", "b"))(one, other).shape == (16,)
