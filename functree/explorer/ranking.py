"""A `Ranking` holds an exploration's candidates, best first, and renders text, HTML and JSON."""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from functree.compiled.ledger import Ledger
from functree.devices.meshes import mesh_axes
from functree.errors import Problem, count, listed, problem_groups
from functree.explorer.hardware import Hardware, MeshAxes
from functree.layout.layout import LayoutTree
from functree.report.json_text import json_of
from functree.report.page import Report, code, notes_html, report_html, section_html, table_html
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
class Ranking(Report):
    """The candidates of an exploration, best first; those that cannot run come last.

    `ft.explore` returns a ranking, which can be iterated over, indexed and printed.

    Attributes:
        rows: the candidates.
        hardware: the figures used for the score.
        kind: the kind of accelerator with these figures, or `the given hardware`.
        target: the target of the compilation; None for the devices of this machine.
    """

    rows: tuple[Candidate, ...]
    hardware: Hardware
    kind: str
    target: str | None = None

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
        lines = paragraphs(self._head())
        runs, refused = _divided(self.rows)
        if runs:
            lines += ["", *columns(_TITLES, _WIDTHS, "score")]
            for row in runs:
                score = seconds_text(row.score or 0)
                lines += row_lines(_cells(row), _WIDTHS, score, _details(row, runs[0]))
            lines += ["", *paragraphs(self._notes())]
        if refused:
            lines += ["", "cannot run:"]
        for row in refused:
            lines.append(f"{INDENT}{name_of(row)}")
            for text in problem_lines(row):
                lines += wrapped(text, WIDTH, 2 * INDENT, 2 * INDENT)
        return lines_text(lines)

    def __repr__(self) -> str:
        return f"<Ranking of {count(len(self.rows), 'candidate')} for {self.target or self.kind}>"

    def _html(self, page: bool) -> str:
        content = ""
        runs, refused = _divided(self.rows)
        if runs:
            rows: list[list[str]] = []
            for row in runs:
                cells = (*_cells(row), seconds_text(row.score or 0), _details(row, runs[0]))
                rows.append(list(map(html.escape, cells)))
            table = table_html((*_TITLES, "score", "details"), rows)
            content = section_html("Ranking", table, notes_html([], self._notes()))
        if refused:
            problems = [(code(name_of(row)), notes_html(problem_lines(row), [])) for row in refused]
            content += section_html("Cannot run", table_html(("candidate", "why"), problems))
        return report_html("functree explore", notes_html([], self._head()), content, page)

    def to_json(self) -> str:
        """Return the ranking as JSON, without ledgers and layouts."""
        rows: list[Candidate] = []
        for row in self.rows:
            sent = _by_text(row.wire_bytes)
            rows.append(replace(row, wire_bytes=sent, ledger=None, layout=None))
        hardware = self.hardware
        if isinstance(hardware.links, Mapping):
            hardware = replace(hardware, links=_by_text(hardware.links))
        return json_of("ranking", replace(self, rows=tuple(rows), hardware=hardware))

    def _head(self) -> Iterator[str]:
        """Yield the lines above the table."""
        if self.target is not None:
            yield f"ranked for {self.target} ({self.kind})"
        else:
            yield f"no target was given: ranked for {self.kind}"
            yield (
                "compiled for this machine's devices: programs for other devices may differ, so "
                "give a target"
            )
        peak, efficiency = f"{self.hardware.flops / 1e12:g} TF/s", self.hardware.efficiency
        yield (
            f"score = flops / ({peak} × {efficiency:g}) + bytes sent / ({self._links()}): it "
            "compares layouts and does not forecast times"
        )

    def _links(self) -> str:
        links = self.hardware.links
        if not isinstance(links, Mapping):
            return f"{links / 1e9:g} GB/s per link"
        return ", ".join(
            f"{'+'.join(mesh_axes(axes))} {n / 1e9:g} GB/s" for axes, n in links.items()
        )

    def _notes(self) -> Iterator[str]:
        """Yield the lines below the table."""
        if len(self.best) > 1:
            named = listed(list(map(name_of, self.best)), 6)
            yield (
                f"= a tie: {named} are within 15 % of the best score; measure them to find the "
                "fastest"
            )
        yield "* no other candidate has both a better score and a lower peak"
        yield from dict.fromkeys(note for row in self.rows for note in row.notes)


def _by_text(by_axes: Mapping[MeshAxes, Any]) -> dict[MeshAxes, Any]:
    return {",".join(mesh_axes(axes)): value for axes, value in by_axes.items()}


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


def _divided(rows: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Divide candidates into those that can run and those that cannot."""
    runs = [row for row in rows if row.score is not None]
    return runs, [row for row in rows if row.score is None]


# In words


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Return the sizes of a mesh in the command line's form: `data=8,model=4`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def name_of(one: Candidate) -> str:
    """Return a candidate's name in sentences: `fsdp on data=8`."""
    return f"{one.layout_name} on {mesh_text(one.mesh)}"


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


def _details(one: Candidate, best: Candidate) -> str:
    """Compare a candidate's score with the best score, and list the bytes that it sends."""
    texts: list[str] = []
    if one is not best and one.score and best.score:
        texts.append(f"{one.score / best.score:.2f} × the best")
    sent = [f"{'+'.join(mesh_axes(axes))} {bytes_text(n)}" for axes, n in one.wire_bytes.items()]
    if sent:
        texts.append(f"each device sends: {', '.join(sent)}")
    return "; ".join(texts)


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

_TITLES = ("", "layout", "mesh", *(title.rjust(10) for title in ("peak", "compute", "wire")))
_WIDTHS = (2, 22, 24, 10, 10, 10)


def _cells(one: Candidate) -> Sequence[str]:
    """Return the cells of a candidate that can run, without its score."""
    mark = "=" if one.tied else ""
    if one.is_frontier:
        mark += "*"
    peak = bytes_text(one.peak_bytes or 0)
    compute, wire = seconds_text(one.compute_seconds or 0), seconds_text(one.wire_seconds or 0)
    numbers = [text.rjust(10) for text in (peak, compute, wire)]
    return mark, one.layout_name, mesh_text(one.mesh), *numbers
