"""A `Ledger` shows the arrays that a compiled program moves between devices, and its memory.

`diff` compares two ledgers. `html` renders the moved bytes by mesh axis, phase and parameter, and
the memory by part.
"""

import html
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from functree.argument_checks import shown
from functree.compiled.collective import Collective, Memory
from functree.compiled.table import (
    NO_PARAMETER,
    VERDICTS,
    TableRow,
    axes_text,
    full_paths,
    idle_text,
    ledger_text,
    memory_text,
    moves_text,
    peak_notes,
    rows_of_parameters,
    summary_text,
    warning_lines,
)
from functree.devices.meshes import MeshView
from functree.errors import FunctreeTypeError, count
from functree.report.diff import Change, Diff, by_bytes, changes
from functree.report.json_text import json_of, read_json
from functree.report.page import (
    Card,
    Segment,
    TreeLeaf,
    bar_html,
    cards_html,
    code,
    key_html,
    list_html,
    mesh_axes_html,
    notes_html,
    report_html,
    section_html,
    tree_html,
)
from functree.report.table import Bytes, bytes_text, common_parts, grouped, pattern_of
from functree.tree.paths import Path


@dataclass(frozen=True, repr=False)
class Ledger:
    """The arrays that a compiled program moves between devices, and its memory.

    `compiled.ledger()` and `ft.ledger` return it.

    Attributes:
        collectives: the arrays that are moved, in the order of the program's text.
        memory: the memory on one device.
        backend: the devices that the program is compiled for: `cpu`, `tpu v5e`, `cuda h100`.
        sizes: the sizes of the mesh axes; empty if the mesh is unknown.
        warnings: the compiler's warnings, for example about an involuntary rematerialization.
        warnings_known: whether warnings could be collected. False if JAX had cached the program, so
            nothing was compiled, or if warnings were silenced.
        not_understood: one sentence for each part of the program that could not be parsed.
        idle: the mesh axes with several devices over which nothing is moved and no argument or
            result is sharded. Devices along such an axis do the same work. Empty if this is
            unknown.
        data: the arguments that verdicts treat as data and not as part of a model; empty if nothing
            is moved.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> layouts = (ft.P("model"), ft.P(None, "model"))
        >>> @ft.jit(in_shardings=layouts, out_shardings=ft.P(), mesh=mesh)
        ... def project(w, x):
        ...     return x @ w
        >>> shapes = [
        ...     jax.ShapeDtypeStruct(shape, "float32")
        ...     for shape in [(64, 32), (16, 64)]
        ... ]
        >>> ledger = project.lower(*shapes).compile().ledger()
        >>> moved = ledger.collectives[0]
        >>> moved.kind, moved.mesh_axes, moved.bytes, moved.count
        ('all-reduce', ('model',), 2048, 1)
        >>> ledger.memory.arguments["w"]
        2048
    """

    collectives: tuple[Collective, ...]
    memory: Memory
    backend: str
    sizes: Mapping[str, int] = field(hash=False)  # a dict has no hash
    warnings: tuple[str, ...] = ()
    warnings_known: bool = True
    not_understood: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    data: tuple[str, ...] = ()

    def totals(self) -> dict[tuple[str, tuple[str, ...] | None], int]:
        """Return the bytes of all runs by kind and mesh axes, largest first.

        A collective in a loop of unknown length is counted once, so its total is a lower bound.
        """
        return _bytes_by(self.collectives, lambda row: (row.kind, row.mesh_axes))

    @property
    def attributed(self) -> float:
        """The share of moved bytes attributed to parameters, from 0 to 1; 1 if nothing is moved."""
        total = sum(collective.total for collective in self.collectives)
        if total == 0:
            return 1.0
        return sum(collective.total for collective in self.collectives if collective.paths) / total

    def summary(self) -> str:
        """Return the totals by kind and mesh axes, and the memory, in a few lines."""
        return summary_text(self.totals(), self.memory, self.attributed, _where(self), self.idle)

    def __str__(self) -> str:
        notes = [*_notes(self), *warning_lines(self.warnings)]
        return ledger_text(self.collectives, self.summary(), notes)

    def __repr__(self) -> str:
        return f"<Ledger of {count(len(self.collectives), 'collective')} for {self.backend}>"

    def diff(self, other: "Ledger") -> Diff:
        """Compare this ledger with another ledger.

        The comparison covers the memory, and the moved bytes by parameter, kind, mesh axes and
        phase.

        Raises:
            FunctreeError: if `other` is not a ledger.
        """
        if not isinstance(other, Ledger):
            raise FunctreeTypeError(f"diff: `other` must be a ledger, not {shown(other)}")
        rows: list[Change] = []
        if self.backend != other.backend:
            rows.append(Change(Path(), "backend", self.backend, other.backend))
        if self.sizes != other.sizes:
            rows.append(Change(Path(), "mesh", self.sizes, other.sizes))
        if self.idle != other.idle:
            before, after = ", ".join(self.idle), ", ".join(other.idle)
            rows.append(Change(Path(), "idle mesh axes", before or None, after or None))
        rows += moved_changes(self.collectives, other.collectives)
        rows += memory_changes(self.memory, other.memory)
        return Diff(by_bytes(rows), (moved_total(self.collectives, other.collectives),))

    def to_json(self) -> str:
        """Return the ledger as JSON."""
        return json_of("ledger", self)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        """Read a ledger from JSON; it equals the ledger that was written.

        Raises:
            FunctreeError: if the text is not ledger JSON.
        """
        return read_json(text, "ledger", cls)

    def html(self) -> str:
        """Render the ledger as an HTML page.

        The page shows the moved bytes by mesh axis, kind, phase and parameter, and the memory by
        part. The page is one file that loads nothing from the network.
        """
        return _Page(self).html(page=True)

    def _repr_html_(self) -> str:
        return _Page(self).html(page=False)


