"""An array that a collective moves ─► the parameters and outputs that it has to do with.

They are found by what is made of what in the program: what the array consists of, what it is
multiplied by, and which outputs are made of it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

# The collectives that move elements and do not sum them.
_GATHERS = frozenset({"all-gather", "all-to-all", "collective-permute", "ragged-all-to-all"})
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


# Of these, either operand may be the weight.
_SYMMETRIC = frozenset({"convolution", "custom-call", "dot"})


class Product(NamedTuple):
    """A product.

    Attributes:
        parameters: the parameters that are multiplied as they are.
        computed: the operands that were computed.
    """

    parameters: frozenset[int]
    computed: list[HloValue]


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

    def made_by(self, moved: MovedArray) -> list[Product]:
        """The products that the moved array was made by, and lookups."""
        found: list[Product] = []
        for value in self._flow.origins(moved.operand, self._is_local):
            found += map(self._product, self._products_of(value))
        return found

    def summands(self, moved: MovedArray) -> frozenset[int]:
        """The parameters that a moved array is made of beside products."""
        origins = self._flow.origins(moved.operand, self._is_local)
        return self._parameters_among(origins)

    def _product(self, value: HloValue) -> Product:
        """What a product was made of."""
        parameters: set[int] = set()
        computed: list[HloValue] = []
        for operand in self._multiplied(value.instruction):
            own = self._parameters_of(operand)
            parameters |= own
            if not own:
                computed.append(operand)
        # Of a lookup, the places say nothing of what is looked up in.
        if value.instruction.opcode not in _SYMMETRIC:
            computed = []
        return Product(frozenset(parameters), computed)

    def _multiplied(self, product: Instruction) -> list[HloValue]:
        """The operands of a product; of a lookup without the places."""
        operands = self._flow.operands(product)
        if product.opcode in _SYMMETRIC:
            return operands
        if product.opcode == "scatter":
            return [operands[0], operands[-1]]
        return self._flow.inputs(HloValue(product))

    def _products_of(self, value: HloValue) -> list[HloValue]:
        """The products that a value is: itself, or those whose parts it is the sum of."""
        one = value.instruction
        if self._is_product(one):
            return [value]
        if one.opcode != "reduce":
            return []
        # GPUs split a long product, and add its parts up afterwards: each part is one of a batch.
        if self._flow.hlo.roots[one.called("to_apply")].opcode != "add":
            return []
        parts = self._flow.origins(self._flow.operands(one)[0], self._is_moved)
        return [part for part in parts if part.instruction.attribute("lhs_batch_dims")]

    def computed_of(self, value: HloValue) -> frozenset[int]:
        """The parameters that a value is computed of without products, such as a quantized weight
        of its scale; empty if it is made of anything else.

        A single number, such as a norm of the whole, is not followed.
        """
        return self._only_parameters(self._flow.origins(value, self._is_without_products))

    def _is_without_products(self, one: Instruction) -> bool:
        return one.opcode == "reduce" or self._is_elementwise(one)

    def are_made_of(self, values: Sequence[HloValue], parameters: Collection[int]) -> bool:
        """Whether some values are made of one of some parameters, in whatever way."""
        wanted = {one for one, i in self._parameters.items() if i in parameters}
        waiting = list(values)
        seen = set(waiting)
        while waiting:
            one = waiting.pop()
            if one.instruction in wanted:
                return True
            for value in self._flow.inputs(one):
                if value not in seen:
                    seen.add(value)
                    waiting.append(value)
        return False

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
        places: dict[Instruction, list[HloValue]] = {}
        # They are the operands behind the array, and behind what is written into it.
        for opcode, first in (("dynamic-slice", 1), ("dynamic-update-slice", 2)):
            for one in self._flow.hlo.by_opcode.get(opcode, ()):
                places[one] = self._flow.operands(one)[first:]
        # Most programs have no lookup: one walk tells that.
        if not self._is_made_of_data(chain.from_iterable(places.values())):
            return frozenset()
        return frozenset(one for one, own in places.items() if self._is_made_of_data(own))

    def _is_made_of_data(self, places: Iterable[HloValue]) -> bool:
        """Whether one of some places is computed with what is read from an array."""
        _, passed = self._flow.history(places, self._is_computed)
        return any(map(self._is_read_from_data, passed))

    def _is_computed(self, one: Instruction) -> bool:
        """Whether an instruction computes with numbers, as it is done with the places of slices."""
        return one.opcode not in _NOT_ELEMENTWISE

    def _is_read_from_data(self, value: HloValue) -> bool:
        """Whether a value is read from an array, and not from a table of constants.

        From such a table each device reads which part of an array is its own.
        """
        if value.instruction.opcode not in _READS:
            return False
        table = self._flow.origins(self._flow.operands(value.instruction)[0], self._is_moved)
        return not all(_is_filling(origin.instruction) for origin in table)

    @cached_property
    def multiplied(self) -> frozenset[int]:
        """The weights of a model: the parameters that are multiplied as they are in what is
        differentiated."""
        return self._made_into(self._differentiated_products, self._is_moved)

    @cached_property
    def in_products(self) -> frozenset[int]:
        """The parameters that the products of a model are made of element by element.

        Where no product is known to be differentiated, they are those of all products.
        """
        products = self._differentiated_products or self._products
        return self._made_into(products, self._is_elementwise)

    @cached_property
    def _differentiated_products(self) -> list[Instruction]:
        return [one for one in self._products if one.is_differentiated]

    def _made_into(
        self, products: Iterable[Instruction], passes: Callable[[Instruction], bool]
    ) -> frozenset[int]:
        """The parameters that products are made of, through what passes values on."""
        operands: list[HloValue] = []
        for one in products:
            operands += self._flow.operands(one)
        origins, _ = self._flow.history(operands, passes)
        return self._parameters_among(origins)

    @cached_property
    def in_model(self) -> frozenset[int]:
        """The parameters that what is differentiated is computed with, as they are.

        Biases too, which may be added to the last product. Empty if nothing is differentiated.
        """
        instructions = self._flow.hlo.instructions
        names: set[str] = set()
        for one in self._flow.differentiated:
            names.update(one.operands)
        # Most operands are computed right there, and no walk is needed to see that.
        moved = [instructions[name] for name in names]
        values = [HloValue(one) for one in moved if one.opcode in PASSES_ON or self._is_moved(one)]
        origins, _ = self._flow.history(values, self._is_moved)
        return self._parameters_among(origins)

    def outputs(self, moved: MovedArray) -> frozenset[int]:
        """The outputs that are made of the moved array element by element.

        A gradient's are those of its parameter.
        """
        return _outputs_of(self._reached, moved)

    def made_of(self, output: int) -> frozenset[int]:
        """The parameters that an output is made of element by element.

        Among them is the old value of what it is the new value of.
        """
        return frozenset(self._made[output])

    @cached_property
    def _reached(self) -> Mapping[HloValue, int]:
        """The outputs that are made of each value element by element, as bits."""
        results = [result for result, _ in self._flow.results]
        return self._flow.reached(results, self._is_elementwise)

    @cached_property
    def _made(self) -> Mapping[int, set[int]]:
        """For each output the parameters that it is made of element by element."""
        made = defaultdict[int, set[int]](set)
        for one, i in self._parameters.items():
            for output in bits_of(self._reached.get(HloValue(one), 0)):
                made[output].add(i)
        return made

    def updates(self, moved: MovedArray) -> frozenset[int]:
        """The outputs that an optimizer makes of the moved array.

        An optimizer is what is computed between gradients and new values, by whatever operations:
        it may multiply matrices. What is differentiated and what is a gradient has a name that says
        so: JAX names both `jvp(...)`. So an optimizer is found by what is made of what, back from
        the outputs, as far as the names do not say that.
        """
        return _outputs_of(self._updated, moved)

    def is_updated_with(self, output: int, parameters: Iterable[int]) -> bool:
        """Whether an optimizer makes an output of each of some parameters."""
        values = [HloValue(self._flow.hlo.parameters[one]) for one in parameters]
        return all(self._updated.get(value, 0) & 1 << output for value in values)

    @cached_property
    def _updated(self) -> Mapping[HloValue, int]:
        """The outputs that an optimizer makes of each value, as bits."""
        results = [result for result, _ in self._flow.results]
        # An optimizer may ask whether a norm is zero, by a norm that is computed for that alone.
        return self._flow.reached(results, _is_outside_of_gradients, conditions=True)

    def factors(self, moved: MovedArray) -> frozenset[int]:
        """The parameters that the moved array is multiplied by, or looked up in, afterwards.

        The array itself, and not what is computed of it before.
        """
        # What a collective sums is made of products, which say more.
        if moved.kind not in _GATHERS:
            return frozenset()
        return frozenset().union(*(self._factors[value] for value in moved.results))

    @cached_property
    def _factors(self) -> defaultdict[HloValue, set[int]]:
        """For each result of a collective, the parameters that it is multiplied by."""
        found = defaultdict[HloValue, set[int]](set)
        for product in self._products:
            parameters: set[int] = set()
            factors: list[frozenset[HloValue]] = []  # what is passed on as the other operands
            multiplied = self._multiplied(product)
            for value in self._flow.operands(product):
                origins, passed = self._flow.history([value], self._is_moved)
                own = self._only_parameters(origins)
                if own and value in multiplied:
                    parameters |= own
                if not own:
                    factors.append(passed)
            for passed in factors:
                for value in passed:
                    if value.instruction.opcode in COLLECTIVES:
                        found[value] |= parameters
        return found

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

    def _parameters_among(self, origins: Iterable[HloValue]) -> frozenset[int]:
        """The parameters among these values."""
        known = self._parameters
        return frozenset(known[one.instruction] for one in origins if one.instruction in known)

    def _is_moved(self, one: Instruction) -> bool:
        """Whether an instruction moves elements and computes nothing."""
        if one.opcode == "custom-call":
            return one.attribute("custom_call_target") in _MOVING_CALLS
        if one.opcode == "maximum":
            # TPUs join arrays so: each is padded by the least value to the shape of the whole.
            return all(map(self._is_padded, self._flow.operands(one)))
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


def _outputs_of(reached: Mapping[HloValue, int], moved: MovedArray) -> frozenset[int]:
    """The outputs that the result of a collective is in the history of.

    Args:
        reached: the outputs of each value, as bits.
        moved: what is moved.
    """
    bits = 0
    for value in moved.results:
        bits |= reached.get(value, 0)
    return _indices(bits)


@lru_cache(maxsize=256)
def _indices(bits: int) -> frozenset[int]:
    """The indices of bits that are set. All parts of one norm reach the same outputs."""
    return frozenset(bits_of(bits))


def _changes_only_form(one: Instruction) -> bool:
    """Whether an instruction changes only the dtype or the shape."""
    return one.opcode == "convert" or one.opcode in RESHAPES


def _is_number(one: Instruction) -> bool:
    """Whether a result that is one array has no dimensions."""
    # By the text: this is asked too often to read the type.
    return "[]" in one.type


def _is_filling(one: Instruction) -> bool:
    """Whether an instruction only fills an array, for example what is padded with."""
    # A broadcast is where a walk ends at a single number, such as a norm.
    if one.opcode in ("broadcast", "constant", "iota"):
        return True
    return one.attribute("custom_call_target") in _EMPTY


def _is_outside_of_gradients(one: Instruction) -> bool:
    """Whether an instruction computes something outside of what is differentiated and of
    gradients."""
    if is_combined(one):
        return True
    return one.opcode != "parameter" and not one.is_differentiated
