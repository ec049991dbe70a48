"""A `Ranking` holds an exploration's candidates, best first, and renders text, HTML and JSON."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from functree.compiled.ledger import Ledger
from functree.errors import Problem, count, listed, path_text, problem_groups
from functree.explorer.hardware import Hardware, MeshAxes
from functree.layout.layout import LayoutTree
from functree.report.page import (
    Segment,
    bar_html,
    code,
    notes_html,
    report_html,
    section_html,
    table_html,
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

TIE = 1.15
"""Scores up to this multiple of the best are ties, since scores are no more precise than that."""

GIVEN = "the given hardware"
"""The name of hardware that the caller gives."""

MOST = 3
"""The maximum number of problems that are printed for a candidate."""


@dataclass(frozen=True, repr=False)
class Candidate:
    """A mesh and a layout with the figures of their program: a row of a `Ranking`.

    All figures are for one device. Unknown figures are None.

    Attributes:
        mesh: the sizes of the mesh axes.
        layout_name: the name of the layout.
        problems: why it cannot run; empty if it can.
        bytes_per_device: the bytes of the arguments, from the plan.
        peak_bytes: the most bytes in use at one time, as the compiler reports them.
        flops: the flops of the program, including recomputation.
        wire_bytes: the bytes that are sent, by mesh axis, largest first. The bytes of a collective
            over several mesh axes are listed under their tuple.
        compute_seconds: the time for the flops.
        wire_seconds: the time to send the bytes, one mesh axis after the other.
        score: the sum of these two times. It compares layouts and does not forecast times.
        tied: whether this and at least one other candidate are within 15 % of the best score. The
            score does not show which of the tied candidates is the fastest.
        is_frontier: whether all other candidates whose score is at least as good have a higher
            peak.
        notes: one sentence for each part of the program that the figures leave out, and for a
            program that may not fit in memory.
        ledger: the arrays that the program moves, and its memory.
        layout: the layout as it was given. Its text can be pasted into a program.
    """

    mesh: Mapping[str, int] = field(hash=False)  # a dict has no hash
    layout_name: str
    problems: tuple[Problem, ...] = ()
    bytes_per_device: int | None = None
    peak_bytes: int | None = None
    flops: int | None = None
    wire_bytes: Mapping[MeshAxes, int] = field(default_factory=dict, hash=False)
    compute_seconds: float | None = None
    wire_seconds: float | None = None
    score: float | None = None
    tied: bool = False
    is_frontier: bool = False
    notes: tuple[str, ...] = ()
    ledger: Ledger | None = None
    layout: LayoutTree = field(default=None, hash=False)  # a tree of layouts may have no hash

    def __repr__(self) -> str:
        return f"<Candidate {name_of(self)}>"


@dataclass(frozen=True, repr=False)
class Ranking:
    """The candidates of an exploration, best first; those that cannot run come last.

    `ft.explore` returns a ranking, which can be iterated over, indexed and printed.

    Attributes:
        rows: the candidates.
        hardware: the figures used for the score.
        kind: the kind of accelerator with these figures, or `the given hardware`.
        target: the target of the compilation; None for the devices of this machine.
        notes: the notes above the figures.
    """

    rows: tuple[Candidate, ...]
    hardware: Hardware
    kind: str
    target: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> tuple[Candidate, ...]:
        """The best candidate and the candidates tied with it; empty if none can run."""
        runs, _ = _divided(self.rows)
        return tuple(row for row in runs if row.tied) or tuple(runs[:1])

    @property
    def frontier(self) -> tuple[Candidate, ...]:
        """The candidates that no other candidate beats in both score and peak, best score first."""
        return tuple(row for row in self.rows if row.is_frontier)

    def __getitem__(self, index: int) -> Candidate:
        return self.rows[index]

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return _text(self.rows, self._head(), _tie_text(self.best))

    def __repr__(self) -> str:
        return f"<Ranking of {count(len(self.rows), 'candidate')} for {self.target or self.kind}>"

    def html(self) -> str:
        """Render the ranking as an HTML page, with a bar for each candidate's score."""
        return self._page(whole=True)

    def _repr_html_(self) -> str:
        return self._page(whole=False)

    def to_json(self) -> str:
        """Return the ranking as JSON, without ledgers and layouts."""
        data = {
            "functree": "ranking",
            "format": 1,
            "target": self.target,
            "kind": self.kind,
            "hardware": {**vars(self.hardware), "links": _by_text(self.hardware.links)},
            "notes": self.notes,
            "rows": list(map(_data, self.rows)),
        }
        return json.dumps(data)

    def _page(self, whole: bool) -> str:
        notes = notes_html([], filter(None, [*self._head(), _tie_text(self.best)]))
        runs, refused = _divided(self.rows)
        content = _runs_html(runs) + _refused_html(refused)
        return report_html("functree explore", notes, content, whole)

    def _head(self) -> list[str]:
        """Return the lines above the table."""
        hardware = self.hardware
        if isinstance(hardware.links, Mapping):
            each = [
                f"{axes_text(axes, '+')} {_rate(bandwidth)}"
                for axes, bandwidth in hardware.links.items()
            ]
            links = ", ".join(each)
        else:
            links = f"{_rate(hardware.links)} per link"
        score = (
            f"score = flops / ({hardware.flops / 1e12:g} TF/s × {hardware.efficiency:g})"
            f" + bytes sent / ({links}): it compares layouts and does not forecast times"
        )
        return [self._ranked_for(), *self.notes, score]

    def _ranked_for(self) -> str:
        if self.target is not None:
            return f"ranked for {self.target} ({self.kind})"
        if self.kind == GIVEN:
            return f"ranked for {GIVEN}"
        return f"no target was given: ranked for a {self.kind}"


