"""Names given from outside, by a field's `ft.names`, a layout's `names=` or the module itself ─► a leaf's axes."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.tree_util import tree_flatten_with_path

from functree.errors import Problem, did_you_mean
from functree.tree.axes import Axes, Names
from functree.tree.globs import glob_regex, literal_text, match_text
from functree.tree.paths import Path


@dataclass(frozen=True)
class Scope:
    """`ft.names` that hold below one module.

    Attributes:
        names: the patterns and their axes.
        depth: the length of the module's path; patterns begin there.
        rank: who gave them: 0 the field's own annotation, 1 the layout's `names=`, 2 the module.
        used: the patterns that a leaf matched.
    """

    names: Names
    depth: int
    rank: int
    used: set[str] = field(default_factory=set)


def open_scopes(
    node: Any, depth: int, pending: tuple[Names, int] | None, names: Mapping[type, Names]
) -> tuple[Scope, ...]:
    """The scopes that begin at a module: of the field that it stands in, of the layout, its own."""
    opened = []
    if pending is not None:
        opened.append(Scope(pending[0], depth, 0))
    for cls in type(node).__mro__ if names else ():
        if cls in names:
            opened.append(Scope(names[cls], depth, 1))
            break
    if hasattr(type(node), "__axis_names__"):
        opened.append(Scope(node.__axis_names__(), depth, 2))
    return tuple(opened)


def scoped_axes(path: Path, scopes: Iterable[Scope]) -> Axes | None:
    """The axes that the scopes give to a leaf: a field's own before a layout's before a module's, inner before outer."""
    for scope in sorted(scopes, key=lambda scope: (scope.rank, -scope.depth)):
        text = match_text(Path(path[scope.depth :]))
        for pattern, axes in scope.names:
            if re.fullmatch(glob_regex(pattern), text, re.DOTALL):
                scope.used.add(pattern)
                return axes
    return None


def unmatched(node: Any, path: tuple[Any, ...], scopes: Iterable[Scope]) -> list[Problem]:
    """Patterns of a module's scopes for which the module has no place. One whose place holds None is fine."""
    suspects = [pattern for scope in scopes for pattern, _ in scope.names if pattern not in scope.used]
    if not suspects:
        return []
    places = [Path.of(keys) for keys, _ in tree_flatten_with_path(node, is_leaf=lambda x: x is None)[0]]
    texts = [match_text(place) for place in places]
    missing = [p for p in suspects if not any(re.fullmatch(glob_regex(p), text, re.DOTALL) for text in texts)]
    return [_problem(node, Path(path), pattern, places) for pattern in missing if not _static_none(node, pattern)]


def _static_none(node: Any, pattern: str) -> bool:
    return literal_text(pattern) is not None and getattr(node, pattern, ...) is None


def _problem(node: Any, path: Path, pattern: str, places: Iterable[Path]) -> Problem:
    cls = type(node).__name__
    return Problem(
        path,
        None,
        cls,
        f"`ft.names` gives axes to `{pattern}`, and {cls} has no such leaf{did_you_mean(pattern, places)}",
        f"name a leaf of {cls}: {', '.join(f'`{place}`' for place in list(places)[:4])}",
    )
