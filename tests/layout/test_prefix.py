"""Prefix trees of layouts: which layout stands over which leaves, and what a wrong one says."""

from collections import OrderedDict
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import functree as ft
from functree.layout.layout import broadcast
from functree.tree.nodes import children
from tests.lib.meshes import SIZES
from tests.lib.trees import Pair

P = PartitionSpec


class Model(eqx.Module):
    w: Float[Array, "embed hidden"]
    name: str
    width: int = eqx.field(static=True)


def x(*shape: int) -> Array:
    return jnp.ones(shape or (4,))


def specs(tree: Any, layout: Any) -> dict[str, P]:
    return {str(row.path): row.spec for row in ft.plan(tree, layout, SIZES)}


TREES: dict[str, tuple[Any, Any, dict[str, P]]] = {
    "a leaf": (x(), P("data"), {"": P("data")}),
    "one for all": ({"a": x(), "b": [x()]}, P("data"), {"a": P("data"), "b.0": P("data")}),
    "dict": ({"a": x(), "b": x()}, {"a": P("data"), "b": P()}, {"a": P("data"), "b": P(None)}),
    "down to any depth": (
        {"a": [x(), x()], "b": {"c": x(), "d": x()}},
        {"a": P("data"), "b": {"c": P("model"), "d": P()}},
        {"a.0": P("data"), "a.1": P("data"), "b.c": P("model"), "b.d": P(None)},
    ),
    "list": ([x(), x()], [P("data"), P()], {"0": P("data"), "1": P(None)}),
    "tuple": ((x(), x()), (P("data"), P()), {"0": P("data"), "1": P(None)}),
    "named tuple": (
        Pair(x(), [x()]),
        Pair(P("data"), P()),
        {"left": P("data"), "right.0": P(None)},
    ),
    "module": (Model(x(4, 8), "m", 3), Model(P("data"), None, 3), {"w": P("data", None)}),  # type: ignore[arg-type]
    "None for None": ({"a": None, "b": x()}, {"a": None, "b": P("data")}, {"b": P("data")}),
    "a layout over None": ({"a": None, "b": x()}, {"a": P("data"), "b": P()}, {"b": P(None)}),
    "empty": ({}, {}, {}),
}


@pytest.mark.parametrize("case", TREES)
def test_a_prefix(case: str) -> None:
    tree, layout, expected = TREES[case]
    assert specs(tree, layout) == expected


def test_the_specs_of_a_plan_are_such_a_tree() -> None:
    tree = {"m": Model(x(4, 8), "m", 3), "l": [x(), None, 3]}
    plan = ft.plan(tree, {"m": P("data", "model"), "l": P("model")}, SIZES)
    again = ft.plan(tree, plan.specs, SIZES)
    assert [row.spec for row in again] == [row.spec for row in plan]


def test_every_kind_of_layout_in_one_tree() -> None:
    tree = (Model(x(4, 8), "m", 3), x(8, 4), {"bias": x()}, x(4), x(8, 8))
    layout = (
        ft.AxisRules({"embed": "data", "hidden": "model"}), P("model"), ft.StateSharding({"bias": P("data")}),
        lambda path, leaf: P("model"), ft.FSDP("data", min_size=0) | ft.FSDP("model", min_size=0),
    )  # fmt: skip
    assert list(specs(tree, layout).values()) == [
        P("data", "model"),
        P("model", None),
        P("data"),
        P("model"),
        P("data", "model"),
    ]


def test_paths_start_below_the_layout() -> None:
    tree = {"model": {"w": x(), "b": x()}, "other": {"w": x()}}
    layout = ft.StateSharding({"w": P("data"), ...: P()})
    assert specs(tree, {"model": layout, "other": P("model")})["model.w"] == P("data")
    with pytest.raises(ft.ShardingError, match="filter 'w'\n      matches no leaf"):
        ft.plan(tree, layout, SIZES)  # now the path is `model.w`


