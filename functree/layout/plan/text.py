"""The rows of a plan ─► a table as text."""

from collections.abc import Sequence

from functree.layout.plan.fold import bytes_text, fold
from functree.layout.plan.row import Row
from functree.layout.table import INDENT, WIDTH, columns, width, wrapped

COLUMNS = (36, 18, 30)  # of path, array and spec


def plan_text(
    rows: Sequence[Row], notes: Sequence[str], warnings: Sequence[str] = (), column: str = "per device"
) -> str:
    """The table, at most 100 columns wide. Below the spec of each leaf are its axes and the reason.

    Args:
        rows: one for each array.
        notes: the lines below the table.
        warnings: the lines above it.
        column: the title of the last column, the bytes of each line.
    """
    lines: list[str] = []
    for warning in warnings:
        lines += wrapped(warning, WIDTH)
    if warnings:
        lines.append("")
    lines += columns(("path", "array", "spec"), COLUMNS, column)
    for line in fold(rows):
        title = line.title
        if width(title) > COLUMNS[0]:  # a long path has a line of its own, so that it can be searched for
            lines += wrapped(title, WIDTH)
            title = ""
        lines += columns((title, line.array, line.spec), COLUMNS, bytes_text(line.each))
        lines += [INDENT + part for part in wrapped(line.told, WIDTH - len(INDENT)) if part]
    lines.append("")
    for note in notes:
        lines += wrapped(note, WIDTH)
    return "\n".join([line.rstrip() for line in lines])
