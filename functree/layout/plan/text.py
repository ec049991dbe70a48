"""The rows of a plan ─► a table as text."""

import io
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from functree.layout.plan.fold import bytes_text, fold
from functree.layout.plan.row import Row

WIDTH = 100
COLUMNS = (36, 18, 30)  # of path, array and spec


def plan_text(rows: Sequence[Row], notes: Sequence[str], warnings: Sequence[str] = ()) -> str:
    """The table, at most 100 columns wide. Below the spec of each leaf are its axes and the reason.

    Args:
        rows: one for each array.
        notes: the lines below the table.
        warnings: the lines above it.
    """
    blocks = []
    for line in fold(rows):
        title = line.title
        if cell_len(title) > COLUMNS[0]:  # a long path has a line of its own, so that it can be searched for
            blocks.append(Text(title, overflow="fold"))
            title = ""
        blocks += [_columns(title, line.array, line.spec, bytes_text(line.each)), Padding(line.told, (0, 0, 0, 4))]
    titles = _columns("path", "array", "spec", "per device")
    head = [*_rendered(Group(*map(Text, warnings))), ""] if warnings else []
    return "\n".join([*head, *_rendered(Group(titles, *blocks)), "", *_rendered(Group(*map(Text, notes)))])


def _columns(*cells: str) -> Table:
    """One line of the table."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for width in COLUMNS:
        grid.add_column(width=width, overflow="fold")
    grid.add_column(width=10, justify="right", no_wrap=True)
    grid.add_row(*cells)
    return grid


def _rendered(content: RenderableType) -> list[str]:
    """The lines of a text by rich, without colours and markup: paths may contain `[...]`."""
    out = io.StringIO()
    Console(file=out, width=WIDTH, no_color=True, highlight=False, markup=False, emoji=False).print(content)
    return [line.rstrip() for line in out.getvalue().splitlines()]
