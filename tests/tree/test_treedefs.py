"""Treedefs as they are stored, with None as a leaf, and built node by node."""

import collections
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

from functree.tree.skeleton.static_value import StaticValue
from functree.tree.skeleton.treedefs import (
    Refusal,
    StoredNode,
    build_each,
    first_leaf_depth,
    leaves_and_nones,
    with_none_as_leaf,
)
from tests.lib.structures import TREES, Custom, Pair, Point


def is_none(node: Any) -> bool:
    return node is None


@given(TREES)
def test_stored(tree: Any):
    treedef = jax.tree.structure(tree)
    assert not StaticValue(StoredNode.of(treedef).treedef()).differs(treedef)


@given(TREES)
def test_none_as_a_leaf(tree: Any):
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_none)
    known = jax.tree.structure(tree)
    assert not StaticValue(with_none_as_leaf(known)).differs(treedef)
    assert list(leaves_and_nones(known)) == [leaf is not None for leaf in leaves]


@given(TREES)
def test_built_node_by_node(tree: Any):
    leaves, treedef = jax.tree.flatten(tree)
    built = build_each(treedef, leaves, lambda refusal, children: pytest.fail(str(refusal.error)))
    again, structure = jax.tree.flatten(built)
    assert not StaticValue(structure).differs(treedef)
    assert all(one is other for one, other in zip(again, leaves, strict=True))


@pytest.mark.parametrize(
    ("tree", "depth"),
    [
        (1, 0),
        ([1], 1),
        ([None, (), {"a": [2]}], 3),
        (Pair(None, Point(None, 1)), 2),
        (collections.OrderedDict(b=Custom((1,), "note")), 2),
    ],
)
def test_how_deep_the_first_leaf_is(tree: Any, depth: int):
    assert first_leaf_depth(jax.tree.structure(tree)) == depth


def test_pickled():
    tree = [Pair(jnp.ones(1), {"a": 1}, "name"), Point(1, None)]
    stored = StoredNode.of(jax.tree.structure(tree))
    assert pickle.loads(pickle.dumps(stored)).treedef() == jax.tree.structure(tree)


class Refusing(Custom):
    @classmethod
    def tree_unflatten(cls, note: Any, children: Any) -> Any:
        if None in children:
            raise LookupError("no")
        return super().tree_unflatten(note, children)


jax.tree_util.register_pytree_node_class(Refusing)


def test_what_a_class_refuses():
    treedef = jax.tree.structure([1, Refusing((2, [3]), ""), 4])
    refusals: list[Refusal] = []

    def otherwise(refusal: Refusal, children: Any) -> str:
        refusals.append(refusal)
        return f"instead of {children}"

    built = build_each(treedef, ["a", "b", None, "c"], otherwise)
    assert built[0] == "a" and built[2] == "c" and built[1].children == ("b", [None])
    assert build_each(treedef, ["a", None, "b", "c"], otherwise)[1] == "instead of [None, ['b']]"
    assert refusals[0].leaves == range(1, 3) and isinstance(refusals[0].error, LookupError)