WRONG: dict[str, tuple[Any, Any, str]] = {
    "another key": (
        {"a": x()},
        {"b": P()},
        "at the root: `b` is only in the layouts; `a` is only in the tree: a tree of layouts has the keys of the tree",
    ),
    "a key too few": (
        {"a": x(), "b": x()},
        {"a": P()},
        "at the root: `b` is only in the tree: a tree of layouts",
    ),
    "a long list": (
        {"l": [x()]},
        {"l": [P()] * 3},
        "at `l`: `1`, `2` are only in the layouts: a tree of layouts",
    ),
    "many keys": (
        {},
        {str(i): P() for i in range(9)},
        '"4"`, `"5"` and 3 more are only in the layouts: a tree',
    ),
    "another order": (
        {"o": OrderedDict(a=x(), b=x())},
        {"o": OrderedDict(b=P(), a=P("data"))},
        "at `o`: the layouts have the keys of the tree in another order: `b`, `a` instead of `a`, `b`",
    ),
    "another kind": ([x()], (P(),), "at the root: the layouts are a tuple and the tree is a list"),
    "deeper": (
        {"a": [x()]},
        {"a": {"b": P()}},
        "at `a`: the layouts are a dict and the tree is a list",
    ),
    "below a leaf": (
        {"a": x()},
        {"a": [P()]},
        "at `a`: the layouts are a list and the tree is a leaf",
    ),
    "below None": (
        {"a": None},
        {"a": {"b": P()}},
        "at `a`: the layouts are a dict and the tree is a leaf",
    ),
    "no layout": ({"a": x()}, {"a": 3}, "at `a`: 3 is not a layout: write `P(...)`, "),
    "no tree of layouts": (
        {"a": x()},
        {"a": 3},
        "or a callable (path, leaf) -> P, or a tree of these",
    ),
    "a text": ({"a": [x()]}, {"a": ["data"]}, "at `a.0`: 'data' is not a layout"),
    "no layout at all": (x(), 3, "at the root: 3 is not a layout"),
    "an invalid spec": ({"a": x()}, {"a": P(3)}, "at `a`: P(3): 3 is neither a mesh axis"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_a_tree_of_layouts_has_the_structure_of_the_tree(case: str) -> None:
    tree, layout, said = WRONG[case]
    with pytest.raises(ft.RuleError) as caught:
        ft.plan(tree, layout, SIZES)
    assert said in str(caught.value)


def test_each_part_has_the_leaves_below_its_path() -> None:
    tree = {"a": [x(), 3, "s"], "b": x(), "c": [], "d": {"a": x()}}
    layouts = {"a": P(), "b": P("data"), "c": P("model"), "d": {"a": P(None)}}
    parts = broadcast(layouts, tree)
    assert [str(part.path) for part in parts] == ["a", "b", "c", "d.a"]
    plan = ft.plan(tree, layouts, {"data": 2, "model": 2})
    assert {str(row.path): row.reason for row in plan} == {
        "a.0": "P() as given", "b": "P('data') as given", "d.a": "P(None) as given",
    }  # fmt: skip


def test_children() -> None:
    assert (
        children(3) is None
        and children(None) is None
        and children(x()) is None
        and children(P("a")) is None
    )
    assert children({"a": 1}) == [("a", 1)] and children([5]) == [(0, 5)]
    assert children(Pair(1, 2)) == [("left", 1), ("right", 2)]
    assert [key for key, _ in children(Model(x(4, 8), "m", 3)) or ()] == ["w", "name"]


def test_unused_and_problems_of_all_parts_are_joined() -> None:
    tree = {"a": Model(x(4, 8), "m", 3), "b": Model(x(3, 8), "m", 3)}
    layout = {
        "a": ft.AxisRules({"embed": "data", "hidden": None, "s": None}),
        "b": ft.AxisRules({"embed": "data", "t": None}),
    }
    plan = ft.plan(tree, layout, SIZES, check=False)
    assert plan.unused == ("s", "t")
    assert [(str(p.path), p.why.split(";")[0]) for p in plan.problems] == [
        ("b.w", "no rule names `hidden`"),
        ("b.w", '"embed" has size 3'),
    ]


def test_a_layout_over_abstract_values() -> None:
    tree = jax.eval_shape(lambda: {"a": x(4, 8), "b": x()})
    assert specs(tree, {"a": P("data"), "b": P("model")}) == {"a": P("data", None), "b": P("model")}


def test_what_is_wrong_with_a_layout_is_said_once():
    rules = ft.AxisRules({"embed": "dtaa", "hidden": None})
    model = Model(x(4, 8), "m", 3)
    problems = ft.plan(
        [model, model, {"again": model}], [rules, rules, rules], SIZES, check=False
    ).problems
    assert [problem.path for problem in problems].count(None) == 1
