"""A node's children, and the same node with others: what JAX flattens, one level at a time."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
from functree.tree.nodes import (
    BELOW,
    children,
    leaves_of,
    mapped,
    nodes_at,
    outermost,
    rebuilt,
    walk,
)
from functree.tree.paths import Path
from functree.tree.skeleton.kinds import LEAVES as LEAF_KINDS
from tests.lib.trees import Leafy, containers, is_none, nodes, same

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


@given(TREES)
def test_each_node_is_found_by_its_path(tree: Any) -> None:
    paths, expected = zip(*nodes(tree), strict=True)
    assert all(one is other for one, other in zip(nodes_at(tree, paths), expected, strict=True))


def test_what_is_no_child_is_kept() -> None:
    assert list(rebuilt({"b": 1, "a": 2}, ["x", "y"]).items()) == [("b", "y"), ("a", "x")]
    assert rebuilt(defaultdict(list, a=1), ["x"]).default_factory is list
    assert rebuilt(Leafy(1, 2, static="kept"), "xy").static == "kept"
    assert rebuilt(ft.Stacked({"w": np.ones(2)}, axis="depth"), [None]).axis == "depth"


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(KeyError):
        nodes_at({"a": 1}, [Path(("b",))])


@given(TREES)
def test_mapped_to_nothing_else_is_the_tree(tree: Any) -> None:
    assert same(mapped(tree, lambda *_: BELOW), tree)


@given(TREES)
def test_the_outermost_are_in_order_and_not_inside_each_other(tree: Any) -> None:
    for fits in (
        lambda _, node: isinstance(node, list | dict),
        lambda path, _: len(path) == 2,
        lambda *_: False,
    ):
        expected: dict[Path, Any] = {}
        for path, node in nodes(tree):
            if fits(path, node) and not any(path[: len(above)] == above for above in expected):
                expected[path] = node
        found = list(outermost(tree, fits))
        assert [path for path, _ in found] == list(expected)
        assert all(node is other for (_, node), other in zip(found, expected.values(), strict=True))


@given(TREES)
def test_leaves_are_jaxs(tree: Any) -> None:
    for is_leaf in (lambda node: False, is_none, lambda node: isinstance(node, dict)):
        expected = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
        found = list(leaves_of(tree, is_leaf))
        assert [path for path, _ in found] == [Path.of(keys) for keys, _ in expected]
        assert all(node is leaf for (_, node), (_, leaf) in zip(found, expected, strict=True))


@given(TREES)
def test_a_walk_has_each_node_before_its_children(tree: Any) -> None:
    found = [path for path, _, _ in walk(tree)]
    assert set(found) == {path for path, _ in nodes(tree)} and len(found) == len(set(found))
    assert all(path[:-1] in found[:i] for i, path in enumerate(found) if path)


def test_a_walk_over_a_tree_that_contains_itself_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    with pytest.raises(RecursionError, match="a list contains itself, or is nested too deeply"):
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


def test_paths_in_the_model_of_what_is_packed_or_state() -> None:
    """The key of a node in these is a whole path."""
    tree = {
        "packed": ft.pack({"a": [np.ones(2), {"b": np.ones(3)}]}),
        "state": ft.make_state({"norm": {"mean": ft.StateRef(np.ones(2, np.float32))}})[1],
        "x": [1],
    }

    def paths(in_model: bool) -> list[tuple[Any, ...]]:
        return [keys for keys, _, kind in walk(tree, in_model=in_model) if kind in LEAF_KINDS]

    rest = ("x", 0)
    assert paths(False) == [("packed", "a.0"), ("packed", "a.1.b"), ("state", "norm.mean"), rest]
    packed = [("packed", "a", 0), ("packed", "a", 1, "b")]
    assert paths(True) == [*packed, ("state", "norm", "mean"), rest]
