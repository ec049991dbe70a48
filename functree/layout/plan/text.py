"""The rows of a plan ─► a table as text."""

from collections.abc import Sequence

from functree.layout.plan.fold import Line
from functree.layout.plan.lines import lines_of, subtrees
from functree.layout.plan.row import Row
from functree.report.byte_sizes import bytes_text
from functree.report.table import columns, lines_text, numbered, paragraphs, row

COLUMNS = (38, 42, 3)  # of path, array and the number of the reason
SMALL = 6
"""Tables with so many lines need no sums of their subtrees."""


def plan_text(
    rows: Sequence[Row],
    notes: Sequence[str],
    warnings: Sequence[str] = (),
    column: str = "per device",
    by_bytes: bool = False,
) -> str:
    """The table, at most 100 columns wide, with the reasons below it.

    Args:
        rows: one for each array.
        notes: the lines below the table.
        warnings: the lines above it.
        column: the title of the last column, the bytes of each line.
        by_bytes: whether the largest line is first.
    """
    lines = paragraphs(warnings)
    if warnings:
        lines.append("")
    shown = lines_of(rows, by_bytes)
    reasons = _numbers(shown)
    title = "why" if reasons else ""
    lines += columns(("path", "array", title), COLUMNS, column)
    for line in shown:
        number = str(reasons.get(line.told, ""))
        lines += row((line.title, line.cut, number), COLUMNS, bytes_text(line.each), "")
    for text, number in reasons.items():
        if number == 1:
            lines += ["", "why"]
        lines += numbered(number, text)
    if len(shown) > SMALL:
        lines += _subtrees(shown, by_bytes)
    return lines_text([*lines, "", *paragraphs(notes)])


def _numbers(lines: Sequence[Line]) -> dict[str, int]:
    """A number for each reason, in the order in which they come first."""
    found: dict[str, int] = {}
    for line in lines:
        if line.told:
            found.setdefault(line.told, len(found) + 1)
    return found


def _subtrees(lines: Sequence[Line], by_bytes: bool) -> list[str]:
    found = subtrees(lines)
    if by_bytes:
        found.sort(key=lambda one: one.bytes, reverse=True)
    total = sum(line.each for line in lines)
    texts: list[str] = []
    for one in found:
        share = f"{round(100 * one.bytes / max(total, 1))} %"
        cells = (one.path, f"{one.arrays} arrays", share)
        texts += row(cells, (38, 38, 7), bytes_text(one.bytes), "")
    return ["", "in all", *texts] if texts else []
