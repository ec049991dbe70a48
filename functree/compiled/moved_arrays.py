"""`moved_arrays` lists the arrays that a compiled program's collectives move.

Each array comes with its instruction, the number of runs, and the replica groups as written.
Compilers write replica groups in several formats, even within one program. All formats list
positions in the compiled program's mesh, not device ids. The mesh in a format may have axes that
the compiler invented. Groups are therefore always expanded and compared with the user's mesh.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from functree.compiled.data_flow import COLLECTIVES, KINDS, DataFlow, HloValue, is_in_pieces, runs
from functree.compiled.hlo import ArrayType, Instruction, numbers

# Collectives that JAX or a compiler flag can produce, but that the ledger does not understand.
_OTHERS = ("collective-broadcast", "recv", "send")


@dataclass(frozen=True)
class MovedArray:
    """An array that a collective moves.

    Attributes:
        kind: one of `KINDS`.
        instruction: the collective.
        index: the index of the array among the arrays that the collective moves.
        arrays: the number of arrays that the collective moves.
        operand: the value that is moved.
        type: the type of the array's result on one device.
        count: the number of runs; None if an enclosing loop has unknown length.
        groups: the text of the replica groups, or of the source-target pairs.
    """

    kind: str
    instruction: Instruction
    index: int
    arrays: int
    operand: HloValue
    type: ArrayType
    count: int | None
    groups: str

    @property
    def results(self) -> list[HloValue]:
        """The values that contain the array: the full result, and the parts that hold the array."""
        collective = self.instruction
        parts = range(len(collective.arrays)) if is_in_pieces(collective) else (self.index,)
        return [HloValue(collective), *(HloValue(collective, (part,)) for part in parts)]


def moved_arrays(flow: DataFlow) -> Iterator[MovedArray]:
    """Yield the arrays that a program's collectives move, in the order of its text."""
    times = runs(flow)
    ends = _ends(flow)
    for instruction in flow.hlo.instructions.values():
        if instruction.opcode not in COLLECTIVES or _is_repeated(flow, instruction):
            continue
        kind = COLLECTIVES[instruction.opcode]
        # The start of an asynchronous collective returns its operands and its context, too. The end
        # returns only the result.
        types = ends.get(instruction.name, instruction).arrays
        # The TPU compiler writes a reduce-scatter as a computation named `all-reduce-scatter` that
        # sums and slices.
        if kind == "all-reduce" and instruction.computation.startswith("all-reduce-scatter"):
            kind, types = "reduce-scatter", flow.hlo.roots[instruction.computation].arrays
        operands, types = _each(flow, instruction, types)
        count = times[instruction.computation]
        groups = (
            instruction.attribute("replica_groups")
            or instruction.attribute("source_target_pairs")
            or ""
        )
        for index, (operand, type_) in enumerate(zip(operands, types, strict=True)):
            yield MovedArray(kind, instruction, index, len(types), operand, type_, count, groups)


def unknown_collectives(flow: DataFlow) -> list[Instruction]:
    """Find a program's collectives of kinds that the ledger does not understand."""
    collectives: list[Instruction] = []
    for name in _OTHERS:
        collectives += flow.hlo.by_opcode.get(name, ())
        collectives += flow.hlo.by_opcode.get(f"{name}-start", ())
    # A callback's exchange with the host moves nothing between devices.
    return [
        collective for collective in collectives if not collective.mentions("is_host_transfer=true")
    ]


def _each(
    flow: DataFlow, collective: Instruction, types: Sequence[ArrayType]
) -> tuple[list[HloValue], Sequence[ArrayType]]:
    """Return the operand of each array, and the type of its result.

    Args:
        flow: the flow of values in the program.
        collective: the collective.
        types: the types of its results.
    """
    joined = flow.concatenated(collective)
    if joined:
        sizes = [ArrayType(types[0].dtype, (size,)) for _, size in joined]
        return [operand for operand, _ in joined], sizes
    operands = [HloValue(flow.hlo.instructions[name]) for name in collective.operands]
    if collective.opcode.startswith("ragged-all-to-all"):
        return operands[:1], types[:1]
    if is_in_pieces(collective):
        whole = ArrayType(types[0].dtype, (len(types), *types[0].shape))
        return operands[:1], [whole]
    return operands, types


def _ends(flow: DataFlow) -> dict[str, Instruction]:
    """Index the ends of asynchronous collectives by the names of their starts."""
    ends: dict[str, Instruction] = {}
    for kind in KINDS:
        for end in flow.hlo.by_opcode.get(f"{kind}-done", ()):
            ends[end.operands[0]] = end
    return ends


