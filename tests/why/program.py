"""A program with labels: which of its collectives somebody asked for, and where one comes from.

The labels were written before the programs were run.
"""

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

import functree as ft


@dataclass(frozen=True)
class Label:
    """A verdict on the rows of a ledger for which all that is given holds.

    Attributes:
        verdict: `asked` or `compiler`.
        line: a part of the line of source, in a model or in the program itself.
        kind: the kind of the collective.
        axes: its mesh axes.
        phase: its phase.
        moves: what it moves.
    """

    verdict: str
    line: str | None = None
    kind: str | None = None
    axes: tuple[str, ...] | None = None
    phase: str | None = None
    moves: str | None = None

    def matches(self, row: ft.Collective) -> bool:
        given = (
            (self.kind, row.kind),
            (self.axes, row.mesh_axes),
            (self.phase, row.phase),
            (self.moves, row.moves),
        )
        if any(wanted is not None and wanted != found for wanted, found in given):
            return False
        return self.line is None or any(self.line in text for text in lines_of(row))


@dataclass(frozen=True)
class Cause:
    """Where the largest row with a label comes from.

    Attributes:
        row: which rows; the largest counts.
        expression: a part of the line of the operation.
        origins: who set the layouts that disagree: a path, or a part of a constraint's line. All
            have to be named.
    """

    row: Label
    expression: str
    origins: tuple[str, ...] = ()


RELAID = [
    Label("compiler", kind=kind) for kind in ("all-gather", "all-to-all", "collective-permute")
]
"""The labels of what moves elements and sums none, where nobody has asked for any of it."""


@dataclass(frozen=True)
class Program:
    """A program whose collectives were labeled before it was run.

    Attributes:
        make: makes the function, its arguments and its layouts, for a mesh of eight devices.
        cause: where one of them comes from.
        labels: the verdicts; the first that matches a row counts.
        third: the name of the third mesh axis, beside `data` and `model`.
        otherwise: the verdict on rows without a label.
        explicit: whether the mesh axes are Explicit.
    """

    make: Callable[[Mesh], tuple[Any, tuple[Any, ...], dict[str, Any]]]
    cause: Cause
    labels: Sequence[Label] = ()
    third: str = "seq"
    otherwise: str = "asked"
    explicit: bool = False

    def verdict(self, row: ft.Collective) -> str:
        """What the labels say about a row."""
        return next((one.verdict for one in self.labels if one.matches(row)), self.otherwise)


PROGRAMS: dict[str, Program] = {}
"""The programs by name, as far as their modules were imported."""


def program(**labels: Any) -> Callable[[Any], Any]:
    """List what makes a program, with its labels. Its name is that of the function, whose docstring
    says what it computes, and why its collectives are there."""

    def listed(make: Any) -> Any:
        PROGRAMS[make.__name__.replace("_", "-")] = Program(make, **labels)
        return make

    return listed


def lines_of(row: ft.Collective) -> list[str]:
    """The lines of source that a row names."""
    return [text_of(place) for place in (row.source, row.called_from) if place is not None]


def text_of(place: str | None) -> str:
    """What stands at a `file:line`; empty for what is no such place."""
    file, _, line = (place or "").rpartition(":")
    return linecache.getline(file, int(line)) if file and line.isdigit() else ""