def ranked(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Sort candidates by score, and mark ties and the frontier."""
    runs, refused = _divided(candidates)
    runs.sort(key=lambda candidate: (candidate.score, candidate.peak_bytes))
    tied = [candidate for candidate in runs if (candidate.score or 0) <= TIE * (runs[0].score or 0)]
    marked: list[Candidate] = []
    least: int | None = None  # the lowest peak among better scores
    for candidate in runs:
        peak = candidate.peak_bytes or 0
        is_frontier = least is None or peak < least
        if is_frontier:
            least = peak
        marked.append(
            replace(candidate, tied=len(tied) > 1 and candidate in tied, is_frontier=is_frontier)
        )
    return (*marked, *refused)


def _divided(rows: Iterable[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Divide candidates into those that can run and those that cannot."""
    runs: list[Candidate] = []
    refused: list[Candidate] = []
    for row in rows:
        if row.score is None:
            refused.append(row)
        else:
            runs.append(row)
    return runs, refused


# JSON


def _data(candidate: Candidate) -> dict[str, Any]:
    """Convert a candidate to JSON types, without fields that JSON cannot hold."""
    data = dict(
        vars(candidate), mesh=dict(candidate.mesh), wire_bytes=_by_text(candidate.wire_bytes)
    )
    del data["ledger"], data["layout"]
    data["problems"] = []
    for problem in candidate.problems:
        fields = problem._asdict()
        del fields["shape"]
        data["problems"].append({**fields, "path": path_text(problem.path)})
    return data


def _by_text(values: Any) -> Any:
    """Convert a dict's keys, which are mesh axes, to text; return a number unchanged."""
    if not isinstance(values, Mapping):
        return values
    return {axes_text(axes, ","): value for axes, value in values.items()}


# In words


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Return the sizes of a mesh in the command line's form: `data=8,model=4`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def name_of(one: Candidate) -> str:
    """Return a candidate's name in sentences: `fsdp on data=8`."""
    return f"{one.layout_name} on {mesh_text(one.mesh)}"


def axes_text(axes: MeshAxes, between: str = " and ") -> str:
    """Return the text of one or several mesh axes: `data`, `data and model`."""
    if isinstance(axes, str):
        return axes
    return between.join(axes)


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:g} GB/s"


def seconds_text(seconds: float) -> str:
    """Return the text of a part of a score, with at least two digits.

    >>> seconds_text(2.345), seconds_text(0.0123), seconds_text(0.0000456)
    ('2.3 s', '12 ms', '46 µs')
    """
    number, unit = seconds, "s"
    if seconds < 1e-3:
        number, unit = seconds * 1e6, "µs"
    elif seconds < 1:
        number, unit = seconds * 1e3, "ms"
    if number >= 10:
        return f"{number:.0f} {unit}"
    return f"{number:.1f} {unit}"


def why_worse(one: Candidate, best: Candidate) -> str:
    """Explain why a candidate's score is worse than the best score.

    The text is empty for the best candidate.
    """
    if not one.score or not best.score or one is best:
        return ""
    compute = (one.compute_seconds or 0) - (best.compute_seconds or 0)
    wire = (one.wire_seconds or 0) - (best.wire_seconds or 0)
    parts: list[str] = []
    # Parts below a hundredth of the score explain nothing.
    if compute > one.score / 100:
        parts.append(f"{seconds_text(compute)} more to compute")
    if wire > one.score / 100:
        most = next(iter(one.wire_bytes), None)
        over = "" if most is None else f", most over {axes_text(most)}"
        parts.append(f"{seconds_text(wire)} more on the links{over}")
    text = f"{one.score / best.score:.2f} × the best"
    if parts:
        text += f": {' and '.join(parts)}"
    return text


def _tie_text(best: Sequence[Candidate]) -> str:
    """Describe a tie; empty if there is none."""
    if len(best) < 2:
        return ""
    named = listed(list(map(name_of, best)), 6)
    return f"a tie: {named} are within 15 % of the best score; measure them to find the fastest"


