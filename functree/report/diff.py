"""A `Diff` lists the differences between two plans or two ledgers, as rows and as text."""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from functree.report.page import Report, code, leaf_html, report_html
from functree.report.table import (
    Bytes,
    alternatives,
    but_for_key,
    common_path,
    grouped,
    paragraphs,
    pattern_of,
)
from functree.tree.paths import Path

_K = TypeVar("_K")
_V = TypeVar("_V")


class Change(NamedTuple):
    """A property that differs between two plans or two ledgers.

    Attributes:
        path: the path of the leaf; empty if the change does not concern a single leaf.
        what: the property: `spec`, `bytes on each device`, `all-gather over data`.
        before: its value in the first plan or ledger; None if it is missing there.
        after: its value in the second plan or ledger; None if it is missing there.
    """

    path: Path
    what: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Diff(Report):
    """The differences between two plans or two ledgers. A `Diff` without differences is falsy.

    Attributes:
        rows: the differences. For ledgers, the differences with the most bytes come first.
        totals: the totals of both plans or ledgers, even if they are equal. For plans, these are
            the bytes on each device; for ledgers, the bytes moved to each device.

    Examples:
        >>> before = ft.plan({"w": jnp.ones((8, 8))}, ft.P("model"), {"model": 4})
        >>> after = ft.plan({"w": jnp.ones((8, 8))}, ft.P(), {"model": 4})
        >>> print(before.diff(after))
        on each device: 64 B → 256 B (+300 %)
        w: spec P('model', None) → P(None, None)
        w: bytes on each device 64 B → 256 B (+300 %)
        >>> print(before.diff(before))
        nothing differs
        >>> bool(before.diff(before))
        False
    """

    rows: tuple[Change, ...]
    totals: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        return "\n".join(paragraphs(self._lines()))

    def _lines(self) -> Iterator[str]:
        if not self.rows:
            yield "nothing differs"
            return
        for _, what, before, after in self.totals:
            if before == after:
                yield f"{what}: {before} in both"
            else:
                yield f"{what}: {_change_text(before, after)}"
        # Equal changes, across layers and a module's parameters, share a line.
        for rows in _alike(self.rows):
            path, _, before, after = rows[0]
            name = f"{common_path([row.path for row in rows])}: " if path else ""
            times = f" (×{len(rows)})" if len(rows) > 1 else ""
            yield f"{name}{_common_what(rows)} {_change_text(before, after)}{times}"

    def _html(self, page: bool) -> str:
        content = ""
        for line in self._lines():
            content += leaf_html(line, code(line), "")
        return report_html("Differences", "", f"<section>{content}</section>", page)


def _alike(rows: Sequence[Change]) -> list[list[Change]]:
    """Group equal changes across layers and a module's parameters, to show each group on a line."""
    groups = grouped(rows, _but_for_indices)
    # First `mlp.{gate,up}`, then `mlp.{gate,up}.weight`, where `gate` and `up` are modules.
    for from_end in (1, 2):
        groups = _joined(groups, from_end)
    return groups


def _joined(groups: Iterable[list[Change]], from_end: int) -> list[list[Change]]:
    """Join groups that differ only in the key at this position from the end."""

    def key(group: Sequence[Change]) -> Hashable:
        common = but_for_key([row.path for row in group], from_end)
        return id(group) if common is None else (common, *_change(group[0]))

    return [[row for group in alike for row in group] for alike in grouped(groups, key)]


def _but_for_indices(row: Change) -> Hashable:
    return pattern_of(row.path), *_change(row)


def _change(row: Change) -> tuple[Hashable, ...]:
    # Values are compared as text, because a dict of mesh axes has no hash.
    return _INDEX.sub("*", row.what), *map(_exact, row[2:])


# A property may list the paths of several leaves: `all-reduce over data for b.0.q, b.0.k`.
_INDEX = re.compile(r"(?<=\.)(\d+)\b")


def _common_what(rows: Sequence[Change]) -> str:
    """Format a property that several changes share: `... for b.{0-3}.q, b.{0-3}.k`."""
    what = ""
    # The texts are equal but for the indices, which are every second part.
    for position, parts in enumerate(zip(*[_INDEX.split(row.what) for row in rows], strict=True)):
        what += alternatives(list(map(int, parts))) if position % 2 else parts[0]
    return what


def _exact(value: object) -> str:
    return str(int(value)) if isinstance(value, Bytes) else str(value)


def by_bytes(rows: Sequence[Change]) -> tuple[Change, ...]:
    """Sort changes by bytes, largest first; the bytes of changes on one line are added up.

    Changes of other numbers, such as a collective's runs, come last. All other changes, such as a
    different mesh, come first.
    """

    def weight(alike: Sequence[Change]) -> float:
        _, _, before, after = alike[0]
        if isinstance(before, Bytes) or isinstance(after, Bytes):
            return len(alike) * abs((after or 0) - (before or 0))
        return 0 if isinstance(before, int) else math.inf

    return tuple(chain.from_iterable(sorted(_alike(rows), key=weight, reverse=True)))


def _change_text(before: object, after: object) -> str:
    """Format a change; a change of bytes ends with ` (−50 %)`, unless `before` is 0 or None."""
    texts = ["nothing" if value is None else str(value) for value in (before, after)]
    text = " → ".join(texts)
    if not isinstance(before, Bytes) or not isinstance(after, Bytes) or not before:
        return text
    percent = 100 * abs(after - before) / before
    digits = f"{percent:,.0f}" if percent >= 1 else f"{percent:.1g}"
    sign = "−" if after < before else "+"
    return f"{text} ({sign}{digits} %)"


def changes(
    before: Mapping[_K, _V],
    after: Mapping[_K, _V],
    path: Callable[[_K], Path],
    properties: Callable[[_K, _V], Mapping[str, object]],
    whole: Callable[[_K, _V], tuple[str, object]],
) -> Iterator[Change]:
    """Yield the differences between two mappings: missing entries and unequal properties.

    Args:
        before: the first mapping.
        after: the second mapping.
        path: a function that returns the path of a key's leaf.
        properties: a function that returns the properties to compare, by name, for a key and its
            value.
        whole: a function that returns a name and a value for an entry that only one mapping has.
    """
    # Entries are in the order of the first mapping. Entries that are only in the second mapping
    # come last.
    for key in dict.fromkeys([*before, *after]):
        if key not in after:
            what, text = whole(key, before[key])
            yield Change(path(key), what, text, None)
        elif key not in before:
            what, text = whole(key, after[key])
            yield Change(path(key), what, None, text)
        else:
            # Equal keys have the same properties.
            old, new = properties(key, before[key]), properties(key, after[key])
            for name in old:
                if old[name] != new[name]:
                    yield Change(path(key), name, old[name], new[name])
