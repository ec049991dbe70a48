"""Cells of text ─► the lines of a table of fixed width.

The lines are put together here: a table of rich takes 0.3 ms for each row, which is ten seconds for
a large model.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

WIDTH = 100
INDENT = "    "


def row_lines(cells: Sequence[str], widths: Sequence[int], number: str, details: str) -> list[str]:
    """The lines of one row of a table, as `columns`, and below them what has no column.

    Args:
        cells: as of `columns`. The first one is the name of the row.
        widths: the widths of their columns.
        number: the text of the last column.
        details: what is told below; may be empty.
    """
    lines: list[str] = []
    name, *others = cells
    if width(name) > widths[0]:
        # On lines of its own, in one piece where it fits: so that a long path can be searched for.
        lines += wrapped(name, WIDTH)
        name = ""
    lines += columns((name, *others), widths, number)
    for part in wrapped(details, WIDTH - len(INDENT)):
        if part:
            lines.append(INDENT + part)
    return lines


def columns(cells: Sequence[str], widths: Sequence[int], number: str) -> list[str]:
    """One line of a table; several if a cell is too long for its column.

    Args:
        cells: the texts of a line, without the last one.
        widths: the widths of their columns.
        number: the text of the last column, which is aligned to the right.
    """
    parts = [wrapped(cell, wide) for cell, wide in zip(cells, widths, strict=True)]
    lines: list[str] = []
    for *texts, last in zip_longest(*parts, [number.rjust(10)], fillvalue=""):
        line = ""
        for text, wide in zip(texts, widths, strict=True):
            # Not by `ljust`, which counts characters: some take two columns of a terminal.
            line += text + " " * (wide - width(text)) + "  "
        lines.append(line + last)
    return lines


def paragraphs(texts: Iterable[str]) -> list[str]:
    """Texts as lines that are no wider than a table."""
    lines: list[str] = []
    for text in texts:
        lines += wrapped(text, WIDTH)
    return lines


def numbered(number: int, text: str) -> list[str]:
    """The lines of an item of a numbered list."""
    lines: list[str] = []
    for part in wrapped(text, WIDTH - len(INDENT)):
        head = "" if lines else str(number)
        lines.append(head.rjust(3).ljust(len(INDENT)) + part)
    return lines


def lines_text(lines: Iterable[str]) -> str:
    """Lines as one text, without the spaces at their ends."""
    return "\n".join(map(str.rstrip, lines))


def width(text: str) -> int:
    """The number of columns of a text on a terminal: some characters take two, and some none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # rich takes long to import, and most tables do not need it

    return cell_len(text)


def wrapped(text: str, most: int) -> list[str]:
    """A text in lines of at most so many columns. Words that are too long for a line are cut."""
    # Most texts are short enough, and need no rich.
    if width(text) <= most:
        return [text]
    from rich.console import Console
    from rich.text import Text

    folded = Text(text).wrap(Console(width=most), most, overflow="fold")
    return [line.plain for line in folded]
