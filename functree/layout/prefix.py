"""A prefix tree of layouts and a tree ─► for each layout, the subtree it stands over."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.tree_util import tree_structure

from functree.errors import RuleError
from functree.layout.layouts import Layout, as_layout, is_layout
from functree.tree.nodes import children
from functree.tree.paths import Path


class Part(NamedTuple):
    """One layout of a prefix tree."""

    layout: Layout
    path: Path
    leaves: int  # how many leaves, of any kind, the subtree has


def broadcast(prefix: Any, tree: Any) -> list[Part]:
    """The layouts of a prefix tree, in the order of the leaves that they stand over.

    Raises:
        RuleError: the prefix has another structure than the tree, or holds what is no layout.
    """
    return list(_parts(prefix, tree, Path()))


def _parts(prefix: Any, tree: Any, path: Path) -> Iterator[Part]:
    if is_layout(prefix):
        layout = as_layout(prefix)
        # A training state is laid out by the layout of its model: it knows how the rest follows from that.
        found = dict(_training(tree, Path()))
        own = next((state.__layout__(layout, found) for state in found.values()), layout)
        yield Part(own, path, tree_structure(tree).num_leaves)
        return
    layouts, nodes = children(prefix), children(tree)
    if layouts is None:
        as_layout(prefix)
    if nodes is None or layouts is None or type(prefix) is not type(tree):
        raise RuleError(
            f"at {str(path) or 'the root'} the layouts are a {_kind(prefix)} and the tree is a {_kind(tree)}; "
            "a tree of layouts has the tree's own structure down to each layout"
        )
    have, want = [key for key, _ in layouts], [key for key, _ in nodes]
    if have != want:
        odd = [key for key in have if key not in want] or [key for key in want if key not in have]
        raise RuleError(
            f"at {str(path) or 'the root'} the layouts have {len(have)} children and the tree has {len(want)}; "
            f"`{Path((odd[0],))}` is only in {'the layouts' if odd[0] in have else 'the tree'}"
        )
    for (key, below), (_, node) in zip(layouts, nodes, strict=True):
        yield from _parts(below, node, path / key)


def _training(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """The training states in plain containers."""
    if hasattr(type(tree), "__unpacked__"):
        tree = tree.__unpacked__()
    if hasattr(type(tree), "__layout__"):
        yield path, tree
    elif isinstance(tree, list | tuple | dict):
        for key, child in children(tree) or ():
            yield from _training(child, path / key)


def _kind(value: Any) -> str:
    return "leaf" if children(value) is None else type(value).__name__
