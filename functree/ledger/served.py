"""An array that a collective moves ─► the parameters that it serves, found by what is made of what in the program."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

from functree.ledger.flow import MOVES, Flow, Value
from functree.ledger.hlo import Instruction
from functree.ledger.moved import KINDS, Moved

_GATHERS = frozenset({"all-gather", "all-to-all", "collective-permute"})
# Where elements at different places are combined. Elsewhere each element of a result is made of the elements of the
# operands at the same place, as in the update of an optimizer.
_COMBINES = frozenset({
    "cholesky", "convolution", "custom-call", "dot", "fft", "gather", "iota", "reduce", "reduce-window", "rng",
    "rng-bit-generator", "scatter", "select-and-scatter", "sort", "triangular-solve", *KINDS,
})  # fmt: skip
_PRODUCTS = frozenset({"convolution", "custom-call", "dot", "gather", "scatter"})
# What a TPU starts, and goes on with beside other work; and where it puts the result.
_ASYNCHRONOUS = ('"AsyncCollectiveStart"', '"AsyncCollectiveDone"')
_EMPTY = ('"AllocateBuffer"',)


class Served:
    """The parameters that the collectives of a program serve.

    Parameters and outputs are numbers, in the order of the program.

    Args:
        flow: where the values of the program come from.
    """

    def __init__(self, flow: Flow):
        self._flow = flow
        entry = flow.hlo.computations[flow.hlo.entry]
        self._parameters = {one: int(one.argument) for one in entry if one.opcode == "parameter"}

    def weights(self, moved: Moved) -> frozenset[int]:
        """The parameters that the moved array consists of; empty if it was computed."""
        return self._of(self._operand(moved))

    def products(self, moved: Moved) -> frozenset[int]:
        """The parameters that were multiplied, or looked up in, to make the moved array."""
        found: set[int] = set()
        for value in self._flow.origins(self._operand(moved), _is_elementwise):
            if value.instruction.opcode in _PRODUCTS:
                for i in range(len(value.instruction.operands)):
                    found |= self._of(self._flow.operand(value, i))
        return frozenset(found)

    def outputs(self, moved: Moved) -> frozenset[int]:
        """The outputs that are made of the moved array element by element: a gradient's are those of its parameter."""
        whole, part = self._outputs.get(Value(moved.instruction), set()), Value(moved.instruction, (moved.index,))
        return frozenset(whole | self._outputs.get(part, set()))

    @cached_property
    def _outputs(self) -> Mapping[Value, set[int]]:
        """For each result of a collective, the outputs that are made of it element by element."""
        hlo, found = self._flow.hlo, defaultdict[Value, set[int]](set)
        result = hlo.roots[hlo.entry]
        names = result.operands if result.opcode == "tuple" else [result.name]
        for i, name in enumerate(names):
            for value in self._flow.origins(Value(hlo.instructions[name]), _is_elementwise):
                if _kind(value.instruction) is not None:
                    found[value].add(i)
        return found

    def _operand(self, moved: Moved) -> Value:
        operands = moved.instruction.operands
        return Value(self._flow.hlo.instructions[operands[min(moved.index, len(operands) - 1)]])

    def _of(self, value: Value) -> frozenset[int]:
        """The parameters that a value consists of; empty if it was computed."""
        origins = {one.instruction for one in self._flow.origins(value, _is_moved)}
        made = {one for one in origins if not _is_filling(one)}
        if not made or not all(one in self._parameters for one in made):
            return frozenset()
        return frozenset(self._parameters[one] for one in made)


def _kind(one: Instruction) -> str | None:
    """The kind of a collective; None for another instruction."""
    kind = one.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _is_moved(one: Instruction) -> bool:
    """Whether an instruction moves elements and computes nothing."""
    if one.opcode == "custom-call":
        return one.attribute("custom_call_target") in _ASYNCHRONOUS
    return one.opcode in MOVES or _kind(one) in _GATHERS


def _is_elementwise(one: Instruction) -> bool:
    """Whether an instruction combines only elements at the same place."""
    return one.opcode not in _COMBINES and _kind(one) is None and one.opcode not in ("parameter", "constant")


def _is_filling(one: Instruction) -> bool:
    """Whether an instruction only fills an array, for example what is padded with."""
    return one.opcode in ("constant", "iota") or one.attribute("custom_call_target") in _EMPTY
