"""An array that a collective moves ─► the outputs that an optimizer makes of it.

An optimizer is what is computed between gradients and new values. What is differentiated and what
is a gradient has a name that says so: JAX names both `jvp(...)`. So it is found by what is made of
what, back from the outputs, as far as the names do not say that.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property

from functree.compiled.data_flow import (
    COLLECTIVES,
    DataFlow,
    HloValue,
    is_in_pieces,
)
from functree.compiled.hlo import Instruction
from functree.compiled.moved_arrays import MovedArray
from functree.compiled.parameter_uses import outputs_of


class OptimizerUses:
    """How the outputs of a program are related to what is moved outside of its gradients.

    Unlike `ParameterUses` it knows by whatever operations they are: an optimizer may multiply
    matrices.

    Args:
        flow: where the values of the program come from.
    """

    def __init__(self, flow: DataFlow):
        self._flow = flow
        self._parameters = {one: i for i, one in enumerate(flow.hlo.parameters)}

    def outputs(self, moved: MovedArray) -> frozenset[int]:
        """The outputs that are made of the moved array."""
        return outputs_of(self._reached, moved)

    def parameters(self, moved: MovedArray) -> frozenset[int]:
        """The parameters of the program that the moved array is made of."""
        start = moved.results if is_in_pieces(moved.instruction) else [moved.operand]
        origins, _ = self._walked(start)
        return frozenset(self._among(origins))

    def are_made_of(self, outputs: Iterable[int], parameters: Iterable[int]) -> bool:
        """Whether each of some parameters is one that some outputs are made of."""
        wanted = sum(1 << output for output in set(outputs))
        values = [HloValue(self._flow.hlo.parameters[one]) for one in parameters]
        return all(self._reached.get(value, 0) & wanted for value in values)

    @cached_property
    def _reached(self) -> Mapping[HloValue, int]:
        """The outputs that are made of each value, as bits."""
        results = [result for result, _ in self._flow.results]
        return self._flow.reached(results, _is_outside_of_gradients, conditions=True)

    def _walked(
        self, values: Iterable[HloValue]
    ) -> tuple[frozenset[HloValue], frozenset[HloValue]]:
        """Where some values come from, up to what is differentiated, and all values in between."""
        # An optimizer may ask whether a norm is zero, by a norm that is computed for that alone.
        return self._flow.history(values, _is_outside_of_gradients, conditions=True)

    def _among(self, origins: Iterable[HloValue]) -> set[int]:
        """The parameters of the program among some values."""
        found: set[int] = set()
        for origin in origins:
            if origin.instruction in self._parameters:
                found.add(self._parameters[origin.instruction])
        return found

    def is_differentiated(self, moved: MovedArray) -> bool:
        """Whether what is differentiated, or a gradient, is made of the moved array."""
        # What is made of constants alone is the part of a sum that a device does not have. What it
        # is added to says what it is for, and no walk from all that is differentiated is needed.
        origins, _ = self._walked([moved.operand])
        if {one.instruction.opcode for one in origins} == {"constant"}:
            return False
        return not self._differentiated.isdisjoint(moved.results)

    @cached_property
    def _differentiated(self) -> frozenset[HloValue]:
        """The values that what is differentiated is made of."""
        operands: set[HloValue] = set()
        for one in self._flow.differentiated:
            if not _is_combined(one):
                operands.update(self._flow.operands(one))
        _, passed = self._walked(operands)
        return passed


def _is_outside_of_gradients(one: Instruction) -> bool:
    """Whether an instruction computes something outside of what is differentiated and of
    gradients."""
    if _is_combined(one):
        return True
    return one.opcode != "parameter" and not one.is_differentiated


def _is_combined(one: Instruction) -> bool:
    """Whether an instruction is a collective that the compiler has combined of several.

    It is named by all of them, and what it moves says more.
    """
    return one.opcode in COLLECTIVES and len(one.arrays) > 1 and not is_in_pieces(one)