_Kind = TypeVar("_Kind", bound=Hashable)


def _bytes_by(
    collectives: Sequence[Collective], key: Callable[[Collective], _Kind]
) -> dict[_Kind, int]:
    """Sum the bytes of all runs by a property, largest first."""
    sizes: dict[_Kind, int] = {}
    for collective in collectives:
        sizes[key(collective)] = sizes.get(key(collective), 0) + collective.total
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _where(ledger: Ledger) -> str:
    """Return the target and, if it is known, the mesh."""
    if not ledger.sizes:
        return ledger.backend
    return f"{ledger.backend}, mesh {MeshView(ledger.sizes)}"


def _notes(ledger: Ledger) -> list[str]:
    """Return the notes that qualify the figures."""
    notes = [f"not understood: {what}" for what in ledger.not_understood]
    if not ledger.warnings_known:
        notes.append(_UNHEARD)
    if ledger.backend == "cpu" and ledger.collectives:
        notes.append(_CPU)
    return notes


_UNHEARD = (
    "the compiler's warnings are unknown: JAX had cached the program (make the ledger before the "
    "first call), or `TF_CPP_MIN_LOG_LEVEL` silenced them"
)
# The CPU compiler has no reduce-scatter, and moves bfloat16 as float32.
_CPU = (
    "compiled for CPUs: on TPUs and GPUs, the compiler chooses different collectives, and does not "
    "move bfloat16 as float32 (compile for a target: `ft.make_mesh(..., target=)`)"
)


def moved_changes(before: Sequence[Collective], after: Sequence[Collective]) -> Iterator[Change]:
    """Compare the arrays that two programs move.

    Instruction names and source lines are ignored, since both may change when nothing else does.
    """
    return changes(
        _by_parameter(before),
        _by_parameter(after),
        _path,
        _properties,
        lambda key, alike: (_what(key), _moved_bytes(alike)),
    )


def moved_total(before: Sequence[Collective], after: Sequence[Collective]) -> Change:
    """Compare the total bytes that two programs move to each device."""
    return Change(Path(), "moved to each device", _moved_bytes(before), _moved_bytes(after))


def _moved_bytes(collectives: Sequence[Collective]) -> Bytes:
    return Bytes(sum(collective.total for collective in collectives))


