"""A `Ledger` shows the arrays that a compiled program moves between devices, and its memory.

`diff` compares two ledgers. `html` renders the moved bytes by mesh axis, phase and parameter, and
the memory by part. `read_ledger` reads a ledger from a compiled program and the paths of its
arrays.
"""

import html
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

from functree.argument_checks import shown
from functree.compiled.collective import BytesByPath, Collective, Memory, judge_later, total_of
from functree.compiled.data_flow import DataFlow
from functree.compiled.hlo import Hlo
from functree.compiled.layouts import Layouts, named
from functree.compiled.moved_arrays import (
    MovedArray,
    groups_of,
    mesh_axes_of,
    moved_arrays,
    unknown_collectives,
)
from functree.compiled.provenance import Provenance, Shape, Shapes
from functree.compiled.shardy import without_collector
from functree.compiled.sources import Sources
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
    warning_lines,
)
from functree.compiled.verdicts import Verdicts, data_of
from functree.devices.meshes import MeshView
from functree.errors import FunctreeError, FunctreeTypeError, count
from functree.report.diff import Change, Diff, by_bytes, changes
from functree.report.json_text import json_of, read_json
from functree.report.page import (
    Card,
    Report,
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
from functree.report.table import (
    INDENT,
    Bytes,
    bytes_text,
    columns,
    common_parts,
    grouped,
    lines_text,
    pattern_of,
)
from functree.tree.paths import Path


@dataclass(frozen=True, repr=False)
class Ledger(Report):
    """The arrays that a compiled program moves between devices, and its memory.

    `compiled.ledger()` and `ft.ledger` return it. Its page shows the moved bytes by mesh axis,
    kind, phase and parameter, and the memory by part.

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
        total = total_of(self.collectives)
        if total == 0:
            return 1.0
        return sum(collective.total for collective in self.collectives if collective.paths) / total

    def summary(self) -> str:
        """Return the totals by kind and mesh axes, and the memory, in a few lines."""
        lines = [f"{_where(self)}: {bytes_text(total_of(self.collectives))} moved to each device"]
        for (kind, axes), size in self.totals().items():
            lines += columns((f"{INDENT}{kind}", axes_text(axes)), (24, 36), bytes_text(size))
        lost = 1 - self.attributed
        if lost > 0:
            # "0.0 %" would mean none.
            share = f"{100 * lost:.1f} %" if lost >= 0.0005 else "less than 0.1 %"
            lines.append(f"{INDENT}{share} of these bytes could not be attributed to a parameter")
        if self.idle:
            lines.append(idle_text(self.idle))
        return lines_text([*lines, memory_text(self.memory), *peak_notes(self.memory)])

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
        moved = _moved_bytes(self.collectives), _moved_bytes(other.collectives)
        return Diff(by_bytes(rows), (Change(Path(), "moved to each device", *moved),))

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

    def _html(self, page: bool) -> str:
        return _Page(self).html(page)


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


def _moved_bytes(collectives: Sequence[Collective]) -> Bytes:
    return Bytes(total_of(collectives))


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
        total = total_of(self.ledger.collectives)
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


# Reading a program


class CompiledProgram(NamedTuple):
    """A compiled program, with the names of its arrays.

    Attributes:
        text: the text of the program.
        memory: a function that returns the program's memory statistics, as
            `compiled.memory_analysis` does, or None if the compiler reports none. The function is
            called last.
        parameters: the path of each parameter of the program, which begins with the name of an
            argument.
        outputs: the path of each output.
        sizes: the sizes of the mesh axes; empty if the mesh is unknown.
        backend: the name of the target.
        warnings: the compiler's warnings; None if they were not collected.
        sharded: the mesh axes that shard a parameter or an output; None if this is unknown.
        shapes: a function that converts shapes on one device to global shapes; None if both are
            equal, or if the global shapes are unknown.
        layouts: a function that returns the program's layouts before compilation; None if they are
            unavailable.
    """

    text: str
    memory: Callable[[], Any]
    parameters: Sequence[Path]
    outputs: Sequence[Path]
    sizes: dict[str, int]
    backend: str
    warnings: tuple[str, ...] | None
    sharded: frozenset[str] | None = None
    shapes: Callable[[Sequence[Shape], Sequence[Shape]], Shapes] | None = None
    layouts: Callable[[], Layouts] | None = None


@without_collector()
def read_ledger(program: CompiledProgram) -> Ledger:
    """Read the ledger of a program.

    Raises:
        FunctreeError: if the program does not have one parameter for each of the function's arrays.
    """
    reader = _Reader(program)
    moved = list(moved_arrays(reader.flow))
    if moved and program.layouts is not None:
        reader.judge_by(program.layouts)
    collectives = tuple(map(reader.collective, moved))
    return Ledger(
        collectives,
        _memory(program, reader.flow),
        program.backend,
        program.sizes,
        tuple(map(reader.with_line, program.warnings or ())),
        program.warnings is not None,
        tuple(reader.not_understood(collectives)),
        reader.idle(collectives, program.sharded),
        reader.data,
    )


_Groups = tuple[tuple[str, ...] | None, int | None]
"""The mesh axes of a collective, and the number of devices in a group."""


class _Reader:
    """The reader of a program's collectives."""

    def __init__(self, program: CompiledProgram):
        self.flow: DataFlow = DataFlow(Hlo(program.text))
        have, known = len(self.flow.hlo.parameters), len(program.parameters)
        if have != known:
            raise FunctreeError(
                "ledger: cannot match the program's parameters with the function's arrays: the "
                f"program has {count(have, 'parameter')}, but the function has "
                f"{count(known, 'array')}"
            )
        self._sizes = program.sizes
        self._parameters = program.parameters
        shapes = Shapes(
            [parameter.arrays[0].shape for parameter in self.flow.hlo.parameters],
            [type_.shape for _, type_ in self.flow.results],
        )
        if program.shapes is not None:
            shapes = program.shapes(*shapes)
        self._provenance = Provenance(self.flow, program.parameters, program.outputs, shapes)
        self._sources = Sources(program.text)
        # Cached by text: a program has thousands of collectives, but few combinations of mesh axes.
        self._groups: dict[str, _Groups] = {}
        self._verdicts: Callable[[], Verdicts] | None = None
        self.data: tuple[str, ...] = ()

    def judge_by(self, layouts: Callable[[], Layouts]) -> None:
        """Derive verdicts from layouts when one is first read."""
        provenance = self._provenance
        data = data_of(self._parameters, provenance.shapes.parameters, provenance.trained)
        self.data = tuple(dict.fromkeys(str(self._parameters[i][0]) for i in sorted(data)))
        self._verdicts = cache(partial(_verdicts, layouts, self._parameters, data))

    def collective(self, moved: MovedArray) -> Collective:
        """Convert a moved array to a row of the ledger."""
        axes, size = self._groups_of(moved.groups)
        paths: list[Path] = []
        arguments: list[str] = []
        served = self._provenance.of(moved)
        source, called_from, name = self._described(moved)
        for parameter in served.parameters:
            argument, *keys = self._parameters[parameter]
            paths.append(Path(keys))
            arguments.append(str(argument))
        row = Collective(
            kind=moved.kind,
            mesh_axes=axes,
            group_size=size,
            bytes=moved.type.bytes,
            count=moved.count,
            paths=tuple(paths),
            arguments=tuple(arguments),
            phase=served.phase,
            source=source,
            op=moved.instruction.name,
            moves=served.moves,
            called_from=called_from,
        )
        verdicts = self._verdicts
        if verdicts is not None:
            judge_later(row, lambda one: verdicts().of(one, name, served.parameters))
        return row

    def _groups_of(self, text: str) -> _Groups:
        """Return the mesh axes and the group size of replica groups."""
        if text not in self._groups:
            groups = groups_of(text, math.prod(self._sizes.values())) or ()
            axes = mesh_axes_of(groups, self._sizes) if groups and self._sizes else None
            self._groups[text] = axes, max(map(len, groups), default=None)
        return self._groups[text]

    def _described(self, moved: MovedArray) -> tuple[str | None, str | None, str]:
        """Return the lines and the JAX name of the nearest instruction that has source lines."""
        for instruction in self._provenance.described(moved):
            lines = self._sources.of(instruction)
            if lines is not None:
                return lines.source, lines.called_from, instruction.metadata("op_name") or ""
        return None, None, ""

    def with_line(self, warning: str) -> str:
        """Add the source line to a compiler warning."""
        frame = re.search(r"stack_frame_id=(\d+)", warning)
        lines = frame and self._sources.of_frame(int(frame[1]))
        if lines is None:
            return warning
        return f"{warning} at {lines.source}"

    def not_understood(self, collectives: Sequence[Collective]) -> Iterator[str]:
        """Yield a sentence for each part of the program that could not be parsed."""
        for other in unknown_collectives(self.flow):
            yield f"{other.opcode} ({other.name}) is an unknown kind of collective and is left out"
        # Without repeats: a combined collective is one instruction with several arrays.
        unknown = dict.fromkeys(
            collective.op for collective in collectives if collective.mesh_axes is None
        )
        if unknown and self._sizes:
            why = "do not fit the mesh, or have an unknown format"
            yield f"the device groups of {', '.join(unknown)} {why}"
        elif unknown:
            why = "so mesh axes have no names: pass the mesh as `mesh=`"
            yield f"the program's mesh is unknown, {why}"
        endless = dict.fromkeys(
            collective.op for collective in collectives if collective.count is None
        )
        if endless:
            why = "a loop's length depends on data, so each operation is counted once"
            yield f"the number of runs of {', '.join(endless)} is unknown: {why}"

    def idle(
        self, collectives: Sequence[Collective], sharded: frozenset[str] | None
    ) -> tuple[str, ...]:
        """Return the mesh axes over which nothing is moved or sharded; empty if this is unknown.

        Args:
            collectives: the collectives of the program.
            sharded: the mesh axes that shard an argument or a result; None if this is unknown.
        """
        used = set(sharded or ())
        for collective in collectives:
            used.update(collective.mesh_axes or ())
        unknown = sharded is None or any(collective.mesh_axes is None for collective in collectives)
        if unknown or unknown_collectives(self.flow):
            return ()
        return tuple(axis for axis, size in self._sizes.items() if size > 1 and axis not in used)


def _verdicts(
    layouts: Callable[[], Layouts], parameters: Sequence[Path], data: Collection[int]
) -> Verdicts:
    """Derive verdicts from layouts."""
    # Without Shardy's passes, there are no layouts, and a ledger has no verdicts.
    with suppress(FunctreeError):
        renamed = named(layouts(), parameters)
        if renamed is not None:
            return Verdicts(renamed, data)
    return Verdicts(Layouts((), {}), ())


def _memory(program: CompiledProgram, flow: DataFlow) -> Memory:
    """Return the memory of a program.

    If the compiler does not report it, the memory covers only parameters and results.
    """
    sizes: dict[Path, int] = {}
    for path, parameter in zip(program.parameters, flow.hlo.parameters, strict=True):
        sizes[path] = parameter.arrays[0].bytes
    known = program.memory()
    if known is None:
        outputs = sum(type_.bytes for _, type_ in flow.results)
        return Memory(BytesByPath(sizes), outputs, 0, 0, sum(sizes.values()) + outputs)
    # The compiler reports host memory separately; a `Memory` includes it.
    on_host = known.host_argument_size_in_bytes + known.host_output_size_in_bytes
    on_host += known.host_temp_size_in_bytes - known.host_alias_size_in_bytes
    arguments = known.argument_size_in_bytes + known.host_argument_size_in_bytes
    outputs = known.output_size_in_bytes + known.host_output_size_in_bytes
    aliases = known.alias_size_in_bytes + known.host_alias_size_in_bytes
    temporaries = known.temp_size_in_bytes + known.host_temp_size_in_bytes
    peak = known.peak_memory_in_bytes
    allocated = arguments + outputs - aliases + temporaries
    if program.backend == "cpu":  # the CPU compiler's peak leaves out temporaries
        peak = allocated
    elif program.backend.startswith("tpu"):
        # The TPU compiler's peak includes host memory and the core's fast memory. The allocations
        # in main memory limit the peak there.
        peak = min(peak, allocated - on_host)
    return Memory(BytesByPath(sizes), outputs, aliases, temporaries, peak)
