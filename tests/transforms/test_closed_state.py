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
from tests.lib.meshes import MESH

P = ft.P


class Model(eqx.Module):
    up: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]
    act: Any = jnp.tanh


LAYOUT = ft.StateSharding({"up": P("data", "model"), "bias": P("model")})
X = ft.shard(jnp.ones((4, 8)), P(), MESH)


def lying(layout: Any = LAYOUT) -> Model:
    return ft.shard(Model(jnp.ones((8, 16)), jnp.zeros(16)), layout, MESH)


def loss(model: Model, x: Array) -> Array:
    return jnp.mean(model.act(x @ model.up + model.bias[None]) ** 2)


def specs(model: Any) -> tuple[P, P]:
    return model.up.sharding.spec, model.bias.sharding.spec


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

    model = lying()
    state = ft.init_optimizer(tx, model, LAYOUT, MESH)
    run = ft.jit(step, donate=("model", "state"))
    for _ in range(3):
        result = dict(zip(order, run(model, state, X), strict=True))
        model, state = result["model"], result["state"]
        assert specs(model) == specs(result["grads"]) == WANTED
        assert specs(state[0].mu) == specs(state[0].nu) == WANTED
    assert len(run.compilations) == 1


def test_several_arguments_that_are_sharded_differently():
    one, other = lying(), lying(P())

    def step(a: Model, b: Model, x: Array) -> Any:
        return {"grads": ft.grad(loss)(a, x), "new": [a, b]}

    with raises(
        "step: the shardings of 3 parts of the result are ambiguous",
        "grads, new.0, new.1",
        "has the structure of the donated arguments `a`, `b`, which are sharded differently",
        "Try: pass `out_shardings=`",
        error=ft.ShardingError,
    ):
        ft.jit(step, donate=("a", "b"))(one, other, X)
    # The remedy, which may say it for some parts.
    layouts = {"grads": LAYOUT, "new": [LAYOUT, P()]}
    found = ft.jit(step, donate=("a", "b"), out_shardings=layouts)(one, other, X)
    assert specs(found["grads"]) == specs(found["new"][0]) == WANTED
    assert found["new"][1].up.sharding.is_fully_replicated
    # Nothing is asked where they are sharded alike.
    first, second = ft.jit(lambda a, b: (b, a), donate=("a", "b"))(lying(), lying())
    assert specs(first) == specs(second) == WANTED
