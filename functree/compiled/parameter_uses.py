"""An array that a collective moves ─► the parameters and outputs that it has to do with.

They are found by what is made of what in the program: what the array consists of, what it is
multiplied by, and which outputs are made of it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from functree.compiled.data_flow import COLLECTIVES, MOVES, RESHAPES, DataFlow, HloValue
from functree.compiled.hlo import Instruction
from functree.compiled.moved_arrays import MovedArray

# The collectives that move elements and do not sum them.
_GATHERS = frozenset({"all-gather", "all-to-all", "collective-permute"})
# Where elements at different places are combined, or begin. Elsewhere each element of a result is
# made of the elements of the operands at the same place, as in the update of an optimizer.
_NOT_ELEMENTWISE = frozenset({
    "cholesky", "constant", "convolution", "dot", "fft", "gather", "iota", "parameter", "reduce",
    "reduce-window", "rng", "rng-bit-generator", "scatter", "select-and-scatter", "sort",
    "triangular-solve",
})  # fmt: skip
# What multiplies two arrays, or looks up in one. Custom calls may be products of a library, such as
# cuBLAS.
_PRODUCTS = frozenset({"convolution", "custom-call", "dot", "gather", "scatter"})
_READS = frozenset({"dynamic-slice", "gather", "slice"})  # what takes numbers out of an array
# Custom calls of TPUs that compute nothing: what is started, and goes on beside other work; what is
# fetched in several pieces; the memory in which results are put.
_MOVING_CALLS = ('"AsyncCollectiveStart"', '"AsyncCollectiveDone"', '"ConcatBitcast"')
_EMPTY = ('"AllocateBuffer"',)


class ParameterUses:
    """How the parameters and outputs of a program are related to the arrays that it moves.

    Parameters and outputs are indices, in the order of the program.

    Args:
        flow: where the values of the program come from.
    """

    def __init__(self, flow: DataFlow):
        self._flow = flow
        self._parameters = {one: i for i, one in enumerate(flow.hlo.parameters)}

    def weights(self, moved: MovedArray) -> frozenset[int]:
        """The parameters that the moved array consists of; empty if it was computed."""
        return self._parameters_of(moved.operand)

    def products(self, moved: MovedArray) -> frozenset[int]:
        """The parameters that were multiplied, or looked up in, to make the moved array."""
        found: set[int] = set()
        for value in self._flow.origins(moved.operand, self._is_local):
            for product in self._products_of(value):
                for i in range(len(product.instruction.operands)):
                    found |= self._parameters_of(self._flow.operand(product, i))
        return frozenset(found)

    def _products_of(self, value: HloValue) -> list[HloValue]:
        """The products that a value is: itself, or those whose parts it is the sum of."""
        one = value.instruction
        if self._is_product(one):
            return [value]
        if one.opcode != "reduce":
            return []
        # GPUs split a long product, and add its parts up afterwards.
        if self._flow.hlo.roots[one.called("to_apply")].opcode != "add":
            return []
        parts = self._flow.origins(self._flow.operand(value, 0), self._is_moved)
        return [part for part in parts if part.instruction.opcode == "dot"]

    def _is_product(self, one: Instruction) -> bool:
        return one.opcode in _PRODUCTS or one in self._lookups

    @cached_property
    def _products(self) -> Sequence[Instruction]:
        """The instructions that multiply values, or look up in them."""
        found = list(self._lookups)
        for opcode in _PRODUCTS:
            found += self._flow.hlo.by_opcode.get(opcode, ())
        return found

    @cached_property
    def _lookups(self) -> frozenset[Instruction]:
        """The slices at places that were read from an array.

        So compilers write a gather, or a scatter, as a loop. The places of other slices are counted
        by a loop, or known for each device.
        """
        by_opcode = self._flow.hlo.by_opcode
        found: set[Instruction] = set()
        # The places are the operands behind the array, and behind what is written into it.
        for opcode, first in (("dynamic-slice", 1), ("dynamic-update-slice", 2)):
            for one in by_opcode.get(opcode, ()):
                places = self._values(one.operands[first:])
                _, passed = self._flow.history(places, self._is_computed)
                if any(map(self._is_read_from_data, passed)):
                    found.add(one)
        return frozenset(found)

    def _is_computed(self, one: Instruction) -> bool:
        """Whether an instruction computes with numbers, as it is done with the places of slices."""
        return one.opcode not in _NOT_ELEMENTWISE

    def _is_read_from_data(self, value: HloValue) -> bool:
        """Whether a value is read from an array, and not from a table of constants.

        From such a table each device reads which part of an array is its own.
        """
        if value.instruction.opcode not in _READS:
            return False
        table = self._flow.origins(self._flow.operand(value, 0), self._is_moved)
        return not all(_is_filling(origin.instruction) for origin in table)

    @cached_property
    def computed_with(self) -> frozenset[int]:
        """The parameters that products are made of.

        Also after element-wise operations: biases, scales of norms.
        """
        operands: list[HloValue] = []
        for one in self._products:
            operands += self._values(one.operands)
        origins, _ = self._flow.history(operands, self._is_elementwise)
        return frozenset(self._parameters_among(origins))

    def outputs(self, moved: MovedArray) -> frozenset[int]:
        """The outputs that are made of the moved array element by element.

        A gradient's are those of its parameter.
        """
        reached, _ = self._outputs
        return frozenset(_of_result(reached, moved))

    def made_of(self, output: int) -> frozenset[int]:
        """The parameters that an output is made of element by element.

        Among them is the old value of what it is the new value of.
        """
        _, made = self._outputs
        return frozenset(made[output])

    @cached_property
    def _outputs(self) -> tuple[Mapping[HloValue, set[int]], Mapping[int, set[int]]]:
        """What the outputs are made of element by element.

        For each result of a collective the outputs, and for each output the parameters.
        """
        reached, made = defaultdict[HloValue, set[int]](set), defaultdict[int, set[int]](set)
        for i, (result, _) in enumerate(self._flow.results):
            origins, passed = self._flow.history([result], self._is_elementwise)
            for value in passed:
                if value.instruction.opcode in COLLECTIVES:
                    reached[value].add(i)
            made[i] = self._parameters_among(origins)
        return reached, made

    def factors(self, moved: MovedArray) -> frozenset[int]:
        """The parameters that the moved array is multiplied by, or looked up in, afterwards.

        The array itself, and not what is computed of it before.
        """
        # What a collective sums is made of products, which say more.
        if moved.kind not in _GATHERS:
            return frozenset()
        return frozenset(_of_result(self._factors, moved))

    @cached_property
    def _factors(self) -> Mapping[HloValue, set[int]]:
        """For each result of a collective, the parameters that it is multiplied by."""
        found = defaultdict[HloValue, set[int]](set)
        for product in self._products:
            parameters: set[int] = set()
            factors: list[frozenset[HloValue]] = []  # what is passed on as the other operands
            for value in self._values(product.operands):
                origins, passed = self._flow.history([value], self._is_moved)
                own = self._only_parameters(origins)
                parameters |= own
                if not own:
                    factors.append(passed)
            for passed in factors:
                for value in passed:
                    if value.instruction.opcode in COLLECTIVES:
                        found[value] |= parameters
        return found

    def _values(self, names: Iterable[str]) -> list[HloValue]:
        """The results of the instructions of these names."""
        instructions = self._flow.hlo.instructions
        return [HloValue(instructions[name]) for name in names]

    def _parameters_of(self, value: HloValue) -> frozenset[int]:
        """The parameters that a value consists of; empty if it was computed."""
        return self._only_parameters(self._flow.origins(value, self._is_moved))

    def _only_parameters(self, origins: frozenset[HloValue]) -> frozenset[int]:
        """The parameters that these values are; empty if one of them was computed."""
        found: set[int] = set()
        for origin in origins:
            one = origin.instruction
            if one in self._parameters:
                found.add(self._parameters[one])
            elif not _is_filling(one):
                return frozenset()
        return frozenset(found)

    def _parameters_among(self, origins: Iterable[HloValue]) -> set[int]:
        """The parameters among these values."""
        found: set[int] = set()
        for origin in origins:
            if origin.instruction in self._parameters:
                found.add(self._parameters[origin.instruction])
        return found

    def _is_moved(self, one: Instruction) -> bool:
        """Whether an instruction moves elements and computes nothing."""
        if one.opcode == "custom-call":
            return one.attribute("custom_call_target") in _MOVING_CALLS
        if one.opcode == "maximum":
            # TPUs join arrays so: each is padded by the least value to the shape of the whole.
            return all(map(self._is_padded, self._values(one.operands)))
        return one.opcode in MOVES or COLLECTIVES.get(one.opcode) in _GATHERS

    def _is_padded(self, value: HloValue) -> bool:
        origins = self._flow.origins(value, _changes_only_form)
        return all(origin.instruction.opcode == "pad" for origin in origins)

    def _is_local(self, one: Instruction) -> bool:
        """Whether an instruction combines only elements at the same place of one device."""
        return one.opcode not in COLLECTIVES and self._is_elementwise(one)

    def _is_elementwise(self, one: Instruction) -> bool:
        """Whether an instruction combines only elements at one place, of one device or several."""
        if one.opcode == "custom-call":
            return one.attribute("custom_call_target") in _MOVING_CALLS
        if one.opcode == "broadcast" or one.opcode in RESHAPES:
            # A single number is at no place. The norm of all gradients, by which each of them is
            # divided, is such a number: it is made of everything.
            return _is_number(one) or not _is_number(self._flow.hlo.instructions[one.operands[0]])
        return one.opcode not in _NOT_ELEMENTWISE and one not in self._lookups


def _of_result(known: Mapping[HloValue, set[int]], moved: MovedArray) -> set[int]:
    """What is known of the result of a collective: of all of it, and of the part that is moved."""
    whole, part = HloValue(moved.instruction), HloValue(moved.instruction, (moved.index,))
    return known[whole] | known[part]


def _changes_only_form(one: Instruction) -> bool:
    """Whether an instruction changes only the dtype or the shape."""
    return one.opcode == "convert" or one.opcode in RESHAPES


def _is_number(one: Instruction) -> bool:
    """Whether a result that is one array has no dimensions."""
    # By the text: this is asked too often to read the type.
    return "[]" in one.type


def _is_filling(one: Instruction) -> bool:
    """Whether an instruction only fills an array, for example what is padded with."""
    return one.opcode in ("constant", "iota") or one.attribute("custom_call_target") in _EMPTY
