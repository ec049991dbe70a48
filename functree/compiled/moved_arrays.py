"""A compiled program ─► each array that a collective moves, by which instruction and how often."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from functree.compiled.data_flow import COLLECTIVES, KINDS, DataFlow, HloValue, is_in_pieces
from functree.compiled.hlo import ArrayType, Instruction
from functree.compiled.loops import runs

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
    """

    kind: str
    instruction: Instruction
    index: int
    arrays: int
    operand: HloValue
    type: ArrayType
    count: int | None

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
        for index, (operand, type_) in enumerate(zip(operands, types, strict=True)):
            yield MovedArray(kind, one, index, len(types), operand, type_, count)


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
