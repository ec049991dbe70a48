"""A treedef ─► its nodes, one by one; the classes of these are not asked to build anything, for
some of them check what they are given."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.tree_util import PyTreeDef, default_registry, tree_flatten

from functree.errors import USERS_ERRORS
from functree.tree.arrays import Tree, TreeDef

NodeData = Any
"""The class of a node and its static data, as JAX has them; None for a leaf."""

LEAF: TreeDef = jax.tree.structure(0)


def with_children(data: NodeData, children: Sequence[TreeDef]) -> TreeDef:
    """The treedef of a node with these children."""
    return PyTreeDef.from_node_data_and_children(default_registry, data, list(children))


def with_none_as_leaf(treedef: TreeDef) -> TreeDef:
    """The treedef that a tree has if None is a leaf of it."""
    data = treedef.node_data()
    if data is None or data[0] is type(None):
        return LEAF
    return with_children(data, list(map(with_none_as_leaf, treedef.children())))


def leaves_and_nones(treedef: TreeDef) -> Iterator[bool]:
    """For each leaf that a tree has if None is a leaf of it: whether it is another one."""
    waiting = [treedef]
    while waiting:
        one = waiting.pop()
        data = one.node_data()
        if data is None or data[0] is type(None):
            yield data is None
        else:
            waiting += reversed(one.children())


class StoredNode(NamedTuple):
    """A treedef that can be pickled, which one with modules cannot.

    Attributes:
        data: the class and the static data of the node; None for a leaf.
        module: instead of `data`, a module without its children: the static data of a module has
            private marks of Equinox, which are compared by identity.
        children: those of the node.
    """

    data: NodeData
    module: eqx.Module | None
    children: "tuple[StoredNode, ...]"

    @classmethod
    def of(cls, treedef: TreeDef) -> "StoredNode":
        """A treedef as it is stored."""
        data, below = treedef.node_data(), treedef.children()
        children = tuple(map(StoredNode.of, below))
        if data is None or not issubclass(data[0], eqx.Module):
            return cls(data, None, children)
        # Equinox builds a module without its constructor, so nothing checks these.
        empty = with_children(data, [LEAF] * len(below)).unflatten(range(len(below)))
        return cls(None, empty, children)

    def treedef(self) -> TreeDef:
        """The treedef that was stored."""
        data = self.data
        if self.module is not None:
            _, one = tree_flatten(self.module, is_leaf=lambda node: node is not self.module)
            data = one.node_data()
        if data is None:
            return LEAF
        return with_children(data, [child.treedef() for child in self.children])


class Refusal(NamedTuple):
    """A node that its class does not build from the values for its leaves.

    Attributes:
        treedef: its structure.
        leaves: the indices of its leaves, in the whole tree.
        error: what the class raises.
    """

    treedef: TreeDef
    leaves: range
    error: Exception


def build_each(
    treedef: TreeDef, leaves: Sequence[object], otherwise: Callable[[Refusal, Sequence[Tree]], Tree]
) -> Tree:
    """A tree with these leaves, built node by node.

    Args:
        treedef: the structure of the tree.
        leaves: a value for each leaf.
        otherwise: what takes the place of a node that its class refuses to build, from its
            children.
    """
    return _build(treedef, leaves, 0, otherwise)


def _build(
    treedef: TreeDef,
    leaves: Sequence[object],
    start: int,
    otherwise: Callable[[Refusal, Sequence[Tree]], Tree],
) -> Tree:
    """The same for a part of the tree, whose leaves begin at `start`."""
    data = treedef.node_data()
    if data is None:
        return leaves[start]
    children: list[Tree] = []
    first, below = start, treedef.children()
    for child in below:
        children.append(_build(child, leaves, first, otherwise))
        first += child.num_leaves
    try:
        return with_children(data, [LEAF] * len(below)).unflatten(children)
    except USERS_ERRORS as error:
        return otherwise(Refusal(treedef, range(start, first), error), children)


def first_leaf_depth(treedef: TreeDef) -> int:
    """How deep below a node its first leaf is, in nodes."""
    depth = 0
    while treedef.node_data() is not None:
        treedef = next(child for child in treedef.children() if child.num_leaves)
        depth += 1
    return depth
