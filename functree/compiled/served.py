"""An array that a collective moves ─► the parameters that it serves, found by what is made of what in the program."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

from functree.compiled.flow import COLLECTIVES, MOVES, RESHAPES, Flow, Value
from functree.compiled.hlo import Instruction
from functree.compiled.moved import Moved

_GATHERS = frozenset({"all-gather", "all-to-all", "collective-permute"})
# Where elements at different places are combined, or begin. Elsewhere each element of a result is made of the elements
# of the operands at the same place, as in the update of an optimizer.
_NOT_ELEMENTWISE = frozenset({
    "cholesky", "constant", "convolution", "dot", "fft", "gather", "iota", "parameter", "reduce", "reduce-window",
    "rng", "rng-bit-generator", "scatter", "select-and-scatter", "sort", "triangular-solve",
})  # fmt: skip
_PRODUCTS = frozenset({"convolution", "custom-call", "dot", "gather", "scatter"})
_READS = frozenset({"dynamic-slice", "gather", "slice"})  # what takes numbers out of an array
# What a TPU starts, and goes on with beside other work; what it fetches in several pieces; where it puts results.
_MOVING_CALLS = ('"AsyncCollectiveStart"', '"AsyncCollectiveDone"', '"ConcatBitcast"')
_EMPTY = ('"AllocateBuffer"',)


class Served:
    """The parameters that the collectives of a program serve.

    Parameters and outputs are numbers, in the order of the program.

    Args:
        flow: where the values of the program come from.
    """

    def __init__(self, flow: Flow):
        self._flow = flow
        self._parameters = {one: i for i, one in enumerate(flow.hlo.parameters)}

    def weights(self, moved: Moved) -> frozenset[int]:
        """The parameters that the moved array consists of; empty if it was computed."""
        return self._of(moved.operand)

    def products(self, moved: Moved) -> frozenset[int]:
        """The parameters that were multiplied, or looked up in, to make the moved array."""
        found: set[int] = set()
        for value in self._flow.origins(moved.operand, self._is_local):
            for product in self._products_of(value):
                for i in range(len(product.instruction.operands)):
                    found |= self._of(self._flow.operand(product, i))
        return frozenset(found)

    def _products_of(self, value: Value) -> list[Value]:
        """The products that a value is: itself, or those whose parts it is the sum of, as GPUs split long products."""
        one = value.instruction
        if one.opcode == "reduce":
            if self._flow.hlo.roots[one.called("to_apply")].opcode != "add":
                return []
            parts = self._flow.origins(self._flow.operand(value, 0), self._is_moved)
            return [part for part in parts if part.instruction.opcode == "dot"]
        return [value] if self._is_product(one) else []

    def _is_product(self, one: Instruction) -> bool:
        return one.opcode in _PRODUCTS or one in self._lookups

    @cached_property
    def _products(self) -> list[Instruction]:
        """The instructions that multiply values, or look up in them."""
        by_opcode = self._flow.hlo.by_opcode
        return [*(one for opcode in _PRODUCTS for one in by_opcode.get(opcode, ())), *self._lookups]

    @cached_property
    def _lookups(self) -> frozenset[Instruction]:
        """The slices at places that were read from an array: what compilers make of a gather, or a scatter, in a loop.

        The places of other slices are counted by a loop, or known for each device.
        """
        by_opcode, named = self._flow.hlo.by_opcode, self._flow.hlo.instructions
        found = set[Instruction]()
        for opcode, first in (("dynamic-slice", 1), ("dynamic-update-slice", 2)):
            for one in by_opcode.get(opcode, ()):
                places = [Value(named[name]) for name in one.operands[first:]]
                _, passed = self._flow.history(places, self._is_computed)
                if any(value.instruction.opcode in _READS and self._is_data(value) for value in passed):
                    found.add(one)
        return frozenset(found)

    def _is_computed(self, one: Instruction) -> bool:
        """Whether an instruction computes with numbers, as it is done with the places of slices."""
        return one.opcode not in _NOT_ELEMENTWISE

    def _is_data(self, read: Value) -> bool:
        """Whether what is read from is not a table of constants."""
        table = self._flow.origins(self._flow.operand(read, 0), self._is_moved)
        return not all(_is_filling(value.instruction) for value in table)

    @cached_property
    def computed_with(self) -> frozenset[int]:
        """The parameters that products are made of, also after element-wise operations: biases, scales of norms."""
        named = self._flow.hlo.instructions
        operands = [Value(named[name]) for one in self._products for name in one.operands]
        origins, _ = self._flow.history(operands, self._is_elementwise)
        return frozenset(self._parameters[one.instruction] for one in origins if one.instruction in self._parameters)

    def outputs(self, moved: Moved) -> frozenset[int]:
        """The outputs that are made of the moved array element by element: a gradient's are those of its parameter."""
        reached, _ = self._outputs
        return frozenset(reached[Value(moved.instruction)] | reached[Value(moved.instruction, (moved.index,))])

    def made_of(self, output: int) -> frozenset[int]:
        """The parameters that an output is made of element by element: the old value of what it is the new value of."""
        _, made = self._outputs
        return frozenset(made[output])

    @cached_property
    def _outputs(self) -> tuple[Mapping[Value, set[int]], Mapping[int, set[int]]]:
        """What the outputs are made of element by element: for each result of a collective the outputs, and for each
        output the parameters."""
        reached, made = defaultdict[Value, set[int]](set), defaultdict[int, set[int]](set)
        for i, (result, _) in enumerate(self._flow.results):
            origins, passed = self._flow.history([result], self._is_elementwise)
            for value in passed:
                if value.instruction.opcode in COLLECTIVES:
                    reached[value].add(i)
            made[i].update(self._parameters[one.instruction] for one in origins if one.instruction in self._parameters)
        return reached, made

    def factors(self, moved: Moved) -> frozenset[int]:
        """The parameters that the moved array itself is multiplied by, or looked up in, afterwards."""
        if moved.kind not in _GATHERS:
            return frozenset()
        whole, part = self._factors[Value(moved.instruction)], self._factors[Value(moved.instruction, (moved.index,))]
        return frozenset(whole | part)

    @cached_property
    def _factors(self) -> Mapping[Value, set[int]]:
        """For each result of a collective, the parameters that it is multiplied by."""
        found = defaultdict[Value, set[int]](set)
        for one in self._products:
            walks = [
                self._flow.history([Value(self._flow.hlo.instructions[name])], self._is_moved) for name in one.operands
            ]
            parameters = frozenset[int]().union(*(self._among(origins) for origins, _ in walks))
            for origins, passed in walks:
                if self._among(origins):
                    continue
                for value in passed:
                    if value.instruction.opcode in COLLECTIVES:
                        found[value] |= parameters
        return found

    def _of(self, value: Value) -> frozenset[int]:
        """The parameters that a value consists of; empty if it was computed."""
        return self._among(self._flow.origins(value, self._is_moved))

    def _among(self, origins: frozenset[Value]) -> frozenset[int]:
        """The parameters that these values are; empty if one of them was computed."""
        made = {one.instruction for one in origins if not _is_filling(one.instruction)}
        if not made or not all(one in self._parameters for one in made):
            return frozenset()
        return frozenset(self._parameters[one] for one in made)

    def _is_moved(self, one: Instruction) -> bool:
        """Whether an instruction moves elements and computes nothing."""
        if one.opcode == "custom-call":
            return one.attribute("custom_call_target") in _MOVING_CALLS
        if one.opcode == "maximum":
            # TPUs join arrays so: each is padded by the least value to the shape of the whole.
            return all(self._is_padded(Value(self._flow.hlo.instructions[name])) for name in one.operands)
        return one.opcode in MOVES or COLLECTIVES.get(one.opcode) in _GATHERS

    def _is_padded(self, value: Value) -> bool:
        origins = self._flow.origins(value, lambda one: one.opcode == "convert" or one.opcode in RESHAPES)
        return all(one.instruction.opcode == "pad" for one in origins)

    def _is_local(self, one: Instruction) -> bool:
        """Whether an instruction combines only elements at the same place of one device."""
        return one.opcode not in COLLECTIVES and self._is_elementwise(one)

    def _is_elementwise(self, one: Instruction) -> bool:
        """Whether an instruction combines only elements at the same place, of one device or of several."""
        if one.opcode == "custom-call":
            return one.attribute("custom_call_target") in _MOVING_CALLS
        if one.opcode == "broadcast" or one.opcode in RESHAPES:
            # A single number is at no place. The norm of all gradients, by which each of them is divided, is such a
            # number: it is made of everything.
            return _is_number(one) or not _is_number(self._flow.hlo.instructions[one.operands[0]])
        return one.opcode not in _NOT_ELEMENTWISE and one not in self._lookups


def _is_number(one: Instruction) -> bool:
    """Whether a result that is one array has no dimensions."""
    return "[]" in one.type


def _is_filling(one: Instruction) -> bool:
    """Whether an instruction only fills an array, for example what is padded with."""
    return one.opcode in ("constant", "iota") or one.attribute("custom_call_target") in _EMPTY
