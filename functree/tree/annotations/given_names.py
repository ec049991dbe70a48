"""Names given from outside, by a field's `ft.names`, a layout's `names=` or the module itself ─► a leaf's axes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from jax.tree_util import tree_flatten_with_path, tree_leaves

from functree.errors import AxesError, Problem, did_you_mean
from functree.tree.axes import Axes, Names
from functree.tree.globs import glob_pattern, literal_text, match_text
from functree.tree.interfaces import own_names
from functree.tree.paths import Path


class Giver(IntEnum):
    """Who gave some names. Of several that name one leaf, the first of these decides."""

    FIELD = 0
    LAYOUT = 1
    MODULE = 2


@dataclass(eq=False)
class GivenNames:
    """`ft.names` that hold below one place of a tree.

    Attributes:
        names: the patterns and their axes.
        depth: the length of the place's path; patterns begin there.
        giver: who gave them.
        used: the patterns that a leaf matched.
        by_leaf: whether an array that lies in no module asked, for names of a field.
        by_module: whether a module took them over.
    """

    names: Names
    depth: int
    giver: Giver
    used: set[str] = field(default_factory=set)
    by_leaf: bool = False
    by_module: bool = False


def check_names(names: Mapping[type, Names]) -> None:
    """Raise AxesError for `names=` that are no `{cls: ft.names(...)}`."""
    for cls, given in names.items():
        if not isinstance(cls, type) or not isinstance(given, Names):
            raise AxesError(f"`names=` maps classes to `ft.names(...)`, not {cls!r} to {given!r}")


def given_at(node: Any, depth: int, pending: GivenNames | None, names: Mapping[type, Names]) -> tuple[GivenNames, ...]:
    """The names that begin to hold at a module.

    Args:
        node: the module.
        depth: the length of its path.
        pending: those of the annotation of a field above, for the first module below it.
        names: the layout's.
    """
    found: list[GivenNames] = []
    if pending is not None:
        pending.by_module = True
        found.append(GivenNames(pending.names, depth, Giver.FIELD))
    for cls in type(node).__mro__ if names else ():
        if cls in names:
            found.append(GivenNames(names[cls], depth, Giver.LAYOUT))
            break
    own = own_names(node)
    if own is not None:
        found.append(GivenNames(own, depth, Giver.MODULE))
    return tuple(found)


def given_axes(path: Path, several: Iterable[GivenNames]) -> Axes | None:
    """The axes that are given to a leaf: a field's own before a layout's before a module's, inner before outer."""
    for given in sorted(several, key=lambda given: (given.giver, -given.depth)):
        text = match_text(Path(path[given.depth :]))
        for pattern, axes in given.names:
            if glob_pattern(pattern).fullmatch(text):
                given.used.add(pattern)
                return axes
    return None


def unmatched(node: Any, path: tuple[Any, ...], several: Iterable[GivenNames]) -> list[Problem]:
    """Patterns given at a place for which it has no leaf. One whose leaf is None is fine."""
    suspects = [pattern for given in several for pattern, _ in given.names if pattern not in given.used]
    if not suspects:
        return []
    places = [Path.of(keys) for keys, _ in tree_flatten_with_path(node, is_leaf=lambda x: x is None)[0]]
    texts = [match_text(place) for place in places]
    missing = [p for p in suspects if not any(map(glob_pattern(p).fullmatch, texts))]
    return [_unmatched(node, Path(path), pattern, places) for pattern in missing if not _leads_to_none(node, pattern)]


def _leads_to_none(node: Any, pattern: str) -> bool:
    """Whether a pattern without wildcards leads to None, or through it: to a part that the module goes without.

    An optimizer puts other empty nodes in the place of parameters that it leaves alone; they count too.
    """
    if literal_text(pattern) is None:
        return False
    for key in Path.parse(pattern):
        try:
            node = getattr(node, key) if isinstance(key, str) and hasattr(node, key) else node[key]
        except (TypeError, LookupError):
            return False
        if not tree_leaves(node):
            return True
    return False


def _unmatched(node: Any, path: Path, pattern: str, places: Iterable[Path]) -> Problem:
    cls = type(node).__name__
    why = f"`ft.names` gives axes to `{pattern}`, and {cls} has no such leaf{did_you_mean(pattern, places)}"
    named = [f"`{place}`" for place in places if place][:4]
    remedy = f"name a leaf of {cls}: {', '.join(named)}" if named else "write `Annotated[Array, ft.Axes(...)]`"
    return Problem(path, None, cls, why, remedy)
