"""The rows of a plan ─► a table as text.

The lines are put together here: a table of rich takes 0.3 ms for each row, which is ten seconds for a large model.
"""

from collections.abc import Sequence
from itertools import zip_longest

from functree.layout.plan.fold import bytes_text, fold
from functree.layout.plan.row import Row

WIDTH = 100
COLUMNS = (36, 18, 30)  # of path, array and spec
INDENT = "    "


def plan_text(rows: Sequence[Row], notes: Sequence[str], warnings: Sequence[str] = ()) -> str:
    """The table, at most 100 columns wide. Below the spec of each leaf are its axes and the reason.

    Args:
        rows: one for each array.
        notes: the lines below the table.
        warnings: the lines above it.
    """
    lines: list[str] = []
    for warning in warnings:
        lines += _wrapped(warning, WIDTH)
    if warnings:
        lines.append("")
    lines += _columns("path", "array", "spec", "per device")
    for line in fold(rows):
        title = line.title
        if _width(title) > COLUMNS[0]:  # a long path has a line of its own, so that it can be searched for
            lines += _wrapped(title, WIDTH)
            title = ""
        lines += _columns(title, line.array, line.spec, bytes_text(line.each))
        lines += [INDENT + part for part in _wrapped(line.told, WIDTH - len(INDENT))]
    lines.append("")
    for note in notes:
        lines += _wrapped(note, WIDTH)
    return "\n".join([line.rstrip() for line in lines])


def _columns(path: str, array: str, spec: str, size: str) -> list[str]:
    """One line of the table; several if a cell is too long for its column."""
    cells = [_wrapped(cell, width) for cell, width in zip((path, array, spec), COLUMNS, strict=True)]
    lines: list[str] = []
    for parts in zip_longest(*cells, [size.rjust(10)], fillvalue=""):
        padded = [part + " " * (width - _width(part)) for part, width in zip(parts, COLUMNS, strict=False)]
        lines.append("  ".join([*padded, parts[-1]]))
    return lines


def _width(text: str) -> int:
    """The number of columns of a text on a terminal: some characters take two, and some none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # rich takes long to import, and most tables do not need it

    return cell_len(text)


def _wrapped(text: str, width: int) -> list[str]:
    """A text in lines. Words that are too long for a line are cut."""
    if _width(text) <= width:
        return [text]
    from rich.console import Console
    from rich.text import Text

    return [line.plain for line in Text(text).wrap(Console(width=width), width, overflow="fold")]
