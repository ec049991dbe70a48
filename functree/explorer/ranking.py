"""`Ranking`: the candidates of an exploration, best first."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from functree.errors import Problem, path_text
from functree.explorer.candidate import Candidate
from functree.explorer.hardware import Hardware
from functree.explorer.page import ranking_html
from functree.explorer.text import ranking_text

TIE = 1.15
"""Scores that are so many times the best one are no worse: the score tells no more than that."""

GIVEN = "the hardware that was given"
"""What accelerators are called whose figures the caller gives."""


@dataclass(frozen=True, repr=False)
class Ranking:
    """The candidates of an exploration, best first; those that cannot run are last.

    It is made by `ft.explore`. It can be iterated over, indexed and printed.

    Attributes:
        rows: the candidates.
        hardware: what the score was computed with.
        kind: the kind of accelerator that it is of.
        target: the target that programs were compiled for; None for the devices of this machine.
        notes: what a reader must know before the figures.
    """

    rows: tuple[Candidate, ...]
    hardware: Hardware
    kind: str
    target: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> tuple[Candidate, ...]:
        """The best candidate, and those that are tied with it; empty if none can run."""
        runs = [row for row in self.rows if row.score is not None]
        return tuple(row for i, row in enumerate(runs) if i == 0 or row.tied)

    @property
    def frontier(self) -> tuple[Candidate, ...]:
        """The candidates to which no other one is better in both score and memory, best score
        first."""
        return tuple(row for row in self.rows if row.is_frontier)

    def __getitem__(self, index: int) -> Candidate:
        return self.rows[index]

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return ranking_text(self.rows, self.best, self._head())

    def __repr__(self) -> str:
        return f"<Ranking of {len(self.rows)} candidates for {self.target or self.kind}>"

    def html(self) -> str:
        """The ranking as a HTML page, with a bar for the score of each candidate."""
        return ranking_html(self.rows, self.best, self._head(), page=True)

    def _repr_html_(self) -> str:
        return ranking_html(self.rows, self.best, self._head(), page=False)

    def to_json(self) -> str:
        """The ranking as JSON. It has no ledgers, and no layouts."""
        data = {
            "functree": "ranking",
            "format": 1,
            "target": self.target,
            "kind": self.kind,
            "hardware": _hardware(self.hardware),
            "notes": list(self.notes),
            "rows": list(map(_row, self.rows)),
        }
        return json.dumps(data)

    def _head(self) -> list[str]:
        """The lines above the table."""
        hardware = self.hardware
        if isinstance(hardware.links, Mapping):
            links = ", ".join(
                f"{axes if isinstance(axes, str) else '+'.join(axes)} {one / 1e9:g} GB/s"
                for axes, one in hardware.links.items()
            )
        else:
            links = f"{hardware.links / 1e9:g} GB/s for each link"
        score = (
            f"score = flops / ({hardware.flops / 1e12:g} TF/s × {hardware.efficiency:g})"
            f" + bytes sent / ({links}): it compares layouts, and is no forecast of a time"
        )
        return [self._ranked_for(), *self.notes, score]

    def _ranked_for(self) -> str:
        if self.target is not None:
            return f"ranked for {self.target} ({self.kind})"
        if self.kind == GIVEN:
            return f"ranked by the figures of {GIVEN}"
        return f"no target was given: ranked by the figures of a {self.kind}"


def ranked(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates in the order of their scores, with ties and the frontier marked."""
    runs = [one for one in candidates if one.score is not None]
    runs.sort(key=lambda one: (one.score, one.peak_bytes))
    tied = [one for one in runs if (one.score or 0) <= TIE * (runs[0].score or 0)]
    marked: list[Candidate] = []
    least: int | None = None  # the lowest peak of those with better scores
    for one in runs:
        peak = one.peak_bytes or 0
        is_frontier = least is None or peak < least
        if is_frontier:
            least = peak
        marked.append(replace(one, tied=len(tied) > 1 and one in tied, is_frontier=is_frontier))
    return (*marked, *(one for one in candidates if one.score is None))


def _hardware(hardware: Hardware) -> dict[str, Any]:
    links: Any = hardware.links
    if isinstance(links, Mapping):
        links = {_axes(axes): size for axes, size in links.items()}
    return {
        "flops": hardware.flops,
        "memory": hardware.memory,
        "links": links,
        "efficiency": hardware.efficiency,
    }


def _axes(axes: str | tuple[str, ...]) -> str:
    return axes if isinstance(axes, str) else ",".join(axes)


def _row(one: Candidate) -> dict[str, Any]:
    return {
        "mesh": dict(one.mesh),
        "layout_name": one.layout_name,
        "problems": list(map(_problem, one.problems)),
        "bytes_per_device": one.bytes_per_device,
        "peak_bytes": one.peak_bytes,
        "flops": one.flops,
        "wire_bytes": {_axes(axes): size for axes, size in one.wire_bytes.items()},
        "compute_seconds": one.compute_seconds,
        "wire_seconds": one.wire_seconds,
        "score": one.score,
        "tied": one.tied,
        "is_frontier": one.is_frontier,
        "notes": list(one.notes),
    }


def _problem(problem: Problem) -> dict[str, str]:
    return {
        "path": path_text(problem.path),
        "what": problem.what,
        "why": problem.why,
        "remedy": problem.remedy,
    }
