"""A tree ─► its nodes, with their paths; a node ─► its children by key, and the same node with
others."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from functree.errors import USERS_ERRORS, FunctreeTypeError, FunctreeValueError, Problem, error_text
from functree.tree.arrays import Tree
from functree.tree.paths import Key, Keys, Path, plain_key
from functree.tree.skeleton.kinds import ARRAY, FOUND, LEAVES, NONE, Kind, kind_of, one_level


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


def emptied(node: Tree, values: Sequence[Tree], path: Path) -> Tree:
    """A node with other children, some of them None; None for one that its class refuses to build
    without any of them.

    Raises:
        FunctreeError: the class refuses a node with some of them.
    """
    try:
        return rebuilt(node, values)
    except USERS_ERRORS as error:
        if all(value is None for value in values):
            return None
        why = f"cannot be built with None in the place of some of its arrays: {error_text(error)}"
        remedy = "choose all arrays of the node, or none"
        problem = Problem(path, None, type(node).__name__, why, remedy)
        raise FunctreeTypeError("a node cannot be divided", [problem]) from error


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


def _kind_at(path: Keys, node: Tree) -> Kind:
    return kind_of(node)


def walk(
    tree: Tree, kind_at: Callable[[Keys, Tree], Kind] = _kind_at, *, in_model: bool = False
) -> Iterator[tuple[Keys, Tree, Kind]]:
    """The nodes and leaves of a tree with their paths and kinds, in JAX's order, each before its
    children.

    `None` is visited too.

    Args:
        tree: the tree.
        kind_at: the kind of a node by its path and itself. Nothing below a node is visited if this
            is one of `LEAVES`.
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
        kind = kind_at(path, node)
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

    def kind_at(keys: Keys, node: Tree) -> Kind:
        return FOUND if fits(Path(keys), node) else kind_of(node)

    for keys, node, kind in walk(tree, kind_at):
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

    def kind_at(keys: Keys, node: Tree) -> Kind:
        return FOUND if is_leaf(node) else kind_of(node)

    for keys, node, kind in walk(tree, kind_at):
        if kind in LEAVES and kind is not NONE:
            yield Path(keys), node


_ROOT = Path()


def _rebuilt(node: Tree, values: Sequence[Tree], path: Path) -> Tree:
    return rebuilt(node, values)


def mapped(
    tree: Tree,
    change: Callable[[Path, Tree], Tree],
    path: Path = _ROOT,
    build: Callable[[Tree, Sequence[Tree], Path], Tree] = _rebuilt,
) -> Tree:
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
    new = [mapped(child, change, path / key, build) for key, child in below]
    return build(tree, new, path)


BELOW = object()
"""What a function returns to `mapped` for a node whose children are to be changed."""


def blanked(tree: Tree) -> Tree:
    """The same tree with None for every leaf."""
    return mapped(tree, _blank, build=emptied)


def _blank(path: Path, node: Tree) -> Tree:
    return None if children(node) is None else BELOW


class _Mark:
    """A placeholder for one leaf. Leaves that are one object (None, small numbers, an array at two
    paths) get two."""

    def __repr__(self) -> str:
        return "<leaf>"


def marked(node: Tree) -> tuple[Tree, dict[int, Path]]:
    """A copy of a tree with a mark for each leaf, and the path of each node of the copy by `id`.

    A node whose class refuses marks is itself in the copy, with all that is in it. The paths are
    valid as long as the copy is alive.
    """
    places: dict[int, Path] = {}
    return _marked(Path(), node, places), places


# Not by `mapped` and a walk over its result: the class of a node may be one that cannot flatten a
# copy with marks in the place of its arrays.
def _marked(path: Path, node: Tree, places: dict[int, Path]) -> Tree:
    below = children(node)
    if below is None:
        copy = _Mark()
    else:
        marks = [_marked(path / key, child, places) for key, child in below]
        try:
            copy = rebuilt(node, marks)
        except USERS_ERRORS:
            copy = node
    if type(copy) is tuple and not copy:
        # Python has only one empty tuple, so two of them would have one id. Each empty list has its
        # own.
        copy = []
    if copy is node:
        places.update(identities(node, path))
    places[id(copy)] = path
    return copy


def identities(node: Tree, path: Path) -> dict[int, Path]:
    """The path of each array and node in a node by `id`, without those that are at several."""
    found: dict[int, Path] = {}
    several: set[int] = set()
    for keys, one, kind in walk(node):
        if kind in LEAVES and kind is not ARRAY:
            continue  # there is only one None, and one 1
        if id(one) in found:
            several.add(id(one))
        found[id(one)] = Path((*path, *keys))
    return {key: one for key, one in found.items() if key not in several}
