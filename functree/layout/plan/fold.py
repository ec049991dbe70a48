"""The rows of a plan ─► lines, in which equal layers of a list are one."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from functree.layout.plan.row import Row
from functree.layout.specs import spec_text
from functree.tree.arrays import dtype_text
from functree.tree.paths import part_text


class Line(NamedTuple):
    """Rows that differ only in an index on their way."""

    path: str
    array: str
    axes: str
    spec: str
    each: int  # bytes on one device, of all its rows together
    total: int
    copies: int
    reason: str
    rows: int

    @property
    def title(self) -> str:
        return f"{self.path} ×{self.rows}" if self.rows > 1 else self.path

    @property
    def told(self) -> str:
        return f"{self.axes}: {self.reason}" if self.axes else self.reason


def fold(rows: Sequence[Row]) -> list[Line]:
    """One line for rows that are alike but for the indices in their paths."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        pattern = tuple("*" if isinstance(key, int) else key for key in row.path)
        alike = (pattern, row.shape, str(row.dtype), row.axes, row.spec, row.reason, row.memory_kind, row.copies)
        groups.setdefault(alike, []).append(row)
    return [line for group in groups.values() for line in _lines(group)]


def _lines(rows: Sequence[Row]) -> list[Line]:
    """One line where the indices are a full grid, so that its title says exactly which rows it is for."""
    grid = math.prod(len(set(keys)) for keys in zip(*(row.path for row in rows), strict=True))
    return [_line(rows)] if grid == len(rows) else [_line([row]) for row in rows]


def _line(rows: Sequence[Row]) -> Line:
    row = rows[0]
    spec = spec_text(row.spec) if row.spec is not None else "-"
    return Line(
        _common_path(rows),
        f"{dtype_text(row.dtype)}[{', '.join(map(str, row.shape))}]",
        str(row.axes) if any(row.axes) else "",
        f"{spec} {row.memory_kind}" if row.memory_kind else spec,
        sum(r.bytes_per_device for r in rows),
        sum(r.bytes_global for r in rows),
        row.copies,
        row.reason,
        len(rows),
    )


def _common_path(rows: Sequence[Row]) -> str:
    """`blocks.{0-10,12}.w` for the paths `blocks.0.w` to `blocks.10.w` and `blocks.12.w`."""
    parts = []
    for keys in zip(*(row.path for row in rows), strict=True):
        different = sorted(set(keys)) if len(set(keys)) > 1 else []
        parts.append(f"{{{_ranges(different)}}}" if different else part_text(keys[0]))
    return ".".join(parts) or "(the array)"


def _ranges(indices: Sequence[int]) -> str:
    """`0-3,5` for 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def bytes_text(size: float) -> str:
    """`1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size == math.floor(size) else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
