"""A compiled program ─► each array that a collective moves, by which instruction, how often, and
over which mesh axes.

The compilers write the replica groups of a collective in several spellings, side by side in one
text. All of them list positions in the mesh that the program was compiled for, and not the ids of
devices. The mesh that a spelling names may have other axes than the user's, with names that the
compiler made up, so the groups are always written out and compared with the user's mesh.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from functree.compiled.data_flow import COLLECTIVES, KINDS, DataFlow, HloValue, is_in_pieces, runs
from functree.compiled.hlo import ArrayType, Instruction

# Collectives that JAX can make, or a user by a flag, and that are not understood.
_OTHERS = ("collective-broadcast", "recv", "send")


@dataclass(frozen=True)
class MovedArray:
    """An array that a collective moves.

    Attributes:
        kind: one of `KINDS`.
        instruction: the collective.
        index: the index of the array among those that the collective moves.
        arrays: the number of arrays that it moves.
        operand: what is moved.
        type: the type of its result on one device.
        count: how often it runs; None if a loop around it has an unknown length.
        groups: the text of its replica groups, or of its pairs of sources and targets.
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
        """What has the array among the results of the collective: all of these, and its part."""
        one = self.instruction
        parts = range(len(one.arrays)) if is_in_pieces(one) else (self.index,)
        return [HloValue(one), *(HloValue(one, (part,)) for part in parts)]


def moved_arrays(flow: DataFlow) -> Iterator[MovedArray]:
    """The arrays that the collectives of a program move, in the order of its text."""
    times = runs(flow)
    ends = _ends(flow)
    for one in flow.hlo.instructions.values():
        if one.opcode not in COLLECTIVES or _is_repeated(flow, one):
            continue
        kind = COLLECTIVES[one.opcode]
        # A start returns its operands too, and what it needs to go on; its end returns the result
        # only.
        types = ends.get(one.name, one).arrays
        # The compiler for TPUs writes a reduce-scatter as a computation of this name, which sums,
        # and takes a part of the sum.
        if kind == "all-reduce" and one.computation.startswith("all-reduce-scatter"):
            kind, types = "reduce-scatter", flow.hlo.roots[one.computation].arrays
        operands, types = _each(flow, one, types)
        count = times[one.computation]
        groups = one.attribute("replica_groups") or one.attribute("source_target_pairs") or ""
        for index, (operand, type_) in enumerate(zip(operands, types, strict=True)):
            yield MovedArray(kind, one, index, len(types), operand, type_, count, groups)


def unknown_collectives(flow: DataFlow) -> list[Instruction]:
    """The collectives of a program of kinds that are not understood."""
    found: list[Instruction] = []
    for name in _OTHERS:
        found += flow.hlo.by_opcode.get(name, ())
        found += flow.hlo.by_opcode.get(f"{name}-start", ())
    # What a callback or a print exchanges with the host moves nothing between devices.
    return [one for one in found if not one.mentions("is_host_transfer=true")]


def _each(
    flow: DataFlow, one: Instruction, types: Sequence[ArrayType]
) -> tuple[list[HloValue], Sequence[ArrayType]]:
    """The operand of each array, and the type of its result.

    Args:
        flow: where the values of the program come from.
        one: a collective.
        types: the types of its results.
    """
    joined = flow.concatenated(one)
    if joined:
        sizes = [ArrayType(types[0].dtype, (size,)) for _, size in joined]
        return [operand for operand, _ in joined], sizes
    operands = [HloValue(flow.hlo.instructions[name]) for name in one.operands]
    if one.opcode.startswith("ragged-all-to-all"):
        return operands[:1], types[:1]
    if is_in_pieces(one):
        whole = ArrayType(types[0].dtype, (len(types), *types[0].shape))
        return operands[:1], [whole]
    return operands, types


def _ends(flow: DataFlow) -> dict[str, Instruction]:
    """The end of each asynchronous collective, by the name of its start."""
    found: dict[str, Instruction] = {}
    for kind in KINDS:
        for one in flow.hlo.by_opcode.get(f"{kind}-done", ()):
            found[one.operands[0]] = one
    return found


_CHAIN = re.compile(r'chain_id="(\d+)"')