_CHAIN = re.compile(r'chain_id="(\d+)"')


def _is_repeated(flow: DataFlow, collective: Instruction) -> bool:
    """Return whether this is a later part of an asynchronous collective on a TPU.

    Several fusions contain such a collective. They start it, continue it during other work, and end
    it. Only the first part is listed.
    """
    if _CHAIN.search(collective.attribute("frontend_attributes") or "") is None:
        return False
    for other in flow.hlo.computations[collective.computation]:
        if other.attribute("custom_call_target") == '"AsyncCollectiveStart"':
            return False
    return True


Group = tuple[int, ...]
"""Devices that communicate with each other, as row-major positions in a mesh."""

# `[4,2]<=[2,4]T(1,0)`
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# `mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}`: the sizes, the order, the chosen axes
_MESH = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_SIZE = re.compile(r"'?([^',=]+)'?=(\d+)")
_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
# `{{0,1},{2,3}}`
_LIST = re.compile(r"\{([\d,]*)\}")


def groups_of(text: str, devices: int) -> tuple[Group, ...] | None:
    """Parse the groups in `replica_groups=`, or the pairs in `source_target_pairs=`.

    Return None for an unknown format.

    Args:
        text: the value of the attribute.
        devices: the number of devices.
    """
    text = text.strip()
    if text == "{}":  # all devices
        return (tuple(range(devices)),)
    if re.fullmatch(r"\{(\{[\d,]*\},?)*\}", text):
        return tuple(map(numbers, _LIST.findall(text[1:-1])))
    iota = _IOTA.fullmatch(text)
    if iota is not None:
        ids = _iota(*iota.groups())
        if ids.ndim != 2:
            return None
        return _rows(ids)
    mesh = _MESH.fullmatch(text)
    if mesh is not None:
        return _of_mesh(*mesh.groups())
    return None


def mesh_axes_of(groups: Iterable[Group], sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return the mesh axes along which the devices of a group differ, in the order of the mesh.

    Return None if a position is outside the mesh. An axis is included even if a group covers only a
    part of it.

    Args:
        groups: the groups.
        sizes: the mesh axes with their sizes.
    """
    shape = tuple(sizes.values())
    varying: set[str] = set()
    for group in set(groups):
        if max(group, default=0) >= math.prod(shape):
            return None
        if not group:
            continue
        coordinates = np.unravel_index(np.asarray(group, int), shape)
        for name, along in zip(sizes, coordinates, strict=True):
            if along.min() < along.max():
                varying.add(name)
    return tuple(name for name in sizes if name in varying)


def _rows(ids: np.ndarray) -> tuple[Group, ...]:
    return tuple(map(tuple, ids.tolist()))


def _iota(shape: str, order: str, transposed: str | None) -> np.ndarray:
    """Expand positions in the form `[4,2]<=[2,4]T(1,0)`.

    The numbers from 0 are put into the shape (2, 4), transposed with (1, 0), and reshaped to
    (4, 2).
    """
    ids = np.arange(math.prod(numbers(order))).reshape(numbers(order))
    if transposed is not None:
        ids = ids.transpose(numbers(transposed))
    return ids.reshape(numbers(shape))


def _of_mesh(
    axes: str, order: str | None, transposed: str | None, chosen: str
) -> tuple[Group, ...] | None:
    """Expand `mesh['x'=4,'y'=2] {'x'}`: groups of positions that differ only along x.

    `{'x':(2)2}` is the minor half of x. The number in parentheses is the size of the axis before
    this part, and the second number is the part's own size.
    """
    sizes: dict[str, int] = {}
    strides: dict[str, int] = {}  # the distance between neighbors along each axis
    for name, size in reversed(_SIZE.findall(axes)):
        strides[name] = math.prod(sizes.values())
        sizes[name] = int(size)
    positions = np.arange(math.prod(sizes.values()))
    is_first = np.ones(positions.size, bool)  # whether a position is the first of its group
    offsets = np.zeros(1, int)  # the distances of a group's positions from the first
    for name, before, size in _AXIS.findall(chosen):
        if name not in sizes:
            return None
        part = int(size or sizes[name])
        stride = strides[name] * sizes[name] // (int(before or 1) * part)
        is_first &= positions // stride % part == 0
        offsets = np.add.outer(offsets, stride * np.arange(part)).reshape(-1)
    ids = positions
    if order is not None:
        ids = _iota(str(positions.size), order, transposed)
    return _rows(ids[np.add.outer(positions[is_first], offsets)])
