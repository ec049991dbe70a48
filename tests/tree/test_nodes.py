"""A node's children, and the same node with others: what JAX flattens, one level at a time."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
from functree.tree.nodes import (
    children,
    rebuilt,
    walk,
)
from tests.lib.trees import Leafy, containers, nodes, same

LEAVES = st.sampled_from(
    [np.zeros((2, 3), np.float32), np.int32(4), None, 1, True, "text", abs, ()]
)
TREES = st.recursive(LEAVES, containers, max_leaves=12)


@given(TREES)
def test_rebuilt_of_its_own_children_is_the_node(tree: Any) -> None:
    for _, node in nodes(tree):
        below = children(node)
        if below is not None:
            again = rebuilt(node, [child for _, child in below])
            assert same(again, node) and type(again) is type(node)


def test_a_module_without_a_value_for_a_field_has_its_other_children() -> None:
    array = np.ones(3, np.float32)
    partial = object.__new__(Leafy)
    object.__setattr__(partial, "w", array)
    assert dict(children(partial) or [])["w"] is array
    [row] = ft.plan(partial, ft.P(), {"data": 2})
    assert row.path == ("w",)


def test_a_walk_over_a_tree_that_contains_itself_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    with pytest.raises(
        RecursionError, match="a tree of type list contains itself, or is nested too deeply"
    ):
        list(walk(loop))


# What walks over a tree, and what must not keep it afterwards.
WALKS: dict[str, Callable[[Any], Any]] = {
    "select.set": lambda tree: ft.select(tree).at("a").set(1),
    "select.apply": lambda tree: ft.select(tree).under(Leafy).apply(lambda leaf: leaf),
    "select.where": lambda tree: ft.select(tree).where(lambda path, node: node is None).count(),
    "split": ft.split,
    "plan": lambda tree: ft.plan(tree, ft.P(), {"data": 2}),
    "copy": ft.copy,
    "trace": lambda tree: ft.jit(lambda tree: tree).trace(tree).out_info,
}


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_a_tree_is_freed_without_a_collection(walk: Callable[[Any], Any]) -> None:
    def freed() -> bool:
        array = np.ones(3)
        tree = {"a": Leafy(array, None), "b": [Leafy(np.ones(2), 1), ()]}
        walk(tree)
        alive = weakref.ref(array)
        del array, tree
        return alive() is None

    freed()  # the first one may fill caches
    gc.collect()
    gc.disable()
    try:
        assert freed()
    finally:
        gc.enable()
