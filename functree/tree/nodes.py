"""`walk` visits the nodes of a tree with their paths; `rebuilt` gives a node new children.

`aligned` pairs each value of a prefix tree with the subtree that it applies to.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from functree.errors import MAX_PATHS, FunctreeValueError, Problem, RuleError, listed
from functree.tree.arrays import Tree
from functree.tree.paths import ROOT, Key, Keys, Path
from functree.tree.skeleton.kinds import FOUND, LEAVES, NONE, Kind, kind_of, one_level


def children(node: Tree) -> list[tuple[Key, Tree]] | None:
    """Return the (plain key, child) pairs of a node, including children that are `None`.

    The result is None for a leaf, and for `None`.
    """
    kind = kind_of(node)
    if kind in LEAVES:
        return None
    return list(kind.children(node))


def rebuilt(node: Tree, values: Sequence[Tree]) -> Tree:
    """Copy a node with new children, given in the order of `children`.

    Static fields are kept, and a dict keeps the order of its keys.
    """
    # JAX's unflatten would return a dict with sorted keys.
    if type(node) is dict:
        copy = dict(node)
        copy.update(zip(sorted(node), values, strict=True))
        return copy
    _, treedef = one_level(node)
    return treedef.unflatten(values)


def nodes_at(tree: Tree, paths: Iterable[Path]) -> list[Tree]:
    """Return the nodes at some paths, all of which must exist in the tree.

    Each node above these nodes is flattened once.

    Raises:
        FunctreeError: if a node above gives several children the same key.
    """
    opened: dict[Keys, dict[Key, Tree]] = {}
    found: list[Tree] = []
    for path in paths:
        node = tree
        for i, key in enumerate(path):
            if path[:i] not in opened:
                opened[path[:i]] = _by_key(Path(path[:i]), node)
            node = opened[path[:i]][key]
        found.append(node)
    return found


def _by_key(path: Path, node: Tree) -> dict[Key, Tree]:
    """Return the children of a node by key."""
    pairs = children(node) or []
    by_key = dict(pairs)
    if len(by_key) != len(pairs):
        why = "gives several of its children the same key"
        remedy = "give each child a different key in the class's `tree_flatten_with_keys`"
        problem = Problem(path, None, type(node).__name__, why, remedy)
        raise FunctreeValueError("several parts have the same path", [problem])
    return by_key


def walk(
    tree: Tree, stops_at: Callable[[Keys, Tree], object] | None = None, *, in_model: bool = False
) -> Iterator[tuple[Keys, Tree, Kind]]:
    """Yield the nodes and leaves of a tree with their paths and kinds, each before its children.

    The order is JAX's order. `None` is visited too.

    Args:
        tree: the tree.
        stops_at: a function of a node's path and the node. If its result is true, the node's kind
            is `FOUND`, and nothing below the node is visited. None to visit all nodes.
        in_model: whether to yield the children of a state or a packed tree with their paths in the
            model (several keys), instead of their nodes' paths (one key).

    Raises:
        RecursionError: if the tree contains itself, or is nested too deeply for JAX.
    """
    # Without a limit, a walk over a tree that contains itself would not end. JAX flattens by
    # recursion, up to Python's limit, so no deeper tree is valid in JAX.
    deepest = sys.getrecursionlimit()
    waiting: list[tuple[Keys, Tree]] = [((), tree)]
    while waiting:
        path, node = waiting.pop()
        kind = FOUND if stops_at is not None and stops_at(path, node) else kind_of(node)
        yield path, node, kind
        if kind in LEAVES:
            continue
        if len(path) > deepest:
            raise RecursionError(
                f"a tree of type {type(tree).__name__} contains itself, or is nested too deeply"
            )
        if in_model:
            below = [((*path, *keys), child) for keys, child in kind.paths(node)]
        else:
            below = [((*path, key), child) for key, child in kind.children(node)]
        waiting += reversed(below)


def outermost(tree: Tree, fits: Callable[[Path, Tree], object]) -> Iterator[tuple[Path, Tree]]:
    """Yield the outermost nodes and leaves for which a function is true, with their paths.

    `None` counts as a leaf.

    Args:
        tree: the tree.
        fits: a function of a node's path and the node.
    """

    for keys, node, kind in walk(tree, lambda keys, node: fits(Path(keys), node)):
        if kind is FOUND:
            yield Path(keys), node


def leaves_of(
    tree: Tree, is_leaf: Callable[[Tree], object] = lambda node: False
) -> Iterator[tuple[Path, Tree]]:
    """Yield the leaves of a tree with their paths, as `jax.tree_util.tree_flatten_with_path` does.

    Args:
        tree: the tree.
        is_leaf: a function of nodes. Nodes for which it is true are leaves too, even `None`.
    """

    for keys, node, kind in walk(tree, lambda keys, node: is_leaf(node)):
        if kind in LEAVES and kind is not NONE:
            yield Path(keys), node


def with_nodes(tree: Tree, nodes: Mapping[Keys, Tree]) -> Tree:
    """Replace the nodes at some paths, none of which begins with another.

    Nodes that contain none of the replaced nodes are kept.
    """
    if not nodes:
        return tree
    if () in nodes:
        return nodes[()]
    inside: dict[Key, dict[Keys, Tree]] = {}
    for path, node in nodes.items():
        inside.setdefault(path[0], {})[path[1:]] = node
    below = children(tree) or ()
    return rebuilt(tree, [with_nodes(child, inside.get(key, {})) for key, child in below])


# Prefix trees


class PrefixOf(NamedTuple):
    """A description of the values in a prefix tree, such as layouts.

    Attributes:
        noun: the plural for messages: `layouts`.
        one: the singular for messages: `layout`.
        is_one: a function that returns whether an object is a single value, not a tree of values.
        wanted: the predicate in the message about an object that is neither a single value nor a
            tree.
        hint: a function that returns the end of the message, given an invalid part of the prefix
            and the subtree at the same path.
    """

    noun: str
    one: str
    is_one: Callable[[Tree], bool]
    wanted: str
    hint: Callable[[Tree, Tree], str] = lambda prefix, tree: ""


def aligned(
    prefix: Tree, tree: Tree, of: PrefixOf, path: Path = ROOT
) -> Iterator[tuple[Tree, Path, Tree]]:
    """Yield each value of a prefix tree with the path of its subtree, and the subtree itself.

    Raises:
        RuleError: if the structures of the prefix and the tree differ.
        RuleError: if the prefix contains an invalid value.
    """
    if of.is_one(prefix):
        yield prefix, path, tree
        return
    values, nodes = children(prefix), children(tree)
    wrong = _mismatch(prefix, values, tree, nodes, of)
    if wrong is not None:
        raise RuleError(f"at {where_text(path)}: {wrong}{of.hint(prefix, tree)}")
    for (key, below), (_, node) in zip(values or (), nodes or (), strict=True):
        yield from aligned(below, node, of, path / key)


def _mismatch(
    prefix: Tree,
    values: Sequence[tuple[Key, Tree]] | None,
    tree: Tree,
    nodes: Sequence[tuple[Key, Tree]] | None,
    of: PrefixOf,
) -> str | None:
    """Describe how a prefix differs from a tree, given their children; None if it does not."""
    if values is None:
        return f"{prefix!r} {of.wanted}, or a tree of {of.noun}"
    if nodes is None or type(prefix) is not type(tree):
        return (
            f"the {of.noun} are a {_kind(prefix)}, but the tree is a {_kind(tree)}: use the "
            f"structure of the tree, with a {of.one} for each leaf or subtree"
        )
    have, want = [key for key, _ in values], [key for key, _ in nodes]
    return _difference(have, want, of.noun) if have != want else None


def where_text(path: Path) -> str:
    """Format the path of a subtree for messages."""
    return f"`{path}`" if path else "the root"


def _difference(have: Sequence[Key], want: Sequence[Key], noun: str) -> str:
    """Describe how the keys of the prefix differ from the tree's keys, for messages."""
    parts: list[str] = []
    for keys, others, where in ((have, want, f"the {noun}"), (want, have, "the tree")):
        lost = [key for key in keys if key not in others]
        if lost:
            parts.append(f"{_listed(lost)} {'is' if len(lost) == 1 else 'are'} only in {where}")
    if not parts:
        # In JAX, the order of an `OrderedDict` is part of its structure.
        order = f"{_listed(have)} instead of {_listed(want)}"
        return (
            f"the {noun} have the keys of the tree in a different order ({order}): use the order "
            "of the tree"
        )
    return "; ".join(parts) + ": use the keys of the tree"


def _listed(keys: Sequence[Key]) -> str:
    """List the first few keys, for messages."""
    return listed([f"`{Path((key,))}`" for key in keys], MAX_PATHS)


def _kind(value: Tree) -> str:
    """Return the name of a node's class, or `leaf`, for messages."""
    return "leaf" if children(value) is None else type(value).__name__
