"""A tree ─► its nodes, with their paths; a node ─► its children by key, and the same node with
others."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from functree.errors import FunctreeValueError, Problem
from functree.tree.arrays import Tree
from functree.tree.paths import Key, Keys, Path, plain_key
from functree.tree.skeleton.kinds import FOUND, LEAVES, NONE, Kind, kind_of, one_level


def children(node: Tree) -> list[tuple[Key, Tree]] | None:
    """The (plain key, child) pairs of a node, with children that are `None`. For a leaf, and for
    `None`: None."""
    kind = kind_of(node)
    if kind in LEAVES:
        return None
    return [(plain_key(key), child) for key, child in kind.children(node)]


def rebuilt(node: Tree, values: Sequence[Tree]) -> Tree:
    """A node of the same kind with other children, given in the order of `children`. Static fields
    are kept.

    A dict keeps the order of its keys.
    """
    # JAX's unflatten would return a dict with sorted keys.
    if type(node) is dict:
        copy = dict(node)
        copy.update(zip(sorted(node), values, strict=True))
        return copy
    _, treedef = one_level(node)
    return treedef.unflatten(values)


def nodes_at(tree: Tree, paths: Iterable[Path]) -> list[Tree]:
    """The nodes at paths that exist in the tree. Each node above them is opened once.

    Raises:
        FunctreeError: several nodes are at one of the paths.
    """
    opened: dict[Keys, tuple[dict[Key, Tree], set[Key]]] = {}
    found: list[Tree] = []
    for path in paths:
        node = tree
        for i, key in enumerate(path):
            if path[:i] not in opened:
                opened[path[:i]] = _by_key(node)
            below, several = opened[path[:i]]
            if key in several:
                raise _several(Path(path[: i + 1]), node)
            node = below[key]
        found.append(node)
    return found


def _by_key(node: Tree) -> tuple[dict[Key, Tree], set[Key]]:
    """The children of a node by their keys, and the keys of several."""
    pairs = children(node) or []
    found = dict(pairs)
    if len(found) == len(pairs):
        return found, set()
    keys = [key for key, _ in pairs]
    return found, {key for key in found if keys.count(key) > 1}


def _several(path: Path, parent: Tree) -> FunctreeValueError:
    """The error for a path at which there are several nodes."""
    why = f"is the path of several parts: {type(parent).__name__} gives two of its children one key"
    remedy = "give each child a key of its own in the class's `tree_flatten_with_keys`"
    problem = Problem(path, None, "", why, remedy)
    return FunctreeValueError("a part cannot be told by its path", [problem])


def _nowhere(path: Keys, node: Tree) -> bool:
    return False


def walk(
    tree: Tree, stops_at: Callable[[Keys, Tree], object] = _nowhere, *, in_model: bool = False
) -> Iterator[tuple[Keys, Tree, Kind]]:
    """The nodes and leaves of a tree with their paths and kinds, in JAX's order, each before its
    children.

    `None` is visited too.

    Args:
        tree: the tree.
        stops_at: a function of the path of a node and of itself. Where it is true, the kind is
            `FOUND`, and nothing below the node is visited.
        in_model: whether what is in a state or in a packed tree has the path that it has in the
            model (several keys), instead of the path of its node (one key).

    Raises:
        RecursionError: the tree contains itself, or is too deep for JAX too.
    """
    # A tree that contains itself would be visited without end. JAX flattens by recursion, which
    # ends at Python's limit, so nothing below that depth is in a tree of JAX.
    deepest = sys.getrecursionlimit()
    waiting: list[tuple[Keys, Tree]] = [((), tree)]
    while waiting:
        path, node = waiting.pop()
        kind = FOUND if stops_at(path, node) else kind_of(node)
        yield path, node, kind
        if kind in LEAVES:
            continue
        if len(path) > deepest:
            raise RecursionError(
                f"a {type(tree).__name__} contains itself, or is nested too deeply"
            )
        if in_model:
            below = [((*path, *keys), child) for keys, child in kind.paths(node)]
        else:
            below = [((*path, plain_key(key)), child) for key, child in kind.children(node)]
        waiting += reversed(below)


def outermost(tree: Tree, fits: Callable[[Path, Tree], object]) -> Iterator[tuple[Path, Tree]]:
    """The nodes and leaves for which a function of path and node is true, with their paths; nothing
    below such a node.

    `None` counts as a leaf.
    """

    for keys, node, kind in walk(tree, lambda keys, node: fits(Path(keys), node)):
        if kind is FOUND:
            yield Path(keys), node


def leaves_of(
    tree: Tree, is_leaf: Callable[[Tree], object] = lambda node: False
) -> Iterator[tuple[Path, Tree]]:
    """The leaves of a tree with their paths, as `jax.tree_util.tree_flatten_with_path` finds them.

    Args:
        tree: the tree.
        is_leaf: a function of nodes; those for which it is true are leaves too, and so is `None`.
    """

    for keys, node, kind in walk(tree, lambda keys, node: is_leaf(node)):
        if kind in LEAVES and kind is not NONE:
            yield Path(keys), node


_ROOT = Path()


def mapped(tree: Tree, change: Callable[[Path, Tree], Tree], path: Path = _ROOT) -> Tree:
    """A tree in which each node is what a function of path and node returns for it.

    Where the function returns `BELOW`, the children of the node are changed instead, and it is
    built with these; leaves and `None` stay.
    """
    changed = change(path, tree)
    if changed is not BELOW:
        return changed
    below = children(tree)
    if below is None:
        return tree
    return rebuilt(tree, [mapped(child, change, path / key) for key, child in below])


BELOW = object()
"""What a function returns to `mapped` for a node whose children are to be changed."""
