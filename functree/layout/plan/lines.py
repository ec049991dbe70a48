"""The rows of a plan ─► the lines of its table: layers, and moments, are one line each."""

from collections.abc import Sequence
from typing import NamedTuple

from functree.layout.plan.fold import Line, fold
from functree.layout.plan.moments import Moments, moments
from functree.layout.plan.row import Row
from functree.report.byte_sizes import bytes_text
from functree.report.path_groups import common_path, pattern_of
from functree.tree.paths import Path


def lines_of(rows: Sequence[Row], by_bytes: bool = False) -> list[Line]:
    """The lines of a table, in the order of their first rows.

    Args:
        rows: the rows.
        by_bytes: whether to return the line with the most bytes first.
    """
    others, apart = moments(rows)
    lines = [*fold(others), *map(_moments_line, apart)]
    order = {row.path: i for i, row in enumerate(rows)}
    lines.sort(key=lambda line: order[line.rows[0].path])
    if by_bytes:
        lines.sort(key=lambda line: line.each, reverse=True)
    return lines


def _moments_line(one: Moments) -> Line:
    rows = one.all_rows
    arrays = len(one.rows[0])
    each = sum(row.bytes_per_device for row in rows)
    size = bytes_text(each // len(one.roots))
    if len(one.roots) > 1:
        size = f"{len(one.roots)} × {size}"
    return Line(
        parts=(*one.parts, "**"),
        array=f"{arrays} arrays",
        cut=f"as {one.reference}, {size}",
        axes="",
        spec="",
        each=each,
        total=sum(row.bytes_global for row in rows),
        copies=0,
        reason="",
        rows=tuple(rows),
    )


class Subtree(NamedTuple):
    """What is below one path of a tree, in all layers of a list together.

    Attributes:
        path: the path.
        arrays: the number of arrays.
        bytes: their bytes on one device.
    """

    path: str
    arrays: int
    bytes: int


MOST_SUBTREES = 16


def subtrees(lines: Sequence[Line]) -> list[Subtree]:
    """The subtrees with several lines, without those that have the same lines as one inside."""
    found: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        keys = pattern_of(line.rows[0].path)
        for depth in range(1, len(line.parts)):
            found.setdefault(keys[:depth], []).append(line)
    # The number of lines of the largest subtree inside: of `blocks` and `blocks.layer`, with the
    # same lines, the longer one says more.
    largest: dict[tuple[object, ...], int] = {}
    for keys, inside in found.items():
        largest[keys[:-1]] = max(largest.get(keys[:-1], 0), len(inside))
    several: dict[tuple[object, ...], int] = {}
    for keys, inside in found.items():
        if 1 < len(inside) < len(lines) and largest.get(keys) != len(inside):
            several[keys] = sum(line.each for line in inside)
    kept = sorted(several, key=lambda keys: several[keys], reverse=True)[:MOST_SUBTREES]
    return [_subtree(found[keys], len(keys)) for keys in several if keys in kept]


def _subtree(inside: Sequence[Line], depth: int) -> Subtree:
    paths = [Path(row.path[:depth]) for line in inside for row in line.rows]
    return Subtree(common_path(paths), len(paths), sum(line.each for line in inside))