def memory_changes(before: Memory, after: Memory) -> Iterator[Change]:
    """Compare the memory of two programs."""
    for name in ("outputs", "aliases", "temporaries", "peak"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield Change(Path(), f"bytes of {name}", Bytes(old), Bytes(new))
    yield from changes(
        before.arguments,
        after.arguments,
        lambda path: path,
        lambda path, size: {"bytes on each device": Bytes(size)},
        lambda path, size: ("argument", Bytes(size)),
    )


_Key = tuple[tuple[Path, ...], str, tuple[str, ...] | None, str | None]
"""The parameters, kind, mesh axes and phase of some collectives."""


def _by_parameter(collectives: Sequence[Collective]) -> dict[_Key, list[Collective]]:
    by_parameter = defaultdict[_Key, list[Collective]](list)
    for one in collectives:
        key = tuple(full_paths(one)), one.kind, one.mesh_axes, one.phase
        by_parameter[key].append(one)
    return by_parameter


def _path(key: _Key) -> Path:
    """Return the parameter if there is only one; `_what` lists them if there are several."""
    paths, *_ = key
    if len(paths) != 1:
        return Path()
    return paths[0]


def _properties(key: _Key, alike: Sequence[Collective]) -> dict[str, int]:
    # A loop of unknown length is counted once, as in `Ledger.totals`.
    runs = sum(1 if one.count is None else one.count for one in alike)
    return {_what(key, "bytes of "): _moved_bytes(alike), _what(key, "runs of "): runs}


def _what(key: _Key, of: str = "") -> str:
    paths, kind, axes, phase = key
    text = f"{of}{kind} over {axes_text(axes)}"
    if phase:
        text += f" ({phase})"
    return f"{text} for {', '.join(map(str, paths))}" if len(paths) > 1 else text


MOST_ROWS = 200
"""The maximum number of a ledger's rows in a notebook; a page shows all rows."""


class _Page(NamedTuple):
    """The HTML page of a ledger."""

    ledger: Ledger

    def html(self, page: bool) -> str:
        """Render the page, or a fragment for a notebook."""
        notes = _notes(self.ledger)
        if self.ledger.idle:
            notes.insert(0, idle_text(self.ledger.idle))
        head = cards_html(self._cards()) + notes_html([], notes)
        content = self._moved(None if page else MOST_ROWS) + self._memory()
        content += section_html("Warnings", notes_html(warning_lines(self.ledger.warnings), []))
        title = f"Ledger of a program for {_where(self.ledger)}"
        return report_html(title, head, content, page)

    def _cards(self) -> list[Card]:
        total = sum(collective.total for collective in self.ledger.collectives)
        return [
            Card(bytes_text(total), "moved to each device per run"),
            Card(bytes_text(self.ledger.memory.peak), "peak memory"),
            # Rounded down: 100 % means all.
            Card(
                f"{math.floor(1000 * self.ledger.attributed) / 10:g} %",
                "of moved bytes attributed to parameters",
            ),
        ]

    def _moved(self, most: int | None) -> str:
        if not self.ledger.collectives:
            return ""
        lists = ""
        properties: dict[str, Callable[[Collective], str]] = {
            "By mesh axis": lambda collective: self._axes(collective.mesh_axes),
            "By kind": lambda collective: collective.kind,
            "By phase": lambda collective: collective.phase or "unknown",
        }
        for title, key in properties.items():
            lists += list_html(title, _bytes_by(self.ledger.collectives, key))
        rows = rows_of_parameters(self.ledger.collectives)
        left_out = ""
        if most is not None and len(rows) > most:
            more = f"and {count(len(rows) - most, 'smaller row')} (`ledger.html()` shows all rows)"
            left_out, rows = notes_html([], [more]), rows[:most]
        leaves = list(map(self._leaf, rows))
        tree = tree_html(leaves, "all parameters", "collective", named=False)
        return section_html(
            "Moved between devices", f'<div class="lists">{lists}</div>', tree, left_out
        )

    def _axes(self, axes: tuple[str, ...] | None) -> str:
        return mesh_axes_html(axes, self.ledger.sizes)

    def _leaf(self, row: TableRow) -> TreeLeaf:
        collective = row.collectives[0]
        parts: tuple[str, ...] = (NO_PARAMETER,)
        if row.paths:
            parts = tuple(common_parts(row.paths))
        elif collective.paths:
            parts = ("several parameters",)
        content = f"{code(row.kind)} over {self._axes(collective.mesh_axes)} "
        verdict = VERDICTS.get(collective.verdict or "")
        for text in filter(None, (collective.phase, moves_text(collective), verdict)):
            content += f'<span class="chip">{html.escape(text)}</span>'
        times = {"?": "an unknown number of times", "1": ""}.get(row.runs, f"×{row.runs}")
        content += f'<span class="muted num">{times}</span>'
        if not row.paths and collective.paths:
            content += f'<div class="why">for {html.escape(row.title)}</div>'
        content += f'<div class="why">{html.escape(row.where)}</div>'
        if row.cause:
            content += f'<div class="why">{html.escape(row.cause)}</div>'
        return TreeLeaf(parts, row.total, content, len(row.collectives))

    def _memory(self) -> str:
        memory = self.ledger.memory
        segments = (
            Segment("arguments", sum(memory.arguments.values()), "p0"),
            Segment("outputs", memory.outputs - memory.aliases, "p5 copied"),
            Segment("temporaries", memory.temporaries, "p5"),
        )
        whole = [segment for segment in segments if segment.size > 0]
        total = sum(segment.size for segment in whole)
        tree = ""
        if memory.arguments:
            tree = tree_html(self._arguments(), "all arguments", "array", opened=False)
        return section_html(
            "Memory of each device",
            bar_html(whole, max(total, memory.peak)),
            key_html(whole),
            notes_html([], [memory_text(memory), *peak_notes(memory)]),
            tree,
        )

    def _arguments(self) -> list[TreeLeaf]:
        """Return a line for each argument array; identical layers share a line."""
        leaves: list[TreeLeaf] = []
        sizes = self.ledger.memory.arguments
        for paths in grouped(sizes, lambda path: (pattern_of(path), sizes[path])):
            parts = tuple(common_parts(paths))
            content = f'<span class="muted">×{len(paths)}</span>' if len(paths) > 1 else ""
            size = len(paths) * sizes[paths[0]]
            leaves.append(TreeLeaf(parts, size, content, len(paths)))
        return leaves
