"""The rows of a plan ─► lines, in which the equal layers of a list are one line."""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from functree.devices.specs import spec_text
from functree.layout.plan.cut import cut_text
from functree.layout.plan.row import Row
from functree.report.path_groups import common_parts, grouped, pattern_of
from functree.tree.arrays import array_text


class Line(NamedTuple):
    """One or more rows that differ only in the indices of their paths."""

    parts: tuple[str, ...]  # the text of each key of the path
    array: str
    cut: str  # the array with the mesh axes that divide its sizes
    axes: str
    spec: str
    each: int  # bytes on one device, of all rows together
    total: int  # bytes of all arrays
    copies: int
    reason: str
    rows: tuple[Row, ...]

    @property
    def path(self) -> str:
        """The path, with all indices of the rows."""
        return ".".join(self.parts) or "(the array)"

    @property
    def title(self) -> str:
        """The path, and the number of rows if there are several."""
        return f"{self.path} ×{len(self.rows)}" if len(self.rows) > 1 else self.path

    @property
    def told(self) -> str:
        """The axes and the reason."""
        return ": ".join(filter(None, (self.axes, self.reason)))


def fold(rows: Sequence[Row]) -> list[Line]:
    """One line for all rows that differ only in the indices of their paths."""
    lines: list[Line] = []
    for group in grouped(rows, _but_for_indices):
        lines += _lines(group)
    return lines


def _but_for_indices(row: Row) -> Hashable:
    return (
        pattern_of(row.path),
        row.shape,
        str(row.dtype),
        row.axes,
        row.spec,
        row.reason,
        row.memory_kind,
        row.copies,
    )


def _lines(rows: Sequence[Row]) -> list[Line]:
    """One line if the indices are a full grid, and else one line for each row."""
    # The title `a.{0-1}.b.{0-1}` is for four rows. If there are only three of them, it would be
    # wrong.
    paths = [row.path for row in rows]
    different = map(set, zip(*paths, strict=True))  # the keys at each depth of the paths
    grid = math.prod(map(len, different))
    if grid == len(rows):
        return [_line(rows)]
    return [_line([row]) for row in rows]


def _line(rows: Sequence[Row]) -> Line:
    """One line for some rows."""
    row = rows[0]
    spec = spec_text(row.spec) if row.spec is not None else "-"
    return Line(
        tuple(common_parts([row.path for row in rows])),
        array_text(row),
        cut_text(row),
        str(row.axes) if any(row.axes) else "",
        f"{spec} {row.memory_kind}" if row.memory_kind else spec,
        sum(r.bytes_per_device for r in rows),
        sum(r.bytes_global for r in rows),
        row.copies,
        row.reason,
        tuple(rows),
    )
