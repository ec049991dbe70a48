"""Which parameters the leaves of an optimizer's state may belong to, and other shapes of parameters: against
literal ones."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import functree as ft
from functree.labels.leaves import Leaf
from functree.labels.optimizer.followed_parameters import STEPS, other_shapes, owners_of

Shape = tuple[int, ...]


def leaf(shape: Shape, stacked: int) -> Leaf:
    value = jax.ShapeDtypeStruct(shape, jnp.float32)
    return Leaf(ft.Path((len(shape),)), value, ft.Axes(*[None] * len(shape)), stacked=stacked)


# (shape, dimensions of stacks, step) of each parameter, and its other shape.
SHAPES: dict[str, list[tuple[Shape, int, int, Shape]]] = {
    "all different": [((4, 4, 8), 0, 1, (5, 6, 9)), ((1, 8), 0, 1, (2, 9))],
    "in the order of the sizes": [((127, 128), 0, 1, (129, 130)), ((8, 4), 0, 2, (10, 6))],
    "smaller": [((128, 127), 0, -1, (126, 125)), ((2, 1), 0, -1, (3, 4))],
    # All parameters have as many layers, which are the size of no other dimension.
    "a stack": [((3, 4, 8), 1, 1, (5, 6, 9)), ((3, 4), 1, 1, (5, 6)), ((3,), 0, 1, (4,))],
    "two stacks": [((3, 8), 1, 1, (4, 9)), ((6, 8), 1, 1, (7, 9))],
    "a stack of stacks": [((3, 3, 8), 2, 1, (4, 5, 9)), ((3, 8), 1, 1, (4, 9))],
}


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes(name: str):
    parameters = {ft.Path((i,)): leaf(case[0], case[1]) for i, case in enumerate(SHAPES[name])}
    steps = {ft.Path((i,)): case[2] for i, case in enumerate(SHAPES[name])}
    found = other_shapes(parameters, steps)
    assert list(found.values()) == [case[3] for case in SHAPES[name]]


def test_an_init_that_is_mapped_over_a_stack_can_be_planned():
    def init(params: Any) -> Any:
        return jax.vmap(optax.adafactor(1e-3, min_dim_size_to_factor=4).init)(params)

    tx = optax.GradientTransformation(init, optax.identity().update)
    layers = ft.stack(lambda key: ft.nn.Linear(8, 16, key=key), 3, jax.random.key(0))
    rules = ft.AxisRules({"embed": "data", "hidden": "model", "layers": None})
    # There is a count for each layer, and that belongs to no parameter.
    plan = ft.plan_optimizer(tx, layers, rules, {"data": 2, "model": 4}, otherwise=ft.P())
    assert plan["0.v_row.layer.weight"].spec == ft.P(None, "data")
    assert plan["0.v_col.layer.weight"].spec == ft.P(None, "model")
    assert plan["0.v.layer.bias"].spec == ft.P(None, "model")


# Owners

MANY = [f"layers.{i}.w" for i in range(STEPS + 1)]

# The paths of the parameters; for each path of the state, the parameters, the most likely one first.
OWNERS: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "of nothing": (["w"], {"count": [], "0.count": []}),
    "several leaves of one": (["w"], {"mu.w.row": ["w"], "mu.w.column": ["w"]}),
    "the longest path": (["w", "w.a"], {"mu.w": ["w"], "mu.w.a": ["w.a"]}),
    "one called as the state is, beside what is of nothing": (
        ["w", "mu"],
        {"0.count": [], "0.mu.w": ["w"], "0.mu.mu": ["mu"]},
    ),
    "one called as the end of another": (
        ["w", "a.w"],
        {"mu.w": ["w"], "mu.a.w": ["a.w", "w"]},
    ),
    "the shorter prefix of two that are as good": (["a", "b"], {"a.b": ["a", "b"]}),
    "of one half": (
        ["fast.w", "slow.w", "fast.b", "slow.b"],
        {"mu.w": ["fast.w", "slow.w"], "mu.b": ["fast.b", "slow.b"]},
    ),
    "the longest end": (
        ["x.a.w", "y.a.w", "z.b.w"],
        {"mu.a.w": ["x.a.w", "y.a.w"], "mu.c.w": ["x.a.w", "y.a.w", "z.b.w"]},
    ),
    "as many as sizes tell apart": (MANY[:-1], {"mu.w": MANY[:-1], "count": []}),
    "more than sizes tell apart": (MANY, {"mu.w": [], "count": []}),
}


def paths(several: list[str]) -> list[ft.Path]:
    return [ft.Path.parse(one) for one in several]


@pytest.mark.parametrize("case", OWNERS)
def test_owners(case: str) -> None:
    parameters, expected = OWNERS[case]
    found = owners_of(paths(list(expected)), paths(parameters))
    assert {str(path): list(map(str, owners)) for path, owners in found.items()} == expected
