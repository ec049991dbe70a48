"""A path, or a function that picks parts of a tree ─► the paths of these parts."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from functree.argument_checks import shown
from functree.errors import FunctreeError, FunctreeValueError, RuleError, did_you_mean
from functree.tree.arrays import Tree
from functree.tree.nodes import children, identities, marked
from functree.tree.paths import Path, first_beginning


def path_below(path: Path, node: Tree, below: Path) -> Path:
    """The path of the node that is at `below` in the node at `path`. Raises FunctreeError if there
    is none."""
    for i, key in enumerate(below):
        known = dict(children(node) or ())
        # The keys of an `ft.State` and of a packed tree are whole paths, as texts.
        if (rest := str(Path(below[i:]))) in known and not isinstance(node, dict):
            return Path((*path, *below[:i], rest))
        if key not in known:
            raise _missing(node, Path((*path, *below[:i])), below, key, known)
        node = known[key]
    return Path((*path, *below))


def accessed_paths(node: Tree, where: Callable[[Tree], Any]) -> list[Path]:
    """The paths of the parts of a node that a function returns, from the node on."""
    if not callable(where) or isinstance(where, type):
        raise RuleError(
            f"at takes a path or a function from the tree to one of its parts, not {shown(where)}"
        )
    # The function is called with a copy in which each node and leaf is a different object, so that
    # the objects that it returns show their paths.
    copied, places = marked(node)
    found = where(copied)
    several = _returned(found, places)
    if any(id(one) not in places for one in several):
        # The class of a node may wrap what is not an array. So the tree itself is asked too.
        known = identities(node, Path())
        own = _returned(where(node), known)
        if all(id(one) in known for one in own):
            several, places = own, known
    parts: dict[Path, None] = {}  # a dict, as a set in the order of the result
    for one in several:
        if id(one) not in places:
            raise FunctreeValueError(
                f"at: the function returned {one!r}, which is not a part of the tree"
            )
        parts[places[id(one)]] = None
    for part in parts:
        outer = first_beginning(part, parts)
        if outer != part:
            raise FunctreeValueError(
                f"at: `{part}` is inside `{outer or type(node).__name__}`: choose one of them"
            )
    return list(parts)


def _returned(found: Any, places: Container[int]) -> Sequence[Any]:
    """The parts that a function returned: those in a tuple or list that it made, and that is not
    one of the tree, or else the only one."""
    if type(found) in (tuple, list) and id(found) not in places and found:
        return found
    return (found,)


def _missing(node: Tree, where: Path, below: Path, key: Any, known: Iterable[Any]) -> FunctreeError:
    """The error for a path with a key that a node does not have.

    Args:
        node: the node.
        where: its path.
        below: the path that a user asked for.
        key: the key in it that the node does not have.
        known: the keys that the node has.
    """
    if key in _fields(node):
        hint = "; it is a static field, not a part of the tree"
    else:
        hint = did_you_mean(key, known)
    return FunctreeValueError(
        f"there is no `{below}`: `{where or type(node).__name__}` has no `{Path((key,))}`{hint}"
    )


def _fields(node: Tree) -> Iterable[str]:
    """The names of the fields of a dataclass, which every module is; none for other nodes."""
    return map(attrgetter("name"), fields(node)) if is_dataclass(node) else ()
