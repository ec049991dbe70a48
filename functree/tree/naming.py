"""Names given from outside, by a field's `ft.names`, a layout's `names=` or the module itself ─► a leaf's axes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.tree_util import tree_flatten_with_path, tree_leaves

from functree.errors import Problem, did_you_mean
from functree.tree.axes import Axes, Names
from functree.tree.globs import glob_pattern, literal_text, match_text
from functree.tree.paths import Path


@dataclass(eq=False)
class Scope:
    """`ft.names` that hold below one place of a tree.

    Attributes:
        names: the patterns and their axes.
        depth: the length of the place's path; patterns begin there.
        rank: who gave them: 0 the field's own annotation, 1 the layout's `names=`, 2 the module.
        used: the patterns that a leaf matched.
        by_leaf: whether an array that lies in no module asked, for names of a field.
        by_module: whether a module took them over.
    """

    names: Names
    depth: int
    rank: int
    used: set[str] = field(default_factory=set)
    by_leaf: bool = False
    by_module: bool = False


def open_scopes(node: Any, depth: int, pending: Scope | None, names: Mapping[type, Names]) -> tuple[Scope, ...]:
    """The scopes that begin at a module: of the field that it stands in, of the layout, its own."""
    opened: list[Scope] = []
    if pending is not None:
        pending.by_module = True
        opened.append(Scope(pending.names, depth, 0))
    for cls in type(node).__mro__ if names else ():
        if cls in names:
            opened.append(Scope(names[cls], depth, 1))
            break
    if hasattr(type(node), "__axis_names__"):
        opened.append(Scope(node.__axis_names__(), depth, 2))
    return tuple(opened)


def scoped_axes(path: Path, scopes: Iterable[Scope]) -> Axes | None:
    """The axes that scopes give to a leaf: a field's own before a layout's before a module's, inner before outer."""
    for scope in sorted(scopes, key=lambda scope: (scope.rank, -scope.depth)):
        text = match_text(Path(path[scope.depth :]))
        for pattern, axes in scope.names:
            if glob_pattern(pattern).fullmatch(text):
                scope.used.add(pattern)
                return axes
    return None


def unmatched(node: Any, path: tuple[Any, ...], scopes: Iterable[Scope]) -> list[Problem]:
    """Patterns of a place's scopes for which it has no leaf. One whose leaf is None is fine."""
    suspects = [pattern for scope in scopes for pattern, _ in scope.names if pattern not in scope.used]
    if not suspects:
        return []
    places = [Path.of(keys) for keys, _ in tree_flatten_with_path(node, is_leaf=lambda x: x is None)[0]]
    texts = [match_text(place) for place in places]
    missing = [p for p in suspects if not any(map(glob_pattern(p).fullmatch, texts))]
    return [_problem(node, Path(path), pattern, places) for pattern in missing if not _is_none(node, pattern)]


def _is_none(node: Any, pattern: str) -> bool:
    """Whether a pattern without wildcards leads to nothing, or through it: to a part that the module goes without.

    That is None, or what an optimizer puts in the place of parameters that it leaves alone.
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


def _problem(node: Any, path: Path, pattern: str, places: Iterable[Path]) -> Problem:
    cls = type(node).__name__
    why = f"`ft.names` gives axes to `{pattern}`, and {cls} has no such leaf{did_you_mean(pattern, places)}"
    named = [f"`{place}`" for place in places if place][:4]
    remedy = f"name a leaf of {cls}: {', '.join(named)}" if named else "write `Annotated[Array, ft.Axes(...)]`"
    return Problem(path, None, cls, why, remedy)
