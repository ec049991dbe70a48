"""This module builds tables from cells of text, as lines of fixed width.

rich's tables would be too slow for plans with thousands of rows. Widths are numbers of characters,
so columns with characters of double width are not aligned. This module also formats the paths and
the bytes in tables.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import TypeVar

from functree.tree.paths import Path, part_text

WIDTH = 100
INDENT = "    "


def row_lines(cells: Sequence[str], widths: Sequence[int], number: str, details: str) -> list[str]:
    """Return the lines of a table's row: its columns, and details below.

    Args:
        cells: the texts, as in `columns`. The first is the row's name.
        widths: the widths of the columns.
        number: the text of the last column.
        details: the text below; may be empty.
    """
    lines: list[str] = []
    name, *others = cells
    if len(name) > widths[0]:
        # A long name gets its own lines, and is broken only if necessary, so that users can search
        # for it.
        lines += wrapped(name, WIDTH)
        name = ""
    lines += columns((name, *others), widths, number)
    if details:
        lines += wrapped(details, WIDTH, INDENT, INDENT)
    return lines


def columns(cells: Sequence[str], widths: Sequence[int], number: str) -> list[str]:
    """Return the lines of a table's row. A cell that is too long is wrapped.

    Args:
        cells: the texts, without the last column.
        widths: the widths of the columns.
        number: the text of the last column, which is aligned to the right.
    """
    parts = [wrapped(cell, wide) for cell, wide in zip(cells, widths, strict=True)]
    lines: list[str] = []
    for *texts, last in zip_longest(*parts, [number.rjust(10)], fillvalue=""):
        line = ""
        for text, wide in zip(texts, widths, strict=True):
            line += text.ljust(wide) + "  "
        lines.append(line + last)
    return lines


def paragraphs(texts: Iterable[str]) -> list[str]:
    """Wrap texts to the width of a table."""
    lines: list[str] = []
    for text in texts:
        lines += wrapped(text, WIDTH)
    return lines


def numbered(number: int, text: str) -> list[str]:
    """Return the lines of an item in a numbered list."""
    return wrapped(text, WIDTH, f"{number:3} ", INDENT)


def lines_text(lines: Iterable[str]) -> str:
    """Join lines, and remove their trailing spaces."""
    return "\n".join(map(str.rstrip, lines))


def wrapped(text: str, most: int, first: str = "", others: str = "") -> list[str]:
    """Wrap a text to this many characters. Words that are too long for a line are split.

    Args:
        text: the text.
        most: the maximum number of characters of a line.
        first: the indentation of the first line.
        others: the indentation of the other lines.
    """
    lines = wrap(text, most, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
    return lines or [""]


_T = TypeVar("_T")


def grouped(values: Iterable[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Group values with equal keys, in the order in which keys first occur."""
    groups: dict[Hashable, list[_T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return list(groups.values())


def pattern_of(path: Path) -> tuple[object, ...]:
    """Replace the indices in a path with `*`. Integer keys of dicts are treated as indices."""
    return tuple("*" if isinstance(key, int) else key for key in path)


def but_for_key(paths: Sequence[Path], from_end: int) -> Hashable:
    """Return the keys of paths of equal length, without the key at a position from the end.

    The result is equal for `attn.query` and `attn.key`. It is None if there is no such key, or if
    the key is an index: `common_path` joins the indices of layers where that is exact.
    """
    if len(paths[0]) < from_end:
        return None
    keys = list(map(frozenset, zip(*paths, strict=True)))
    if any(isinstance(key, int) for key in keys.pop(-from_end)):
        return None
    return from_end, *keys


def common_path(paths: Sequence[Path]) -> str:
    """Abbreviate several paths as one text, such as `blocks.{0-10,12}.w`."""
    return ".".join(common_parts(paths)) or "(the root)"


def common_parts(paths: Sequence[Path]) -> list[str]:
    """Return the parts of a common path: `blocks`, `{0-10,12}`, `w`."""
    # If several keys differ, `{0-1}.{0-1}` is exact only if the paths are all combinations, which
    # the caller must ensure.
    return list(map(alternatives, zip(*paths, strict=True)))


def alternatives(keys: Sequence[object]) -> str:
    """Return the text of a key with several values: `{0-3}`, `{query,key}`."""
    different = list(dict.fromkeys(keys))
    if len(different) == 1:
        return part_text(different[0])
    indices = [key for key in different if isinstance(key, int)]
    if len(indices) == len(different):
        return "{" + _ranges(sorted(indices)) + "}"
    return "{" + ",".join(map(part_text, different)) + "}"


def _ranges(indices: Sequence[int]) -> str:
    """Return the text of sorted indices: `0-3,5` for 0, 1, 2, 3 and 5."""
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


class Bytes(int):
    """A number of bytes, with its own type to distinguish it from other numbers."""

    def __str__(self) -> str:
        return bytes_text(self)


def bytes_text(size: int) -> str:
    """Format a number of bytes: `1.5 MiB`, or `2 MiB` if that is exact.

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
