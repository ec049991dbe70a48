"""`ParameterUses` relates the arrays that collectives move to parameters and outputs.

It follows values through the program to find the parameters that an array consists of or is
multiplied by, and the outputs that depend on it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from functree.compiled.data_flow import (
    COLLECTIVES,
    MOVES,
    PASSES_ON,
    RESHAPES,
    DataFlow,
    HloValue,
    bits_of,
    is_combined,
)
from functree.compiled.hlo import Instruction
from functree.compiled.moved_arrays import MovedArray

# The collectives that move elements without summing them.
_GATHERS = frozenset({"all-gather", "all-to-all", "collective-permute", "ragged-all-to-all"})
# The opcodes that move elements, within a device or between devices.
_MOVED = MOVES.union(opcode for opcode, kind in COLLECTIVES.items() if kind in _GATHERS)
# Opcodes that combine elements at different indices, or have no operands. In all other operations,
# an element of the result depends on the operands' elements at the same index, as in an optimizer's
# update.
_NOT_ELEMENTWISE = frozenset({
    "cholesky", "constant", "convolution", "dot", "fft", "gather", "iota", "parameter", "reduce",
    "reduce-window", "rng", "rng-bit-generator", "scatter", "select-and-scatter", "sort",
    "triangular-solve",
})  # fmt: skip
# Opcodes that multiply two arrays, or look up elements of one. Custom calls may be a library's
# products, such as cuBLAS's.
_PRODUCTS = frozenset({"convolution", "custom-call", "dot", "gather", "scatter"})
_READS = frozenset({"dynamic-slice", "gather", "slice"})  # these read numbers from an array
# Custom calls on TPUs that compute nothing: they run transfers during other work, join fetched
# pieces, or allocate memory for results.
_MOVING_CALLS = ('"AsyncCollectiveStart"', '"AsyncCollectiveDone"', '"ConcatBitcast"')
_EMPTY = ('"AllocateBuffer"',)


# Opcodes in which either operand may be the weight.
_SYMMETRIC = frozenset({"convolution", "custom-call", "dot"})


class Product(NamedTuple):
    """The operands of a product or a lookup.

    Attributes:
        parameters: the parameters among its operands.
        computed: the operands that were computed.
    """

    parameters: frozenset[int]
    computed: list[HloValue]


class ParameterUses:
    """The relations of a program's parameters and outputs to the arrays that it moves.

    Parameters and outputs are given as indices, in the program's order.

    Args:
        flow: the flow of values in the program.
    """

    def __init__(self, flow: DataFlow):
        self._flow = flow
        self._parameters = {parameter: i for i, parameter in enumerate(flow.hlo.parameters)}

    def weights(self, moved: MovedArray) -> frozenset[int]:
        """Return the parameters that the moved array consists of; empty if it was computed."""
        return self._parameters_of(moved.operand)

    def made_by(self, moved: MovedArray) -> list[Product]:
        """Return the products and lookups that produced the moved array."""
        products: list[Product] = []
        for value in self._flow.origins(moved.operand, self._is_local):
            products += map(self._product, self._products_of(value))
        return products

    def summands(self, moved: MovedArray) -> frozenset[int]:
        """Return the parameters that were added to the moved array outside of products."""
        origins = self._flow.origins(moved.operand, self._is_local)
        return self._parameters_among(origins)

    def _product(self, value: HloValue) -> Product:
        """Return a product's parameters and computed operands."""
        parameters: set[int] = set()
        computed: list[HloValue] = []
        for operand in self._multiplied(value.instruction):
            operand_parameters = self._parameters_of(operand)
            parameters |= operand_parameters
            if not operand_parameters:
                computed.append(operand)
        # A lookup's indices do not show whether its table is a weight.
        if value.instruction.opcode not in _SYMMETRIC:
            computed = []
        return Product(frozenset(parameters), computed)

    def _multiplied(self, product: Instruction) -> list[HloValue]:
        """Return a product's operands, or a lookup's operands other than its indices."""
        operands = self._flow.operands(product)
        if product.opcode in _SYMMETRIC:
            return operands
        if product.opcode == "scatter":
            return [operands[0], operands[-1]]
        return self._flow.inputs(HloValue(product))

    def _products_of(self, value: HloValue) -> list[HloValue]:
        """Return the value if it is a product, or the partial products if it is their sum."""
        instruction = value.instruction
        if self._is_product(instruction):
            return [value]
        if instruction.opcode != "reduce":
            return []
        # On GPUs, compilers split a long product into a batch of parts, and sum these afterwards.
        if self._flow.hlo.roots[instruction.called("to_apply")].opcode != "add":
            return []
        parts = self._flow.origins(self._flow.operands(instruction)[0], self._is_moved)
        return [part for part in parts if part.instruction.attribute("lhs_batch_dims")]

    def computed_of(self, value: HloValue) -> frozenset[int]:
        """Return the parameters that a value is computed from without products.

        An example is a quantized weight, which is computed from integers and a scale. The result is
        empty if the value depends on anything else. Scalars, such as a norm, are not followed.
        """
        return self._only_parameters(self._flow.origins(value, self._is_without_products))

    def _is_without_products(self, instruction: Instruction) -> bool:
        return instruction.opcode == "reduce" or self._is_elementwise(instruction)

    def are_made_of(self, values: Sequence[HloValue], parameters: Collection[int]) -> bool:
        """Return whether at least one value depends, in any way, on one of the parameters."""
        wanted = {source for source, i in self._parameters.items() if i in parameters}
        waiting = list(values)
        seen = set(waiting)
        while waiting:
            source = waiting.pop()
            if source.instruction in wanted:
                return True
            for value in self._flow.inputs(source):
                if value not in seen:
                    seen.add(value)
                    waiting.append(value)
        return False

    def _is_product(self, instruction: Instruction) -> bool:
        return instruction.opcode in _PRODUCTS or instruction in self._lookups

    @cached_property
    def _products(self) -> Sequence[Instruction]:
        """The instructions that multiply values, or look up elements of them."""
        products = list(self._lookups)
        for opcode in _PRODUCTS:
            products += self._flow.hlo.by_opcode.get(opcode, ())
        return products

    @cached_property
    def _lookups(self) -> frozenset[Instruction]:
        """The slices whose indices were read from an array.

        Compilers write a gather or a scatter as a loop of such slices. The indices of other slices
        are loop counters, or constants of each device.
        """
        places: dict[Instruction, list[HloValue]] = {}
        # Indices are the operands after the array and, if there is one, after the update.
        for opcode, first in (("dynamic-slice", 1), ("dynamic-update-slice", 2)):
            for instruction in self._flow.hlo.by_opcode.get(opcode, ()):
                places[instruction] = self._flow.operands(instruction)[first:]
        # Most programs have no lookups. A single walk shows this.
        if not self._is_made_of_data(chain.from_iterable(places.values())):
            return frozenset()
        return frozenset(
            instruction for instruction, indices in places.items() if self._is_made_of_data(indices)
        )

    def _is_made_of_data(self, places: Iterable[HloValue]) -> bool:
        """Return whether at least one index depends on numbers read from an array."""
        _, passed = self._flow.history(places, self._is_computed)
        return any(map(self._is_read_from_data, passed))

    def _is_computed(self, instruction: Instruction) -> bool:
        """Return whether an instruction may be part of the arithmetic on slice indices."""
        return instruction.opcode not in _NOT_ELEMENTWISE

    def _is_read_from_data(self, value: HloValue) -> bool:
        """Return whether a value is read from an array, and not from a table of constants.

        Such a table holds, for each device, the index of the part of an array that it keeps.
        """
        if value.instruction.opcode not in _READS:
            return False
        table = self._flow.origins(self._flow.operands(value.instruction)[0], self._is_moved)
        return not all(_is_filling(origin.instruction) for origin in table)

    @cached_property
    def in_products(self) -> frozenset[int]:
        """The parameters that a model's products depend on element by element."""
        operands: list[HloValue] = []
        for product in self._products:
            if product.is_differentiated:
                operands += self._flow.operands(product)
        origins, _ = self._flow.history(operands, self._is_elementwise)
        return self._parameters_among(origins)

    @cached_property
    def in_model(self) -> frozenset[int]:
        """The parameters that are operands of differentiated instructions.

        These include biases, which may be added to the last product. The set is empty if nothing is
        differentiated.
        """
        instructions = self._flow.hlo.instructions
        names = set[str]().union(*(one.operands for one in self._flow.differentiated))
        # Most operands are computed and need no walk.
        values = [
            HloValue(instruction)
            for instruction in map(instructions.__getitem__, names)
            if instruction.opcode in PASSES_ON or self._is_moved(instruction)
        ]
        origins, _ = self._flow.history(values, self._is_moved)
        return self._parameters_among(origins)

    def outputs(self, moved: MovedArray) -> frozenset[int]:
        """Return the outputs that depend on the moved array element by element.

        For a gradient, these include the new value of its parameter.
        """
        return _outputs_of(self._reached, moved)

    def made_of(self, output: int) -> frozenset[int]:
        """Return the parameters that an output depends on element by element.

        They include the old value of the parameter that the output replaces.
        """
        return frozenset(self._made[output])

    @cached_property
    def _reached(self) -> Mapping[HloValue, int]:
        """The outputs that depend on each value element by element, as a bit mask."""
        results = [result for result, _ in self._flow.results]
        return self._flow.reached(results, self._is_elementwise)

    @cached_property
    def _made(self) -> Mapping[int, set[int]]:
        """The parameters that each output depends on element by element."""
        made = defaultdict[int, set[int]](set)
        for parameter, i in self._parameters.items():
            for output in bits_of(self._reached.get(HloValue(parameter), 0)):
                made[output].add(i)
        return made

    def updates(self, moved: MovedArray) -> frozenset[int]:
        """Return the outputs that an optimizer computes from the moved array.

        An optimizer is everything between gradients and new values. It may use any operation,
        including products of matrices. JAX puts `jvp(...)` into the names of differentiated
        operations and gradients. The walk therefore goes back from the outputs until it meets such
        a name.
        """
        return _outputs_of(self._updated, moved)

    def is_updated_with(self, output: int, parameters: Iterable[int]) -> bool:
        """Return whether an optimizer computes an output from all of the given parameters."""
        values = [HloValue(self._flow.hlo.parameters[parameter]) for parameter in parameters]
        return all(self._updated.get(value, 0) & 1 << output for value in values)

    @cached_property
    def _updated(self) -> Mapping[HloValue, int]:
        """The outputs that an optimizer computes from each value, as a bit mask."""
        results = [result for result, _ in self._flow.results]
        # An optimizer may compute a norm only for a condition, such as whether it is zero.
        return self._flow.reached(results, _is_outside_of_gradients, conditions=True)

    def factors(self, moved: MovedArray) -> frozenset[int]:
        """Return the parameters that the moved array is multiplied by, or looked up in.

        If other values are computed from the array first, their factors are left out.
        """
        # The operands of a sum are products, which are more informative.
        if moved.kind not in _GATHERS:
            return frozenset()
        return frozenset().union(*(self._factors[value] for value in moved.results))

    @cached_property
    def _factors(self) -> defaultdict[HloValue, set[int]]:
        """The parameters that each collective's result is multiplied by."""
        by_result = defaultdict[HloValue, set[int]](set)
        for product in self._products:
            parameters: set[int] = set()
            factors: list[frozenset[HloValue]] = []  # the histories of the other operands
            multiplied = self._multiplied(product)
            for value in self._flow.operands(product):
                origins, passed = self._flow.history([value], self._is_moved)
                operand_parameters = self._only_parameters(origins)
                if operand_parameters and value in multiplied:
                    parameters |= operand_parameters
                if not operand_parameters:
                    factors.append(passed)
            for passed in factors:
                for value in passed:
                    if value.instruction.opcode in COLLECTIVES:
                        by_result[value] |= parameters
        return by_result

    def _parameters_of(self, value: HloValue) -> frozenset[int]:
        """Return the parameters that a value consists of; empty if it was computed."""
        return self._only_parameters(self._flow.origins(value, self._is_moved))

    def _only_parameters(self, origins: frozenset[HloValue]) -> frozenset[int]:
        """Return the parameters among these values, or an empty set if any value was computed."""
        for origin in origins:
            if origin.instruction not in self._parameters and not _is_filling(origin.instruction):
                return frozenset()
        return self._parameters_among(origins)

    def _parameters_among(self, origins: Iterable[HloValue]) -> frozenset[int]:
        """Return the parameters among these values."""
        known = self._parameters
        return frozenset(
            known[origin.instruction] for origin in origins if origin.instruction in known
        )

    def _is_moved(self, instruction: Instruction) -> bool:
        """Return whether an instruction moves elements without computing."""
        if instruction.opcode in _MOVED:
            return True
        if instruction.opcode == "custom-call":
            return instruction.attribute("custom_call_target") in _MOVING_CALLS
        if instruction.opcode == "maximum":
            # On TPUs, arrays are concatenated this way: each is padded to the full shape with the
            # lowest value.
            return all(map(self._is_padded, self._flow.operands(instruction)))
        return False

    def _is_padded(self, value: HloValue) -> bool:
        origins = self._flow.origins(value, _changes_only_form)
        return all(origin.instruction.opcode == "pad" for origin in origins)

    def _is_local(self, instruction: Instruction) -> bool:
        """Return whether an instruction combines only elements at the same index on one device."""
        return instruction.opcode not in COLLECTIVES and self._is_elementwise(instruction)

    def _is_elementwise(self, instruction: Instruction) -> bool:
        """Return whether an instruction combines only elements at the same index."""
        if instruction.opcode == "custom-call":
            return instruction.attribute("custom_call_target") in _MOVING_CALLS
        if instruction.opcode == "broadcast" or instruction.opcode in RESHAPES:
            # A scalar has no index. A global norm, which divides every gradient, is a scalar that
            # depends on everything.
            return _is_number(instruction) or not _is_number(
                self._flow.hlo.instructions[instruction.operands[0]]
            )
        return instruction.opcode not in _NOT_ELEMENTWISE and instruction not in self._lookups


