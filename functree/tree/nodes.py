"""A node of a tree ─► its children by key, and the same node with other children."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from functree.tree.paths import Path, plain_key
from functree.tree.skeleton.kinds import ARRAY, NONE, STATIC, kind_of, one_level


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """The (plain key, child) pairs of a node, with children that are `None`. For a leaf, and for `None`: None."""
    kind = kind_of(node)
    if kind is ARRAY or kind is STATIC or kind is NONE:
        return None
    return [(plain_key(key), child) for key, child in kind.children(node)]


def rebuilt(node: Any, values: Sequence[Any]) -> Any:
    """A node of the same kind with other children, given in the order of `children`. Static fields are kept.

    A dict keeps the order of its keys.
    """
    # JAX's unflatten would return a dict with sorted keys.
    if type(node) is dict:
        by_key = dict(zip(sorted(node), values, strict=True))
        return {key: by_key[key] for key in node}
    _, treedef = one_level(node)
    return treedef.unflatten(values)


def nodes_at(tree: Any, paths: Iterable[Path]) -> list[Any]:
    """The nodes at paths that exist in the tree. Each node above them is opened once."""
    opened: dict[tuple[Any, ...], dict[Any, Any]] = {}
    found: list[Any] = []
    for path in paths:
        node = tree
        for i, key in enumerate(path):
            below = opened.get(path[:i])
            if below is None:
                below = opened[path[:i]] = dict(children(node) or ())
            node = below[key]
        found.append(node)
    return found


def outermost(tree: Any, fits: Callable[[Path, Any], Any]) -> Iterator[tuple[Path, Any]]:
    """The nodes and leaves for which a function of path and node is true, with their paths; nothing below such a node.

    `None` counts as a leaf.
    """
    waiting: list[tuple[Path, Any]] = [(Path(), tree)]
    while waiting:
        path, node = waiting.pop()
        if fits(path, node):
            yield path, node
        else:
            waiting += [(path / key, child) for key, child in reversed(children(node) or ())]


_ROOT = Path()


def mapped(tree: Any, change: Callable[[Path, Any], Any], path: Path = _ROOT) -> Any:
    """A tree in which each node is what a function of path and node returns for it.

    Where the function returns `BELOW`, the children of the node are changed instead; leaves and `None` stay.
    """
    changed = change(path, tree)
    if changed is not BELOW:
        return changed
    below = children(tree)
    return tree if below is None else rebuilt(tree, [mapped(child, change, path / key) for key, child in below])


BELOW = object()
"""What a function returns to `mapped` for a node whose children are to be changed."""


def blanked(tree: Any) -> Any:
    """The same tree with None for every leaf."""
    return mapped(tree, lambda _, node: None if children(node) is None else BELOW)


class _Mark:
    """A placeholder for one leaf. Leaves that are one object (None, small numbers, an array at two paths) get two."""

    def __repr__(self) -> str:
        return "<leaf>"


def marked(node: Any) -> tuple[Any, dict[int, Path]]:
    """A copy of a tree with a mark for each leaf, and the path of each node of the copy by `id`.

    The paths are valid as long as the copy is alive.
    """
    places: dict[int, Path] = {}
    return _marked(Path(), node, places), places


def _marked(path: Path, node: Any, places: dict[int, Path]) -> Any:
    below = children(node)
    if below is None:
        copy = _Mark()
    else:
        copy = rebuilt(node, [_marked(path / key, child, places) for key, child in below])
    if type(copy) is tuple and not copy:
        # Python has only one empty tuple, so two of them would have one id. Each empty list has its own.
        copy = []
    places[id(copy)] = path
    return copy
