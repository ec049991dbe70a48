"""The sizes of each axis, and those axes with several in one module."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array, Float

import functree as ft
from tests.lib.meshes import SIZES

RULES = ft.AxisRules({...: None}, names=ft.equinox_names)
HEADLINE = "axes with several sizes in one module (are their names transposed?):"
KEY = jax.random.key(0)


class Pair(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]


class Swapped(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "embed hidden"]


class Layers(eqx.Module):
    up: ft.nn.Linear
    down: ft.nn.Linear


class Listed(eqx.Module):
    weights: list[Float[Array, "embed hidden"]]


class Gated(eqx.Module):
    mlp: Swapped
    gate: Float[Array, "embed hidden"]


class Square(eqx.Module):
    w: Float[Array, "embed embed"]


UP, DOWN = jax.ShapeDtypeStruct((8, 32), jnp.float32), jax.ShapeDtypeStruct((32, 8), jnp.float32)
SWAPPED = ["embed: 8 in up, 32 in down", "hidden: 32 in up, 8 in down"]


CASES: dict[str, tuple[Any, list[str]]] = {
    "right": (Pair(UP, DOWN), []),
    "transposed": (Swapped(UP, DOWN), SWAPPED),
    "another in a list": (
        [Pair(UP, DOWN), Swapped(UP, DOWN)],
        ["embed: 8 in *.up, 32 in *.down", "hidden: 32 in *.up, 8 in *.down"],
    ),
    "weights of two layers": (
        Layers(ft.nn.Linear(8, 32, key=KEY), ft.nn.Linear(32, 8, key=KEY)),
        [
            "embed: 8 in up.weight, 32 in down.weight",
            "hidden: 32 in up.weight, up.bias, 8 in down.weight, down.bias",
        ],
    ),
    "layers one after another": (eqx.nn.MLP(4, 8, 16, 2, key=KEY), []),
    "elements of a list": (Listed([UP, DOWN]), []),
    "twice in one array": (Square(UP), ["embed: 8 in w, 32 in w"]),
    "names of one layer each": (
        {"up": eqx.nn.Linear(8, 16, key=KEY), "down": eqx.nn.Linear(16, 8, key=KEY)}, [],
    ),
    "where they are nearest to each other": (
        Gated(Swapped(UP, DOWN), jax.ShapeDtypeStruct((8, 16), jnp.float32)),
        ["embed: 8 in mlp.up, 32 in mlp.down", "hidden: 32 in mlp.up, 8 in mlp.down"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_the_text_ends_with(case: str) -> None:
    tree, lines = CASES[case]
    plan = ft.plan(tree, RULES, SIZES)
    text = str(plan)
    assert (HEADLINE in text) is bool(lines)
    if lines:
        assert text.splitlines()[-len(lines) - 1 :] == [HEADLINE, *lines]
        assert lines[0] in plan.html()


def test_the_moments_of_an_optimizer_are_not_told_again() -> None:
    swapped = Swapped(jnp.ones((8, 32)), jnp.ones((32, 8)))
    state = jax.eval_shape(lambda: ft.TrainState.create(swapped, optax.adam(0.1)))
    lines = ["embed: 8 in model.up, 32 in model.down", "hidden: 32 in model.up, 8 in model.down"]
    assert str(ft.plan(state, RULES, SIZES)).splitlines()[-2:] == lines


def test_no_more_lines_than_can_be_read() -> None:
    shape = jax.ShapeDtypeStruct
    many = [Swapped(shape((8, n), jnp.float32), shape((n, 8), jnp.float32)) for n in range(10, 20)]
    lines = str(ft.plan(many, RULES, SIZES)).splitlines()
    assert lines[-10] == HEADLINE and lines[-1] == "and 12 more, all in `.axis_sizes`"


def test_axis_sizes() -> None:
    plan = ft.plan(Swapped(UP, DOWN), RULES, SIZES)
    up, down = ft.Path("up"), ft.Path("down")
    assert plan.axis_sizes == {"embed": {8: (up,), 32: (down,)}, "hidden": {32: (up,), 8: (down,)}}
    assert ft.Plan.from_json(plan.to_json()).axis_sizes == plan.axis_sizes
    assert ft.plan(Square(UP), RULES, SIZES).axis_sizes == {
        "embed": {8: (ft.Path("w"),), 32: (ft.Path("w"),)}
    }
