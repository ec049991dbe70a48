"""The rows of a plan ─► HTML, for a notebook or a browser."""

from collections.abc import Sequence

from functree.errors import count
from functree.layout.plan.fold import Line, fold
from functree.layout.plan.row import Row
from functree.report.byte_sizes import bytes_text
from functree.report.page import (
    bar_cell,
    code_cells,
    comment_cell,
    notes_html,
    report_html,
    table_html,
)


def plan_html(
    rows: Sequence[Row],
    problems: Sequence[str],
    notes: Sequence[str],
    devices: int,
    page: bool,
) -> str:
    """The plan as HTML, with a bar for the bytes on each device. The bar of a replicated array is
    orange.

    Args:
        rows: the rows of the plan.
        problems: what is wrong, and stands out.
        notes: the other lines about the whole plan.
        devices: the number of devices.
        page: whether to return a whole page, and not a fragment for a notebook.
    """
    lines = fold(rows)
    most = max((line.each for line in lines), default=0)
    titles = ("path", "array", "axes", "spec", "per device", "why")
    table = table_html(titles, (_html_row(line, most, devices) for line in lines))
    return report_html(notes_html(problems, notes) + table, "functree plan", page)


def _html_row(line: Line, most: int, devices: int) -> str:
    """One row of the table; `most` is the number of bytes of the longest bar."""
    kind = ""
    if devices > 1 and line.copies == devices:
        kind = ' class="copied"'
    cells = (
        code_cells(line.title, line.array, line.axes, line.spec),
        bar_cell(bytes_text(line.each), line.each, most),
        comment_cell(line.reason),
    )
    copies = f"each byte on {count(line.copies, 'device')}"
    title = f"{bytes_text(line.total)} in all, {copies}"
    return f'<tr title="{title}"{kind}>{"".join(cells)}</tr>'
