"""A static value ─► an equal one that shares nothing with it that can be changed in place."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from functree.tree.skeleton.own_copy import own_copy
from functree.tree.skeleton.static_value import same_value
from tests.lib.structures import STATIC_WITHOUT_HASH, Pair, Point, X


@pytest.mark.parametrize("name", STATIC_WITHOUT_HASH)
def test_what_can_be_changed_is_copied(name: str):
    make, change = STATIC_WITHOUT_HASH[name]
    value = make()
    copied = own_copy(value)
    assert same_value(copied, value) and type(copied) is type(value)
    change(value)
    assert same_value(copied, make()) and not same_value(copied, value)


class Unlike:
    """An object whose copies are not equal to it."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return self is other


class Raises:
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise ValueError("no")


class Locked:
    """An object that cannot be copied."""

    __hash__ = None

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Locked)


KEPT: list[Any] = [
    *(1, "a", (1, ("b",)), frozenset({1}), object(), len, None),
    *(jnp.ones(2), jax.random.key(0), Unlike(), Raises(), Locked()),
    *(jax.tree.structure({"a": [1, {2: 3}]}), jax.tree.structure(Pair(X, X, name="n"))),
]


@pytest.mark.parametrize("value", KEPT, ids=lambda value: type(value).__name__)
def test_what_cannot_be_changed_or_copied_is_kept(value: Any):
    assert own_copy(value) is value


def test_a_named_tuple_stays_one():
    point = Point([1], 2)
    copied = own_copy(point)
    assert type(copied) is Point and copied == point and copied.x is not point.x


def test_the_nodes_of_a_treedef_are_not_built():
    """Only their static data is copied, at any depth, and those of other nodes are kept."""
    built = []

    class Node:
        def __init__(self, data: Any):
            self.data = data

    jax.tree_util.register_pytree_node(
        Node, lambda node: ((0.0,), node.data), lambda data, _: built.append(data)
    )
    data = [np.ones(2)]
    treedef = jax.tree.structure({"a": [Node(data), Pair(X, X, name="n")], "b": (1, None)})
    copied = own_copy(treedef)
    assert same_value(copied, treedef) and not built
    data[0][0] = 5
    assert not same_value(copied, treedef)