def problem_lines(one: Candidate) -> Iterator[str]:
    """Yield a line for each of a candidate's first problems, and a line for the rest."""
    groups = problem_groups(one.problems)
    for group in groups[:MOST]:
        text = "; ".join(group.whys)
        if group.subject:
            text = f"{group.subject}: {text}"
        yield " ".join(text.split())
    more = len(groups) - MOST
    if more > 0:
        yield f"and {count(more, 'more problem')} (see `row.problems`)"


# The table

_COLUMNS = (2, 22, 24, 10, 10, 10)  # the widths of marks, layout, mesh, peak, compute and wire


def _text(rows: Sequence[Candidate], head: Sequence[str], tie: str) -> str:
    """Render the ranking as text, at most 100 columns wide."""
    lines = paragraphs(head)
    runs, refused = _divided(rows)
    if runs:
        titles = _cells("", "layout", "mesh", "peak", "compute", "wire")
        lines += ["", *columns(titles, _COLUMNS, "score")]
        for candidate in runs:
            lines += _row_lines(candidate, runs[0])
        lines += ["", *paragraphs(_notes(runs, tie))]
    if refused:
        lines += ["", "cannot run:"]
    for candidate in refused:
        lines.append(f"{INDENT}{name_of(candidate)}")
        for text in problem_lines(candidate):
            lines += [2 * INDENT + part for part in wrapped(text, WIDTH - 2 * len(INDENT))]
    return lines_text(lines)


def _row_lines(candidate: Candidate, first: Candidate) -> list[str]:
    mark = "=" if candidate.tied else ""
    if candidate.is_frontier:
        mark += "*"
    cells = _cells(
        mark,
        candidate.layout_name,
        mesh_text(candidate.mesh),
        bytes_text(candidate.peak_bytes or 0),
        seconds_text(candidate.compute_seconds or 0),
        seconds_text(candidate.wire_seconds or 0),
    )
    return row_lines(
        cells, _COLUMNS, seconds_text(candidate.score or 0), why_worse(candidate, first)
    )


def _cells(mark: str, layout: str, mesh: str, *numbers: str) -> tuple[str, ...]:
    return mark, layout, mesh, *(text.rjust(10) for text in numbers)


def _notes(runs: Sequence[Candidate], tie: str) -> Iterator[str]:
    """Yield the lines below the table."""
    if tie:
        yield f"= {tie}"
    yield "* no other candidate has both a better score and a lower peak"
    sent = [f"{axes_text(axes)} {bytes_text(size)}" for axes, size in runs[0].wire_bytes.items()]
    if sent:
        yield f"for the first candidate, each device sends: {', '.join(sent)}"
    notes: dict[str, None] = {}
    for candidate in runs:
        notes |= dict.fromkeys(candidate.notes)
    yield from notes


# The page


def _runs_html(runs: Sequence[Candidate]) -> str:
    """Render the candidates that can run, with bars for score and memory; empty if none can."""
    if not runs:
        return ""
    rows: list[Sequence[str]] = []
    longest = runs[-1].score or 0
    most = max(candidate.peak_bytes or 0 for candidate in runs)
    for candidate in runs:
        why = [why_worse(candidate, runs[0])]
        if candidate.tied:
            why.append("tied with the best")
        if candidate.is_frontier:
            why.append("no other candidate has both a better score and a lower peak")
        peak = candidate.peak_bytes or 0
        memory = f"{bytes_text(peak)}{bar_html([Segment('peak', peak, 'p1')], most)}"
        reasons = notes_html([], filter(None, why))
        rows.append((*_names(candidate), _score_html(candidate, longest), memory, reasons))
    return section_html("Ranking", table_html(("layout", "mesh", "score", "peak", "why"), rows))


def _names(candidate: Candidate) -> tuple[str, str]:
    return code(candidate.layout_name), code(mesh_text(candidate.mesh))


def _score_html(one: Candidate, longest: float) -> str:
    """Render the score, with a bar of its two parts."""
    segments: list[Segment] = []
    for name, seconds, kind in (
        ("compute", one.compute_seconds or 0, "p0"),
        ("wire", one.wire_seconds or 0, "p2"),
    ):
        # The unit is nanoseconds, since the sizes of bars are integers.
        text = seconds_text(seconds)
        segments.append(Segment(f"{name} {text}", round(1e9 * seconds), kind, text))
    key = " ".join(one.name for one in segments)
    bar = bar_html(segments, round(1e9 * longest))
    return f'{seconds_text(one.score or 0)}{bar}<div class="why">{key}</div>'


def _refused_html(refused: Sequence[Candidate]) -> str:
    if not refused:
        return ""
    rows = [(*_names(candidate), notes_html(problem_lines(candidate), [])) for candidate in refused]
    return section_html("Cannot run", table_html(("layout", "mesh", "why"), rows))
