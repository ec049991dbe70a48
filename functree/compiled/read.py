"""A compiled program, with the paths of its arguments and results ─► its `Ledger`."""

import gc
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from functree.compiled.attribution import Attribution
from functree.compiled.collective import Collective
from functree.compiled.flow import Flow
from functree.compiled.groups import groups_of, mesh_axes_of
from functree.compiled.hlo import Hlo, Instruction
from functree.compiled.ledger import Ledger
from functree.compiled.memory import BytesByPath, Memory
from functree.compiled.moved import Moved, moved_in, others_in
from functree.compiled.phases import Phases
from functree.compiled.sources import Sources
from functree.errors import FunctreeError, count
from functree.tree.paths import Path


class CompiledProgram(NamedTuple):
    """A program as its compiler describes it.

    Attributes:
        text: the text of the program.
        memory: returns the statistics of its memory, as `compiled.memory_analysis` does; None if the compiler gives
            none. It is called last.
        parameters: the path of each parameter of the program; it begins with the name of an argument.
        outputs: the path of each output.
        sizes: the sizes of the mesh axes; empty if the mesh is not known.
        backend: the name of what it is compiled for.
        warnings: what the compiler has said; None if it was not listened to.
    """

    text: str
    memory: Callable[[], Any]
    parameters: Sequence[Path]
    outputs: Sequence[Path]
    sizes: dict[str, int]
    backend: str
    warnings: tuple[str, ...] | None


def read_ledger(program: CompiledProgram) -> Ledger:
    """The ledger of a program.

    Raises:
        FunctreeError: the program has other parameters than the arrays of the function, so that no path is known.
    """
    with _without_collector():
        return _read(program)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Let Python's collector of garbage rest: it would look at all objects of a large program again and again.

    An instruction is an object, and none of them is in a reference cycle. It halves the time for 50,000 instructions.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _read(program: CompiledProgram) -> Ledger:
    reader = _Reader(program)
    collectives = tuple(map(reader.collective, moved_in(reader.flow)))
    return Ledger(
        collectives,
        _memory(program, reader.flow),
        program.backend,
        program.sizes,
        tuple(map(reader.with_line, program.warnings or ())),
        program.warnings is not None,
        tuple(reader.not_understood(collectives)),
    )


_Groups = tuple[tuple[str, ...] | None, int | None]
"""The mesh axes over which a collective moves arrays, and the number of devices in a group."""


class _Reader:
    """All that is asked about the collectives of one program."""

    def __init__(self, program: CompiledProgram):
        self.flow: Flow = Flow(Hlo(program.text))
        have, known = len(self.flow.hlo.parameters), len(program.parameters)
        if have != known:
            why = f"the program has {count(have, 'parameter')}, but {count(known, 'array')} of the function were found"
            raise FunctreeError(f"the ledger cannot name what it reads: {why}")
        self._sizes = program.sizes
        self._parameters = program.parameters
        self._attribution = Attribution(self.flow, program.parameters, program.outputs)
        self._phases = Phases(self.flow)
        self._sources = Sources(program.text)
        # Those of a collective, once for all arrays that the compiler has combined in it.
        self._groups: dict[Instruction, _Groups] = {}
        # By their text: a program has thousands of collectives, over a few combinations of mesh axes.
        self._known_groups: dict[str, _Groups] = {}

    def collective(self, moved: Moved) -> Collective:
        """What the ledger says about an array that is moved."""
        phase = self._phases.phase(moved)
        paths = [self._parameters[i] for i in self._attribution.of(moved, phase)]
        axes, size = self._groups_of(moved.instruction)
        return Collective(
            moved.kind,
            axes,
            size,
            moved.type.bytes,
            moved.count,
            tuple(Path(path[1:]) for path in paths),
            tuple(str(path[0]) for path in paths),
            phase,
            self._source(moved),
            moved.instruction.name,
        )

    def _groups_of(self, one: Instruction) -> _Groups:
        if one not in self._groups:
            text = one.attribute("replica_groups") or one.attribute("source_target_pairs") or ""
            if text not in self._known_groups:
                self._known_groups[text] = self._read_groups(text)
            self._groups[one] = self._known_groups[text]
        return self._groups[one]

    def _read_groups(self, text: str) -> _Groups:
        groups = groups_of(text, math.prod(self._sizes.values()))
        if not groups:
            return None, None
        axes = mesh_axes_of(groups, self._sizes) if self._sizes else None
        return axes, max(map(len, groups))

    def _source(self, moved: Moved) -> str | None:
        """The line of source of the nearest instruction that has one."""
        places = list(self._phases.described(moved))
        if moved.arrays > 1:  # the line of the collective is that of the first array
            places[:2] = reversed(places[:2])
        lines = map(self._sources.line, places)
        return next((line for line in lines if line is not None), None)

    def with_line(self, warning: str) -> str:
        """A warning of the compiler, with the line of source that it is about."""
        frame = re.search(r"stack_frame_id=(\d+)", warning)
        line = None if frame is None else self._sources.of_frame(int(frame[1]))
        return warning if line is None else f"{warning} at {line}"

    def not_understood(self, collectives: Sequence[Collective]) -> Iterator[str]:
        """A sentence for each thing in the program that could not be read."""
        for one in others_in(self.flow):
            yield f"{one.opcode} ({one.name}): the ledger does not know this kind of collective, and leaves it out"
        unknown = list(dict.fromkeys(one.op for one in collectives if one.mesh_axes is None))
        if unknown and self._sizes:
            yield f"the groups of devices of {', '.join(unknown)}: they are not on the mesh, or spelled in a new way"
        elif unknown:
            yield "the mesh of the program, so there are no names for the mesh axes: give it as `mesh=`"
        endless = list(dict.fromkeys(one.op for one in collectives if one.count is None))
        if endless:
            yield f"how often {', '.join(endless)} run: the length of a loop depends on data; they count once"


def _memory(program: CompiledProgram, flow: Flow) -> Memory:
    """The memory of a program; what the compiler does not say is taken from the program's parameters and results."""
    sizes: dict[Path, int] = {}
    for path, one in zip(program.parameters, flow.hlo.parameters, strict=True):
        sizes[path] = one.arrays[0].bytes
    known = program.memory()
    if known is None:
        outputs = sum(type_.bytes for _, type_ in flow.results)
        return Memory(BytesByPath(sizes), outputs, 0, 0, sum(sizes.values()) + outputs)
    given = known.argument_size_in_bytes + known.host_argument_size_in_bytes
    outputs = known.output_size_in_bytes + known.host_output_size_in_bytes
    aliases = known.alias_size_in_bytes + known.host_alias_size_in_bytes
    temporaries = known.temp_size_in_bytes + known.host_temp_size_in_bytes
    peak = known.peak_memory_in_bytes
    if program.backend == "cpu":  # whose compiler leaves out temporaries
        peak = given + outputs - aliases + temporaries
    return Memory(BytesByPath(sizes), outputs, aliases, temporaries, peak)
