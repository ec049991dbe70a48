"""A path, or a function that picks parts of a tree ─► the paths of these parts."""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from functree.errors import (
    FunctreeError,
    FunctreeValueError,
    RuleError,
    did_you_mean,
)
from functree.parameters import shown
from functree.tree.nodes import (
    children,
    marked,
)
from functree.tree.paths import Path


def path_below(path: Path, node: Any, below: Path) -> Path:
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


def accessed_paths(node: Any, where: Callable[[Any], Any]) -> list[Path]:
    """The paths of the parts of a node that a function returns, from the node on."""
    if not callable(where) or isinstance(where, type):
        raise RuleError(
            f"at takes a path or a function from the tree to one of its parts, not {shown(where)}"
        )
    # The function is called with a copy in which each node and leaf is a different object, so that
    # the objects that it returns show their paths.
    copied, places = marked(node)
    found = where(copied)
    several = (found,)
    if type(found) in (tuple, list) and id(found) not in places:
        several = found  # a tuple or list that the function made, and not one that is in the tree
    lost = [x for x in several if id(x) not in places]
    if lost or not several:
        stray = lost[0] if lost else found
        raise FunctreeValueError(
            f"at: the function returned {stray!r}, which is not a part of the tree"
        )
    parts = list(dict.fromkeys(places[id(x)] for x in several))
    chosen = set(parts)
    for part in parts:
        outer = next((part[:i] for i in range(len(part)) if part[:i] in chosen), None)
        if outer is not None:
            raise FunctreeValueError(
                f"at: `{part}` is inside `{Path(outer) or type(node).__name__}`: choose one of them"
            )
    return parts


def _missing(node: Any, where: Path, below: Path, key: Any, known: Iterable[Any]) -> FunctreeError:
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


def _fields(node: Any) -> Iterable[str]:
    """The names of the fields of a dataclass, which every module is; none for other nodes."""
    return [field.name for field in fields(node)] if is_dataclass(node) else ()
