"""A plan ─► a table for a log, and a page for a notebook. Equal layers of a list are one row."""

import html
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from functree.layout.row import Row
from functree.layout.specs import spec_text
from functree.tree.leaf import dtype_text
from functree.tree.paths import part_text

WIDTH = 100
COLUMNS = (36, 18, 30)  # of path, array and spec


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


def plan_text(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The table, at most 100 columns wide: for each leaf a line for what goes where, then its axes and the reason."""
    blocks = []
    for line in fold(rows):
        title = line.title
        if cell_len(title) > COLUMNS[0]:  # a path that was broken could not be searched for
            blocks.append(Text(title, overflow="fold"))
            title = ""
        blocks += [_columns(title, line.array, line.spec, bytes_text(line.each)), Padding(line.told, (0, 0, 0, 4))]
    titles = _columns("path", "array", "spec", "per device")
    return "\n".join([*_rendered(Group(titles, *blocks)), "", *_rendered(Group(*map(Text, notes)))])


def _columns(*cells: str) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for width in COLUMNS:
        grid.add_column(width=width, overflow="fold")
    grid.add_column(width=10, justify="right", no_wrap=True)
    grid.add_row(*cells)
    return grid


def _rendered(content: RenderableType) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=WIDTH, no_color=True, highlight=False, markup=False, emoji=False).print(content)
    return [line.rstrip() for line in out.getvalue().splitlines()]


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


STYLE = """
.functree{font:14px/1.45 system-ui,sans-serif;color:#1c2430;background:#fff;padding:.5em;overflow-x:auto}
.functree table{border-collapse:collapse;width:100%}
.functree th{text-align:left;color:#5b6675;font-weight:600;border-bottom:2px solid #dfe4ea}
.functree td,.functree th{padding:.3em .9em .3em 0;vertical-align:top;text-align:left}
.functree tr+tr td{border-top:1px solid #eef1f4}
.functree code{font:13px ui-monospace,monospace;background:none}
.functree .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.functree .bar{height:6px;background:#3b6fd4;border-radius:3px;margin-top:4px}
.functree .copied .bar{background:#d98324}
.functree .why{color:#5b6675}
.functree .problem{color:#b3261e}
"""


def plan_html(rows: Sequence[Row], notes: Sequence[str], devices: int, page: bool) -> str:
    """The same as HTML: a bar for the bytes on each device, orange where every device keeps all of it."""
    lines = fold(rows)
    most = max((line.each for line in lines), default=1) or 1
    titles = "".join(f"<th>{title}</th>" for title in ("path", "array", "axes", "spec", "per device", "why"))
    body = "".join(_html_row(line, most, devices) for line in lines)
    told = "".join(f"<p{' class=problem' if n.startswith('PROBLEM') else ''}>{html.escape(n)}</p>" for n in notes)
    fragment = f'<style>{STYLE}</style><div class="functree">{told}<table><tr>{titles}</tr>{body}</table></div>'
    if not page:
        return fragment
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>functree plan</title></head>'
    return f"{head}<body>{fragment}</body></html>"


def _html_row(line: Line, most: int, devices: int) -> str:
    copied = devices > 1 and line.copies == devices
    texts = (line.title, line.array, line.axes, line.spec)
    cells = "".join(f"<td><code>{html.escape(text)}</code></td>" for text in texts)
    width = max(1, round(100 * line.each / most))
    bar = f'<td class="n">{bytes_text(line.each)}<div class="bar" style="width:{width}%"></div></td>'
    title = f"{bytes_text(line.total)} in all, each byte on {line.copies} device{'s' if line.copies > 1 else ''}"
    why = f'<td class="why">{html.escape(line.reason)}</td>'
    return f'<tr title="{title}"{" class=copied" if copied else ""}>{cells}{bar}{why}</tr>'
