"""A compiled program ─► each array that a collective moves, by which instruction and how often."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from functree.compiled.flow import COLLECTIVES, KINDS, Flow, Value
from functree.compiled.hlo import ArrayType, Instruction
from functree.compiled.loops import runs

# Collectives that JAX can make, or a user by a flag, and that are not understood.
_OTHERS = ("collective-broadcast", "ragged-all-to-all", "recv", "send")


@dataclass(frozen=True)
class Moved:
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
    operand: Value
    type: ArrayType
    count: int | None


def moved_in(flow: Flow) -> Iterator[Moved]:
    """The arrays that the collectives of a program move, in the order of its text."""
    times = runs(flow)
    done = _done(flow)
    for one in [one for one in flow.hlo.instructions.values() if one.opcode in COLLECTIVES]:
        kind = COLLECTIVES[one.opcode]
        if _is_repeated(flow, one):
            continue
        # A start returns its operands too, and what it needs to go on; its end returns the result only.
        types = done.get(one.name, one).arrays
        root = flow.hlo.roots[one.computation]
        if kind == "all-reduce" and one.computation.startswith("all-reduce-scatter"):
            kind, types = "reduce-scatter", root.arrays
        operands, types = _each(flow, one, types)
        for index, (operand, type_) in enumerate(zip(operands, types, strict=True)):
            yield Moved(kind, one, index, len(types), operand, type_, times[one.computation])


def others_in(flow: Flow) -> list[Instruction]:
    """The collectives of a program of kinds that are not understood."""
    opcodes = [f"{name}{ending}" for name in _OTHERS for ending in ("", "-start")]
    return [one for opcode in opcodes for one in flow.hlo.by_opcode.get(opcode, ())]


def _each(flow: Flow, one: Instruction, types: list[ArrayType]) -> tuple[list[Value], list[ArrayType]]:
    """The operand of each array, and the type of its result."""
    whole = types[0]
    joined = flow.concatenated(one)
    if joined:
        return [operand for operand, _ in joined], [ArrayType(whole.dtype, (size,)) for _, size in joined]
    operands = [Value(flow.hlo.instructions[name]) for name in one.operands]
    if one.opcode == "all-to-all" and one.attribute("dimensions") is None:
        # One array in as many pieces as there are devices.
        return operands[:1], [ArrayType(whole.dtype, (len(types), *whole.shape))]
    return operands, types


def _done(flow: Flow) -> dict[str, Instruction]:
    """The end of each asynchronous collective, by the name of its start."""
    ends = [one for kind in KINDS for one in flow.hlo.by_opcode.get(f"{kind}-done", ())]
    return {one.operands[0]: one for one in ends}


_CHAIN = re.compile(r'chain_id="(\d+)"')


def _is_repeated(flow: Flow, one: Instruction) -> bool:
    """Whether this is a later part of an asynchronous collective of a TPU.

    Such a collective is in several fusions, which start it, go on with it beside other work, and end it.
    """
    if _CHAIN.search(one.attribute("frontend_attributes") or "") is None:
        return False
    others = flow.hlo.computations[one.computation]
    return not any(other.attribute("custom_call_target") == '"AsyncCollectiveStart"' for other in others)
