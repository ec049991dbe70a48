"""`read_ledger` reads a `Ledger` from a compiled program and the paths of its arrays."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

from functree.compiled.collective import BytesByPath, Collective, Memory, judge_later
from functree.compiled.data_flow import DataFlow
from functree.compiled.garbage import without_collector
from functree.compiled.hlo import Hlo
from functree.compiled.layouts import Layouts, named
from functree.compiled.ledger import Ledger
from functree.compiled.moved_arrays import (
    MovedArray,
    groups_of,
    mesh_axes_of,
    moved_arrays,
    unknown_collectives,
)
from functree.compiled.provenance import Provenance, Shape, Shapes
from functree.compiled.sources import Sources
from functree.compiled.verdicts import Verdicts, data_of
from functree.errors import FunctreeError, count
from functree.tree.paths import Path


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
        nearest = list(self._provenance.described(moved))
        if moved.arrays > 1:
            # A combined collective has its first array's line, but each moved value has its own.
            nearest[:2] = reversed(nearest[:2])
        for instruction in nearest:
            lines = self._sources.of(instruction)
            if lines is not None:
                return lines.source, lines.called_from, instruction.metadata("op_name") or ""
        return None, None, ""

    def with_line(self, warning: str) -> str:
        """Add the source line to a compiler warning."""
        frame = re.search(r"stack_frame_id=(\d+)", warning)
        if frame is None:
            return warning
        lines = self._sources.of_frame(int(frame[1]))
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
