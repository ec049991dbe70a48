"""At every door that takes `wrt=`, a filter that matches nothing is an error, and so is a pattern in
it that does."""

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
from tests.lib.meshes import MESH

RULES = ft.AxisRules({"hidden": "model", "embed": None})
TX = optax.adam(0.1)


class Layer(eqx.Module):
    up: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]


class Other(eqx.Module):
    key: Float[Array, "embed"]


M = Layer(jnp.ones((4, 8)), jnp.ones(8))


def loss(m: Layer) -> Float[Array, ""]:
    return m.up.sum() + m.bias.sum()


DOORS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda wrt: jax.eval_shape(ft.grad(loss, wrt=wrt), M),
    "value_and_grad": lambda wrt: jax.eval_shape(ft.value_and_grad(loss, wrt=wrt), M),
    "plan_optimizer": lambda wrt: ft.plan_optimizer(TX, M, RULES, MESH, wrt=wrt),
    "init_optimizer": lambda wrt: ft.init_optimizer(TX, M, RULES, MESH, wrt=wrt),
    "TrainState": lambda wrt: ft.TrainState.create(M, TX, wrt=wrt),
}
FILTERS: dict[str, tuple[Any, str | None]] = {
    "right": ("**.bias", None),
    "a class that is not there, negated": (~ft.under(Other), None),
    "a typo": ("**.bais", "glob('**.bais')"),
    "a typo, negated": (~ft.glob("**.bais"), "glob('**.bais')"),
    "a class": (Other, "Other"),
    "a function": (lambda path, leaf: leaf.ndim == 9, "<lambda>"),
    "None": (None, "None is not a filter"),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", FILTERS)
def test_wrt(door: str, case: str) -> None:
    wrt, told = FILTERS[case]
    if told is None:
        DOORS[door](wrt)
        return
    with pytest.raises(ft.FunctreeError) as error:
        DOORS[door](wrt)
    text = str(error.value)
    assert told.strip("<>") in text and ("matches" in text or wrt is None)


def test_what_is_frozen_by_a_misspelled_pattern() -> None:
    with raises(
        "wrt=~glob('bais'): glob('bais') matches no leaf of argument 0; did you mean `bias`?",
        error=ft.RuleError,
    ):
        jax.eval_shape(ft.grad(loss, wrt=~ft.glob("bais")), M)
    # As the text says.
    assert jax.eval_shape(ft.grad(loss, wrt=~ft.glob("bias")), M).bias is None


def test_a_pattern_for_one_of_several_arguments() -> None:
    def both(m: Layer, other: Other) -> Float[Array, ""]:
        return loss(m) + other.key.sum()

    gradient = ft.grad(both, ft.glob("up") | ft.glob("key"), (0, 1))
    jax.eval_shape(gradient, M, Other(jnp.ones(4)))
    with raises("glob('kye') matches no leaf of argument 0, 1; did you mean `key`?"):
        jax.eval_shape(ft.grad(both, ft.glob("up") | "key" | "kye", (0, 1)), M, Other(jnp.ones(4)))
