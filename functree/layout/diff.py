"""What differs between two plans, or two ledgers ─► `Diff`: rows, and a table."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from functree.layout.plan.fold import common_path, pattern_of
from functree.layout.table import WIDTH, wrapped
from functree.tree.paths import Path

_K = TypeVar("_K")
_V = TypeVar("_V")


class Change(NamedTuple):
    """One thing that differs.

    Attributes:
        path: the path of the leaf; empty for what is not about a single leaf.
        what: the property: `spec`, `bytes on each device`, `all-gather over data`.
        before: its value in the first of the two; None if the first does not have it.
        after: its value in the second.
    """

    path: Path
    what: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Diff:
    """What differs between two plans or two ledgers. It is false if nothing does.

    Attributes:
        rows: one for each thing that differs.

    Examples:
        >>> before = ft.plan({"w": jnp.ones((8, 8))}, ft.P("model"), {"model": 4})
        >>> after = ft.plan({"w": jnp.ones((8, 8))}, ft.P(), {"model": 4})
        >>> print(before.diff(after))
        w: spec P('model', None) → P(None, None)
        w: bytes on each device 64 → 256
        >>> bool(before.diff(before))
        False
    """

    rows: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        return "\n".join(line for text in self._lines() for line in wrapped(text, WIDTH))

    def _lines(self) -> Iterator[str]:
        """One line for all changes that differ only in the indices of their paths."""
        groups: dict[Any, list[Change]] = {}
        for row in self.rows:
            alike = (pattern_of(row.path), row.what, _text(row.before), _text(row.after))
            groups.setdefault(alike, []).append(row)
        for rows in groups.values():
            row = rows[0]
            where = f"{common_path([one.path for one in rows])}: " if row.path else ""
            times = f" (×{len(rows)})" if len(rows) > 1 else ""
            yield f"{where}{row.what} {_text(row.before)} → {_text(row.after)}{times}"


def _text(value: Any) -> str:
    return "nothing" if value is None else str(value)


def changes(
    before: Mapping[_K, _V],
    after: Mapping[_K, _V],
    path: Callable[[_K], Path],
    properties: Callable[[_K, _V], Mapping[str, Any]],
    whole: Callable[[_K, _V], tuple[str, Any]],
) -> Iterator[Change]:
    """What differs between two mappings: what only one of them has, and the properties that are not equal.

    Args:
        before: the first.
        after: the second.
        path: a key ─► the path of its leaf.
        properties: a key and its value ─► what is compared, by name.
        whole: a key and its value ─► what is said of one that only one of them has: its name and its text.
    """
    for key in dict.fromkeys([*before, *after]):
        if key not in after:
            what, text = whole(key, before[key])
            yield Change(path(key), what, text, None)
        elif key not in before:
            what, text = whole(key, after[key])
            yield Change(path(key), what, None, text)
        else:
            old, new = properties(key, before[key]), properties(key, after[key])
            yield from (Change(path(key), name, old[name], new[name]) for name in old if old[name] != new[name])
