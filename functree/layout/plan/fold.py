"""The rows of a plan ─► lines, in which the equal layers of a list are one line."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from functree.layout.plan.row import Row
from functree.layout.specs import spec_text
from functree.tree.arrays import dtype_text
from functree.tree.paths import Path, part_text


class Line(NamedTuple):
    """One or more rows that differ only in the indices of their paths."""

    path: str
    array: str
    axes: str
    spec: str
    each: int  # bytes on one device, of all rows together
    total: int  # bytes of all arrays
    copies: int
    reason: str
    rows: int  # the number of rows

    @property
    def title(self) -> str:
        """The path, and the number of rows if there are several."""
        return f"{self.path} ×{self.rows}" if self.rows > 1 else self.path

    @property
    def told(self) -> str:
        """The axes and the reason."""
        return ": ".join(filter(None, (self.axes, self.reason)))


def fold(rows: Sequence[Row]) -> list[Line]:
    """One line for all rows that differ only in the indices of their paths."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        same = (row.shape, str(row.dtype), row.axes, row.spec, row.reason, row.memory_kind, row.copies)
        alike = (pattern_of(row.path), *same)
        groups.setdefault(alike, []).append(row)
    return [line for group in groups.values() for line in _lines(group)]


def pattern_of(path: Path) -> tuple[Any, ...]:
    """A path without its indices. An int that is the key of a dict counts as an index too."""
    return tuple("*" if isinstance(key, int) else key for key in path)


def _lines(rows: Sequence[Row]) -> list[Line]:
    """One line if the indices are a full grid, and else one line for each row."""
    # The title `a.{0-1}.b.{0-1}` is for four rows. If there are only three of them, it would be wrong.
    grid = math.prod(len(set(keys)) for keys in zip(*(row.path for row in rows), strict=True))
    if grid == len(rows):
        return [_line(rows)]
    return [_line([row]) for row in rows]


def _line(rows: Sequence[Row]) -> Line:
    """One line for some rows."""
    row = rows[0]
    spec = spec_text(row.spec) if row.spec is not None else "-"
    return Line(
        common_path([row.path for row in rows]),
        f"{dtype_text(row.dtype)}[{', '.join(map(str, row.shape))}]",
        str(row.axes) if any(row.axes) else "",
        f"{spec} {row.memory_kind}" if row.memory_kind else spec,
        sum(r.bytes_per_device for r in rows),
        sum(r.bytes_global for r in rows),
        row.copies,
        row.reason,
        len(rows),
    )


def common_path(paths: Sequence[Path]) -> str:
    """`blocks.{0-10,12}.w` for the paths `blocks.0.w` to `blocks.10.w` and `blocks.12.w`."""
    parts = []
    for keys in zip(*paths, strict=True):
        if len(set(keys)) > 1:
            parts.append("{" + _ranges(sorted(set(keys))) + "}")
        else:
            parts.append(part_text(keys[0]))
    return ".".join(parts) or "(the array)"


def _ranges(indices: Sequence[int]) -> str:
    """The text of sorted indices: `0-3,5` for 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def bytes_text(size: float) -> str:
    """A number of bytes as text: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size == math.floor(size) else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
