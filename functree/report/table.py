"""Cells of text ─► the lines of a table of fixed width; and the texts of paths and bytes in it.

The lines are put together here: a table of rich takes 0.3 ms for each row, which is ten seconds for
a large model.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

from functree.tree.paths import Path, part_text

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


_T = TypeVar("_T")


def grouped(values: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """The values with equal keys, in the order in which the keys come first."""
    groups: dict[Hashable, list[_T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return list(groups.values())


def pattern_of(path: Path) -> tuple[object, ...]:
    """A path without its indices. An int that is the key of a dict counts as an index too."""
    return tuple("*" if isinstance(key, int) else key for key in path)


def but_for_key(paths: Sequence[Path], from_end: int) -> Hashable:
    """What paths of one length have in common, but for the key at this position from the end: it is
    equal for `attn.query` and `attn.key`. None if they have no such key, or it is an index: those
    of layers are joined by `common_path`, as far as that is exact."""
    if len(paths[0]) < from_end:
        return None
    keys = [frozenset(keys) for keys in zip(*paths, strict=True)]
    if any(isinstance(key, int) for key in keys.pop(-from_end)):
        return None
    return from_end, *keys


def common_path(paths: Sequence[Path]) -> str:
    """`blocks.{0-10,12}.w` for the paths `blocks.0.w` to `blocks.10.w` and `blocks.12.w`."""
    return ".".join(common_parts(paths)) or "(the array)"


def common_parts(paths: Sequence[Path]) -> list[str]:
    """The parts of such a text: `blocks`, `{0-10,12}`, `w`."""
    # Where several keys differ, `{0-1}.{0-1}` is exact only if the paths are all combinations. The
    # caller knows whether they are.
    return [alternatives(keys) for keys in zip(*paths, strict=True)]


def alternatives(keys: Sequence[object]) -> str:
    """The text of a key that may be one of several: `{0-3}`, `{query,key}`."""
    different = list(dict.fromkeys(keys))
    if len(different) == 1:
        return part_text(different[0])
    indices = [key for key in different if isinstance(key, int)]
    if len(indices) == len(different):
        return "{" + _ranges(sorted(indices)) + "}"
    return "{" + ",".join(map(part_text, different)) + "}"


def _ranges(indices: Sequence[int]) -> str:
    """The text of sorted indices: `0-3,5` for 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    texts: list[str] = []
    for first, *others in runs:
        texts.append(f"{first}-{others[-1]}" if others else str(first))
    return ",".join(texts)


UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Bytes(int):
    """A number of bytes, where others may be numbers of something else."""

    def __str__(self) -> str:
        return bytes_text(self)


def common_unit(sizes: Iterable[int]) -> int:
    """The index in `UNITS` of the unit of the largest of some sizes."""
    largest, unit = max(map(abs, sizes), default=0), 0
    while largest >= 1024 and unit < len(UNITS) - 1:
        largest /= 1024
        unit += 1
    return unit


def text_in_unit(size: int, unit: int) -> str:
    """A number of bytes in a unit, with at least three digits: `0.00391 MiB`.

    >>> (
    ...     text_in_unit(4096, 2),
    ...     text_in_unit(3 * 2**20, 2),
    ...     text_in_unit(5000, 0),
    ... )
    ('0.00391 MiB', '3 MiB', '5,000 B')
    """
    number = size / 1024**unit
    text = f"{number:.3g}"
    if abs(number) >= 100:
        text = f"{number:,.0f}"
    return f"{text} {UNITS[unit]}"


def bytes_text(size: int) -> str:
    """A number of bytes as text: `1.5 MiB`, and `2 MiB` if it is exactly that.

    >>> bytes_text(1023), bytes_text(1536), bytes_text(2**21)
    ('1023 B', '1.5 KiB', '2 MiB')
    """
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            digits = 0 if number.is_integer() else 1
            return f"{number:.{digits}f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
