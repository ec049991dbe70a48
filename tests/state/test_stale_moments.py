"""A training state whose model was changed, and its moments were not."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array, Float

import functree as ft
from tests.lib.checks import raises


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


SGD = optax.sgd(1e-3)
HEADLINE = "apply_gradients: the optimizer's state was made for other parameters\n"
ANEW = "make the training state anew: `ft.TrainState.create(ts.model, ts.tx, wrt=ts.wrt, ...)`"
# What is done to the model ─► what the error says.
CHANGES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "another class": (
        lambda model: ft.select(model).at("first").set(Other(jnp.ones(4))),
        [
            "opt_state.0.trace.first.w   f32[4]\n      is of no parameter of",
            "opt_state.0.trace.first.v   f32[4]\n      is not there",
            f"Try: {ANEW}",
        ],
    ),
    "another size": (
        lambda model: ft.select(model).at("first.w").set(jnp.ones(5)),
        ["opt_state.0.trace.first.w   f32[4]\n      the parameter needs f32[5]"],
    ),
    "another static field": (
        lambda model: ft.select(model).at("first").set(Layer(jnp.ones(4), 0.5)),
        [
            "opt_state\n      has other fields that are no arrays than the model",
            "Try: change such a field in the moments too: `ft.select(ts).under(Layer).apply(...)`",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_alone(name: str, jitted: bool) -> None:
    change, texts = CHANGES[name]
    ts = make()
    stale = ft.select(ts).at("model").set(change(ts.model))
    grads = jax.tree.map(jnp.ones_like, stale.model)
    step = ft.jit(ft.apply_gradients) if jitted else ft.apply_gradients
    with raises(HEADLINE, *texts) as caught:
        step(stale, grads)
    assert isinstance(caught.value.__cause__, ValueError | TypeError)


def test_the_remedies() -> None:
    ts = make()
    both = ft.select(ts).under(Layer).apply(lambda layer: Layer(layer.w, 0.5))
    after = ft.apply_gradients(both, jax.tree.map(jnp.ones_like, both.model))
    assert after.model.first.rate == after.opt_state[0].trace.first.rate == 0.5
    changed = ft.select(ts.model).at("first").set(Other(jnp.ones(4)))
    anew = ft.TrainState.create(changed, ts.tx, wrt=ts.wrt)
    assert int(ft.apply_gradients(anew, jax.tree.map(jnp.ones_like, changed)).step) == 1


def failing(error: BaseException, init: Any = SGD.init) -> Any:
    def update(*_: Any, **__: Any) -> Any:
        raise error

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), ValueError("of a pytree"), TypeError("no"), KeyboardInterrupt(), ft.FunctreeError("x")],
    ids=repr,
)  # fmt: skip
def test_another_error_is_the_optimizer_s(error: BaseException) -> None:
    ts = make(failing(error))
    with pytest.raises(type(error)) as caught:
        ft.apply_gradients(ts, ts.model)
    assert caught.value is error


def test_an_optimizer_whose_state_cannot_be_made_in_a_trace() -> None:
    error = ValueError("no")
    ts = make(failing(error, lambda params: float(params.first.w.sum())))
    with pytest.raises(ValueError) as caught:
        ft.apply_gradients(ts, ts.model)
    assert caught.value is error
