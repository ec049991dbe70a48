"""What differs between two plans, or two ledgers ─► `Diff`: rows, and a table."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from functree.report.path_groups import common_path, grouped, pattern_of
from functree.report.table import paragraphs
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
        return "\n".join(paragraphs(self._lines()))

    def _lines(self) -> Iterator[str]:
        """One line for all changes that differ only in the indices of their paths."""
        for rows in grouped(self.rows, _but_for_indices):
            path, what, before, after = rows[0]
            line = f"{what} {_text(before)} → {_text(after)}"
            if path:
                line = f"{common_path([row.path for row in rows])}: {line}"
            if len(rows) > 1:
                line = f"{line} (×{len(rows)})"
            yield line


def _but_for_indices(row: Change) -> Hashable:
    # Values by their texts: a dict of mesh axes has no hash.
    return pattern_of(row.path), row.what, _text(row.before), _text(row.after)


def _text(value: object) -> str:
    if value is None:
        return "nothing"
    return str(value)


def changes(
    before: Mapping[_K, _V],
    after: Mapping[_K, _V],
    path: Callable[[_K], Path],
    properties: Callable[[_K, _V], Mapping[str, object]],
    whole: Callable[[_K, _V], tuple[str, str]],
) -> Iterator[Change]:
    """What differs between two mappings: entries of only one of them, and unequal properties.

    Args:
        before: the first.
        after: the second.
        path: a key ─► the path of its leaf.
        properties: a key and its value ─► what is compared, by name.
        whole: a key and its value ─► the name and the text of an entry that only one of them has.
    """
    # In the order of the first, and then what is only in the second.
    for key in dict.fromkeys([*before, *after]):
        if key not in after:
            what, text = whole(key, before[key])
            yield Change(path(key), what, text, None)
        elif key not in before:
            what, text = whole(key, after[key])
            yield Change(path(key), what, None, text)
        else:
            # Both have the same properties, since both have the same key.
            old, new = properties(key, before[key]), properties(key, after[key])
            for name in old:
                if old[name] != new[name]:
                    yield Change(path(key), name, old[name], new[name])
