"""A compiled program ─► each array that a collective moves, by which instruction and how often."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from functree.ledger.flow import Flow
from functree.ledger.hlo import ArrayType, Instruction
from functree.ledger.loops import runs

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_OPCODES = {f"{kind}{ending}": kind for kind in KINDS for ending in ("", "-start")}


@dataclass(frozen=True)
class Moved:
    """An array that a collective moves.

    Attributes:
        kind: one of `KINDS`.
        instruction: the collective.
        index: the index of the array among those that the collective moves.
        type: the type of its result on one device.
        count: how often it runs; None if a loop around it has an unknown length.
    """

    kind: str
    instruction: Instruction
    index: int
    type: ArrayType
    count: int | None


def moved_in(flow: Flow) -> Iterator[Moved]:
    """The arrays that the collectives of a program move, in the order of its text."""
    times = runs(flow)
    done = _done(flow)
    for one in flow.hlo.instructions.values():
        kind = _OPCODES.get(one.opcode)
        if kind is None or _is_repeated(flow, one):
            continue
        # A start returns its operands too, and what it needs to go on; its end returns the result only.
        types = done.get(one.name, one).arrays
        root = flow.hlo.roots[one.computation]
        if kind == "all-reduce" and one.computation.startswith("all-reduce-scatter"):
            kind, types = "reduce-scatter", root.arrays
        for index, type_ in enumerate(types):
            yield Moved(kind, one, index, type_, times[one.computation])


def _done(flow: Flow) -> dict[str, Instruction]:
    """The end of each asynchronous collective, by the name of its start."""
    ends = [one for one in flow.hlo.instructions.values() if one.opcode.endswith("-done")]
    return {one.operands[0]: one for one in ends if one.opcode.removesuffix("-done") in KINDS}


_CHAIN = re.compile(r'chain_id="(\d+)"')


def _is_repeated(flow: Flow, one: Instruction) -> bool:
    """Whether this is a later part of an asynchronous collective of a TPU.

    Such a collective is in several fusions, which start it, go on with it beside other work, and end it.
    """
    if _CHAIN.search(one.attribute("frontend_attributes") or "") is None:
        return False
    others = flow.hlo.computations[one.computation]
    return not any(other.attribute("custom_call_target") == '"AsyncCollectiveStart"' for other in others)
