"""The candidates of a ranking ─► HTML, for a notebook or a browser."""

from collections.abc import Iterator, Sequence

from functree.explorer.candidate import Candidate, mesh_text
from functree.explorer.reasons import problem_lines, seconds_text, tie_text, why_worse
from functree.report.page import (
    Segment,
    bar_html,
    code,
    notes_html,
    report_html,
    section_html,
    table_html,
)
from functree.report.table import bytes_text

_COMPUTE, _WIRE, _MEMORY = "p0", "p2", "p1"


def ranking_html(
    rows: Sequence[Candidate], best: Sequence[Candidate], head: Sequence[str], page: bool
) -> str:
    """The ranking as HTML, with bars for score and memory.

    Args:
        rows: the candidates, best first.
        best: the best one, and those that are tied with it.
        head: the lines above the table.
        page: whether to return a whole page, and not a fragment for a notebook.
    """
    notes = notes_html([], filter(None, [*head, tie_text(best)]))
    runs = [one for one in rows if one.score is not None]
    refused = [one for one in rows if one.score is None]
    content = ""
    if runs:
        titles = ("layout", "mesh", "score", "peak", "why")
        content += section_html("Ranking", table_html(titles, _rows(runs)))
    if refused:
        table = table_html(("layout", "mesh", "why"), _refused(refused))
        content += section_html("What cannot run", table)
    return report_html("functree explore", notes, content, page)


def _rows(runs: Sequence[Candidate]) -> Iterator[Sequence[str]]:
    longest = max(one.score or 0 for one in runs)
    most = max(one.peak_bytes or 0 for one in runs)
    for one in runs:
        why = [why_worse(one, runs[0])]
        if one.tied:
            why.append("tied with the best")
        if one.is_frontier:
            why.append("no other is better in score and memory")
        peak = one.peak_bytes or 0
        yield (
            code(one.layout_name),
            code(mesh_text(one.mesh)),
            _score_html(one, longest),
            f"{bytes_text(peak)}{bar_html([Segment('peak', peak, _MEMORY)], most)}",
            notes_html([], filter(None, why)),
        )


def _score_html(one: Candidate, longest: float) -> str:
    """The score, and a bar of its two parts."""
    parts = {
        "compute": (one.compute_seconds or 0, _COMPUTE),
        "wire": (one.wire_seconds or 0, _WIRE),
    }
    segments: list[Segment] = []
    for name, (seconds, kind) in parts.items():
        # In nanoseconds, since bars are drawn of whole numbers.
        text = seconds_text(seconds)
        segments.append(Segment(f"{name} {text}", round(1e9 * seconds), kind, text))
    key = " ".join(one.name for one in segments)
    bar = bar_html(segments, round(1e9 * longest))
    return f'{seconds_text(one.score or 0)}{bar}<div class="why">{key}</div>'


def _refused(rows: Sequence[Candidate]) -> Iterator[Sequence[str]]:
    for one in rows:
        yield (
            code(one.layout_name),
            code(mesh_text(one.mesh)),
            notes_html(problem_lines(one), []),
        )
