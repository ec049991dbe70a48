"""Cells of text ─► the lines of a table of fixed width.

The lines are put together here: a table of rich takes 0.3 ms for each row, which is ten seconds for a large model.
"""

from collections.abc import Sequence
from itertools import zip_longest

WIDTH = 100
INDENT = "    "


def columns(cells: Sequence[str], widths: Sequence[int], number: str) -> list[str]:
    """One line of a table; several if a cell is too long for its column.

    Args:
        cells: the texts of a line, without the last one.
        widths: the widths of their columns.
        number: the text of the last column, which is aligned to the right.
    """
    several = [wrapped(cell, wide) for cell, wide in zip(cells, widths, strict=True)]
    lines: list[str] = []
    for parts in zip_longest(*several, [number.rjust(10)], fillvalue=""):
        padded = [part + " " * (wide - width(part)) for part, wide in zip(parts, widths, strict=False)]
        lines.append("  ".join([*padded, parts[-1]]))
    return lines


def width(text: str) -> int:
    """The number of columns of a text on a terminal: some characters take two, and some none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # rich takes long to import, and most tables do not need it

    return cell_len(text)


def wrapped(text: str, most: int) -> list[str]:
    """A text in lines of at most so many columns. Words that are too long for a line are cut."""
    if width(text) <= most:
        return [text]
    from rich.console import Console
    from rich.text import Text

    return [line.plain for line in Text(text).wrap(Console(width=most), most, overflow="fold")]
