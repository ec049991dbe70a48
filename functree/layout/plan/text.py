"""The rows of a plan ─► a table as text."""

from collections.abc import Sequence

from functree.layout.plan.fold import fold
from functree.layout.plan.row import Row
from functree.report.byte_sizes import bytes_text
from functree.report.table import columns, lines_text, paragraphs, row

COLUMNS = (36, 18, 30)  # of path, array and spec


def plan_text(
    rows: Sequence[Row],
    notes: Sequence[str],
    warnings: Sequence[str] = (),
    column: str = "per device",
) -> str:
    """The table, at most 100 columns wide. Below the spec of each leaf are its axes and the reason.

    Args:
        rows: one for each array.
        notes: the lines below the table.
        warnings: the lines above it.
        column: the title of the last column, the bytes of each line.
    """
    lines = paragraphs(warnings)
    if warnings:
        lines.append("")
    lines += columns(("path", "array", "spec"), COLUMNS, column)
    for line in fold(rows):
        cells = (line.title, line.array, line.spec)
        lines += row(cells, COLUMNS, bytes_text(line.each), line.told)
    return lines_text([*lines, "", *paragraphs(notes)])
