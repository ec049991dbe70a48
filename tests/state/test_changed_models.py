"""A training state whose model was changed, and its moments were not: a note on the error."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array, Float

import functree as ft


class Layer(eqx.Module):
    w: Float[Array, "embed"]
    rate: float = eqx.field(static=True, default=1.0)


class Other(eqx.Module):
    v: Float[Array, "embed"]


class Net(eqx.Module):
    first: Layer | Other
    second: Layer


def make(tx: Any = None) -> ft.TrainState[Any]:
    model = Net(Layer(jnp.ones(4)), Layer(jnp.ones(4)))
    return ft.TrainState.create(model, tx or optax.sgd(1e-3, momentum=0.9))


NOTE = "Create a new training state: `ft.TrainState.create(ts.model, ts.tx, wrt=ts.wrt, ...)`"
# What is done to the model.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "another class": lambda model: ft.select(model).at("first").set(Other(jnp.ones(4))),
    "another size": lambda model: ft.select(model).at("first.w").set(jnp.ones(5)),
    "another static field": lambda model: ft.select(model).at("first").set(Layer(jnp.ones(4), 0.5)),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_the_error_of_the_optimizer_has_a_note(name: str, jitted: bool) -> None:
    ts = make()
    stale = ft.select(ts).at("model").set(CHANGES[name](ts.model))
    grads = jax.tree.map(jnp.ones_like, stale.model)
    step = ft.jit(ft.apply_gradients) if jitted else ft.apply_gradients
    with pytest.raises((TypeError, ValueError)) as caught:
        step(stale, grads)
    assert sum(NOTE in note for note in caught.value.__notes__) == 1


def test_the_remedies() -> None:
    ts = make()
    both = ft.select(ts).under(Layer).apply(lambda layer: Layer(layer.w, 0.5))
    after = ft.apply_gradients(both, jax.tree.map(jnp.ones_like, both.model))
    assert after.model.first.rate == after.opt_state[0].trace.first.rate == 0.5
    changed = ft.select(ts.model).at("first").set(Other(jnp.ones(4)))
    anew = ft.TrainState.create(changed, ts.tx, wrt=ts.wrt)
    assert int(ft.apply_gradients(anew, jax.tree.map(jnp.ones_like, changed)).step) == 1
