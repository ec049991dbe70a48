"""Penzai's selectors as an oracle for ours."""

from typing import Any

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from penzai import pz

import functree as ft
from tests.lib.trees import ARRAYS, Pair, same


@pz.pytree_dataclass
class Layer(pz.Struct):
    w: Any
    inner: Any


def unnamed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers that both understand."""
    lists = st.lists(inner, max_size=3)
    dicts = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    return st.one_of(lists, lists.map(tuple), dicts, st.builds(Layer, inner, inner))


KNOWN = st.sampled_from([*ARRAYS, 1, True, 0.5, "text", abs])
PLAIN = st.recursive(
    KNOWN, lambda inner: unnamed(inner) | st.builds(Pair, inner, inner), max_leaves=12
)
ELEMENTS = st.lists(
    st.recursive(KNOWN, unnamed, max_leaves=6), max_size=4
)  # Penzai cannot insert near a named tuple
CLASSES = st.sampled_from([Layer, list, tuple, Pair, dict, np.ndarray, int])


def both(tree: Any, cls: Any) -> tuple[ft.Selection[Any], Any]:
    return ft.select(tree).under(cls), pz.select(tree).at_instances_of(cls)


@given(PLAIN, CLASSES)
def test_penzai_selects_the_same(tree: Any, cls: Any) -> None:
    ours, theirs = both(tree, cls)
    assert ours.count() == theirs.count()
    assert all(a is b or same(a, b) for a, b in zip(ours, theirs.get_sequence(), strict=True))
    theirs_where = pz.select(tree).at_subtrees_where(lambda node: isinstance(node, cls))
    assert (
        theirs_where.count()
        == ft.select(tree).where(lambda path, node: isinstance(node, cls)).count()
    )


@given(PLAIN, CLASSES)
def test_penzai_changes_the_same(tree: Any, cls: Any) -> None:
    ours, theirs = both(tree, cls)
    if not ours:  # ours refuses to change nothing at all
        assert theirs.count() == 0
        return
    assert same(ours.set("new"), theirs.set("new"))
    assert same(ours.apply(lambda part: ("in", part)), theirs.apply(lambda part: ("in", part)))
    values = [str(i) for i in range(ours.count())]
    mine, its = jax.tree.leaves(ours.set_each(values)), jax.tree.leaves(theirs.set_sequence(values))
    assert all(a is b or a == b for a, b in zip(mine, its, strict=True))


@given(ELEMENTS | ELEMENTS.map(tuple), CLASSES)
def test_penzai_inserts_and_removes_the_same(elements: Any, cls: Any) -> None:
    tree = {"a": Layer(elements, 0)}
    ours = (
        ft.select(tree).at("a.w").where(lambda path, node: len(path) == 1 and isinstance(node, cls))
    )
    theirs = pz.select(tree).at(lambda tree: tree["a"].w).at_children()
    theirs = theirs.where(lambda node: isinstance(node, cls))
    assert ours.count() == theirs.count()
    if not ours:
        return
    assert same(ours.remove(), theirs.remove_from_parent())
    assert same(ours.insert_after("new"), theirs.insert_after("new"))
    assert same(ours.insert_before("new"), theirs.insert_before("new"))