def _outputs_of(reached: Mapping[HloValue, int], moved: MovedArray) -> frozenset[int]:
    """Return the outputs whose history contains the result of a collective.

    Args:
        reached: the outputs of each value, as a bit mask.
        moved: the array that is moved.
    """
    bits = 0
    for value in moved.results:
        bits |= reached.get(value, 0)
    return _indices(bits)


@lru_cache(maxsize=256)
def _indices(bits: int) -> frozenset[int]:
    """Return the indices of bits that are set; cached, since many arrays share their bits."""
    return frozenset(bits_of(bits))


def _changes_only_form(instruction: Instruction) -> bool:
    """Return whether an instruction changes only the dtype or the shape."""
    return instruction.opcode == "convert" or instruction.opcode in RESHAPES


def _is_number(instruction: Instruction) -> bool:
    """Return whether an instruction's result is a scalar, or a tuple that contains one."""
    # Only the text is searched, since this runs too often to parse the type.
    return "[]" in instruction.type


def _is_filling(instruction: Instruction) -> bool:
    """Return whether an instruction only fills an array, for example with padding."""
    # Walks end at the broadcast of a scalar, such as a norm.
    if instruction.opcode in ("broadcast", "constant", "iota"):
        return True
    return instruction.attribute("custom_call_target") in _EMPTY


def _is_outside_of_gradients(instruction: Instruction) -> bool:
    """Return whether an instruction is neither differentiated nor a part of a gradient."""
    if instruction.is_differentiated:
        return is_combined(instruction)
    return instruction.opcode != "parameter"
