"""Leaves, and annotations that are given from outside, by path ─► the leaves with the axes of
these."""

from collections.abc import Mapping
from dataclasses import replace

from functree.labels.annotations.given_names import given_by
from functree.labels.annotations.hints import Hint
from functree.labels.annotations.leaf_axes import leaf_axes
from functree.labels.leaf import Leaf
from functree.labels.leaves import Leaves
from functree.tree.paths import Path


def name_by_hints(leaves: Leaves, hints: Mapping[Path, Hint]) -> Leaves:
    """The leaves, named as if their parts of the tree were annotated.

    Args:
        leaves: the leaves of a tree.
        hints: the annotations of parts of the tree, by path.
    """
    if not hints:
        return leaves
    named: list[Leaf] = []
    for leaf in leaves.leaves:
        for path, hint in hints.items():
            if leaf.path[: len(path)] == path:
                leaf = _named(leaf, hint, Path(leaf.path[len(path) :]))
        named.append(leaf)
    return replace(leaves, leaves=tuple(named))


def _named(leaf: Leaf, hint: Hint, below: Path) -> Leaf:
    """A leaf with the axes that the annotation of a part says, at a path below this part."""
    found = leaf_axes({}, leaf.value, leaf.path, hint.at(below), given_by(hint, below), ())
    if not found.annotated:
        return leaf
    return leaf._replace(**found._asdict())