def _is_repeated(flow: DataFlow, one: Instruction) -> bool:
    """Whether this is a later part of an asynchronous collective of a TPU.

    Such a collective is in several fusions, which start it, go on with it beside other work, and
    end it. All of them have it as an instruction; it counts in the first.
    """
    if _CHAIN.search(one.attribute("frontend_attributes") or "") is None:
        return False
    for other in flow.hlo.computations[one.computation]:
        if other.attribute("custom_call_target") == '"AsyncCollectiveStart"':
            return False
    return True


Group = tuple[int, ...]
"""Positions in a mesh, in row-major order, that communicate with each other."""

# `[4,2]<=[2,4]T(1,0)`
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# `mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}`: the sizes, the order, the chosen axes
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}")
_SIZE = re.compile(r"'?([^',=]+)'?=(\d+)")
_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
# `{{0,1},{2,3}}`
_LIST = re.compile(r"\{([\d,]*)\}")


def groups_of(text: str, devices: int) -> tuple[Group, ...] | None:
    """The groups of `replica_groups=`, or the pairs of `source_target_pairs=`.

    None for a spelling that is not known.

    Args:
        text: the value of the attribute.
        devices: the number of devices.
    """
    text = text.strip()
    if text == "{}":  # all devices
        return (tuple(range(devices)),)
    if re.fullmatch(r"\{(\{[\d,]*\},?)*\}", text):
        return tuple(map(_numbers, _LIST.findall(text[1:-1])))
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
    """The mesh axes that vary within a group, in the order of the mesh.

    None if there are positions that the mesh does not have. A group may be a part of an axis only;
    the axis varies nevertheless.

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


def _numbers(text: str) -> Group:
    return tuple(int(number) for number in text.split(",") if number)


def _rows(ids: np.ndarray) -> tuple[Group, ...]:
    return tuple(map(tuple, ids.tolist()))


def _iota(shape: str, order: str, transposed: str | None) -> np.ndarray:
    """The numbers of `[4,2]<=[2,4]T(1,0)`.

    They count from 0 in the shape (2, 4), are transposed by (1, 0), and have the shape (4, 2) then.
    """
    ids = np.arange(math.prod(_numbers(order))).reshape(_numbers(order))
    if transposed is not None:
        ids = ids.transpose(_numbers(transposed))
    return ids.reshape(_numbers(shape))


_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


def _of_mesh(axes: str, order: str | None, chosen: str) -> tuple[Group, ...] | None:
    """`mesh['x'=4,'y'=2] {'x'}`: positions that differ along x only; `{'x':(2)2}` is the minor half
    of x.

    The part of an axis behind its name is (the product of the sizes of the parts before it) and its
    own size.
    """
    sizes = {name: int(size) for name, size in _SIZE.findall(axes)}
    ids = _device_ids(math.prod(sizes.values()), order)
    if ids is None:
        return None
    # Each axis is a dimension of `ids`; one of which a part is chosen is three dimensions: what is
    # before that part, the part itself, what is behind it.
    parts = {name: [size] for name, size in sizes.items()}
    moved: list[tuple[str, int]] = []  # the dimensions along which a group goes
    for name, before, size in _AXIS.findall(chosen):
        if name not in sizes:
            return None
        if not before:
            moved.append((name, 0))
            continue
        if len(parts[name]) > 1:
            return None  # two parts of one axis, which no compiler has been seen to write
        parts[name] = [int(before), int(size), sizes[name] // (int(before) * int(size))]
        moved.append((name, 1))
    shape: list[int] = []
    starts: dict[str, int] = {}  # the first dimension of each axis
    for name, dimensions in parts.items():
        starts[name] = len(shape)
        shape += dimensions
    # The dimensions of a group last, in the order in which the text names them.
    last = [starts[name] + part for name, part in moved]
    others = [i for i in range(len(shape)) if i not in last]
    group = math.prod(shape[i] for i in last)
    return _rows(ids.reshape(shape).transpose(*others, *last).reshape(-1, group))


def _device_ids(number: int, order: str | None) -> np.ndarray | None:
    """The positions of the devices of a mesh in its row-major order; None if they are others.

    Args:
        number: the number of devices.
        order: the text of `device_ids=`; None if they are in order.
    """
    if order is None:
        return np.arange(number)
    known = _ORDER.fullmatch(order)
    if known is None:
        ids = np.asarray(_numbers(order))
    else:
        ids = _iota(str(number), *known.groups())
    if ids.size != number:
        return None
    return ids
