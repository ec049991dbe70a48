"""The candidates of a ranking ─► a table as text."""

from collections.abc import Iterator, Sequence

from functree.explorer.candidate import Candidate, mesh_text
from functree.explorer.reasons import (
    axes_text,
    name_of,
    problem_lines,
    seconds_text,
    tie_text,
    why_worse,
)
from functree.report.table import (
    INDENT,
    WIDTH,
    bytes_text,
    columns,
    lines_text,
    paragraphs,
    row_lines,
    wrapped,
)

COLUMNS = (2, 22, 24, 10, 10, 10)  # of marks, layout, mesh, peak, compute and wire


def ranking_text(rows: Sequence[Candidate], best: Sequence[Candidate], head: Sequence[str]) -> str:
    """The table, at most 100 columns wide.

    Args:
        rows: the candidates, best first.
        best: the best one, and those that are tied with it.
        head: the lines above the table.
    """
    lines = [*paragraphs(head)]
    runs = [one for one in rows if one.score is not None]
    if runs:
        lines.append("")
        titles = ("", "layout", "mesh", *(title.rjust(10) for title in ("peak", "compute", "wire")))
        lines += columns(titles, COLUMNS, "score")
    for one in runs:
        lines += _row(one, runs[0])
    if runs:
        lines += ["", *paragraphs(_notes(runs, best))]
    refused = [one for one in rows if one.score is None]
    if refused:
        lines += ["", "cannot run:"]
    for one in refused:
        lines.append(f"{INDENT}{name_of(one)}")
        for text in problem_lines(one):
            lines += [2 * INDENT + part for part in wrapped(text, WIDTH - 2 * len(INDENT))]
    return lines_text(lines)


def _row(one: Candidate, first: Candidate) -> list[str]:
    mark = "=" if one.tied else ""
    if one.is_frontier:
        mark += "*"
    numbers = (
        bytes_text(one.peak_bytes or 0),
        seconds_text(one.compute_seconds or 0),
        seconds_text(one.wire_seconds or 0),
    )
    cells = (mark, one.layout_name, mesh_text(one.mesh), *(text.rjust(10) for text in numbers))
    return row_lines(cells, COLUMNS, seconds_text(one.score or 0), why_worse(one, first))


def _notes(runs: Sequence[Candidate], best: Sequence[Candidate]) -> Iterator[str]:
    """The lines below the table."""
    tie = tie_text(best)
    if tie:
        yield f"= {tie}"
    yield "* no other has both a better score and a lower peak of memory"
    first = runs[0]
    sent = [f"{axes_text(axes)} {bytes_text(size)}" for axes, size in first.wire_bytes.items()]
    if sent:
        yield f"sent by each device for the first, over {', over '.join(sent)}"
    told: dict[str, None] = {}
    for one in runs:
        told |= dict.fromkeys(one.notes)
    yield from told
