"""A node of a tree ─► its children by key, and the same node with others in their place."""

from collections.abc import Sequence
from typing import Any

from functree.tree.paths import Path, plain_key
from functree.tree.skeleton.kinds import ARRAY, NONE, STATIC, kind_of, one_level


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """A node's (plain key, child) pairs, `None`s among them; None for a leaf, and for `None` itself."""
    kind = kind_of(node)
    if kind is ARRAY or kind is STATIC or kind is NONE:
        return None
    return [(plain_key(key), child) for key, child in kind.children(node)]


def rebuilt(node: Any, values: Sequence[Any]) -> Any:
    """A node of the same kind with other children, in the order of `children`; static fields are kept.

    A dict keeps the order in which its keys were written.
    """
    if type(node) is dict:
        by_key = dict(zip(sorted(node), values, strict=True))
        return {key: by_key[key] for key in node}
    _, treedef = one_level(node)
    return treedef.unflatten(values)


def follow(tree: Any, path: Sequence[Any]) -> Any:
    """The node at a path that there is."""
    for key in path:
        tree = dict(children(tree) or ())[key]
    return tree


def blanked(node: Any) -> Any:
    """A node in which every leaf is None."""
    below = children(node)
    return None if below is None else rebuilt(node, [blanked(child) for _, child in below])


class _Mark:
    """Stands for one leaf, so that equal leaves (None, small numbers, one array at two places) can be told apart."""

    def __repr__(self) -> str:
        return "<leaf>"


def marked(node: Any) -> tuple[Any, dict[int, Path]]:
    """A tree with a mark for each leaf, and the path of each of its nodes by identity, while that tree lives."""
    places: dict[int, Path] = {}

    def visit(path: Path, node: Any) -> Any:
        below = children(node)
        copy = _Mark() if below is None else rebuilt(node, [visit(path / key, child) for key, child in below])
        if type(copy) is tuple and not copy:
            copy = []  # the empty tuple is one object, wherever it stands
        places[id(copy)] = path
        return copy

    return visit(Path(), node), places
