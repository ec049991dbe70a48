"""An array that a collective moves ─► the paths of the parameters that it serves.

Parameters are found by what is made of what in the program, never by their shapes, which several
may have, nor by the names of operations, which after a hit of the persistent cache are those of
another program. Paths only tell which output is the new value, or the gradient, of which parameter.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from functree.compiled.data_flow import DataFlow
from functree.compiled.moved_arrays import MovedArray
from functree.compiled.parameter_uses import ParameterUses
from functree.tree.paths import Path

_Keys = tuple[object, ...]
"""The end of a path."""


class Attribution:
    """The parameters that the collectives of a program serve, by index.

    Args:
        flow: where the values of the program come from.
        parameters: the path of each parameter of the program, which begins with the name of an
            argument.
        outputs: the path of each output of the program.
    """

    def __init__(self, flow: DataFlow, parameters: Sequence[Path], outputs: Sequence[Path]):
        self._uses, self._parameters, self._outputs = ParameterUses(flow), parameters, outputs
        self._ranks = [len(one.arrays[0].shape) for one in flow.hlo.parameters]
        self._output_ranks = [len(type_.shape) for _, type_ in flow.results]

    def of(self, moved: MovedArray, phase: str | None) -> list[int]:
        """The parameters that an array serves.

        The array is made of them, is their gradient, or is multiplied by them.

        Args:
            moved: the array.
            phase: the phase of the collective. What the forward pass adds to an argument is no
                gradient of it.
        """
        uses = self._uses
        found: Collection[int] = uses.weights(moved)
        if not found and phase not in ("forward", "recompute"):
            found = self._gradient_of(moved)
            # A gradient of which nobody can tell the parameter. What it was multiplied by are
            # activations.
            if not found and phase == "backward" and uses.outputs(moved):
                return []
        # An activation is gathered for what it is multiplied by, and not for the sum of all layers
        # that it may be.
        found = found or uses.factors(moved) or uses.products(moved)
        return sorted(found)

    def _gradient_of(self, moved: MovedArray) -> Collection[int]:
        """The parameters whose gradients, or parts of them, the moved array is."""
        families = self._families(self._uses.outputs(moved))
        # A single number that many parameters are updated by is no gradient, but the norm of all
        # gradients.
        if len(families) > 1 and math.prod(moved.type.shape) == 1:
            return ()
        return {min(family, key=self._rank) for family in families}

    def _families(self, outputs: Collection[int]) -> list[set[int]]:
        """The parameters that outputs belong to, each with its state: moments and averages.

        The new value of a parameter is made of its moments; that of an average is made of the
        parameter.
        """
        families: list[set[int]] = []
        replaced = {self._replaced[output] for output in outputs}
        for output in outputs:
            own = self._replaced[output]
            if own is None:
                continue
            # Of what an output is made of, only what is updated too: a mask, which several
            # parameters may be multiplied by, would join them to one family.
            family = {own} | (self._uses.made_of(output) & replaced)
            separate: list[set[int]] = []
            for other in families:
                if family & other:
                    family |= other
                else:
                    separate.append(other)
            families = [*separate, family]
        return families

    def _rank(self, parameter: int) -> tuple[bool, int, int]:
        """The order in a family, of which the smallest is the parameter itself."""
        return (
            # A model computes with its parameters, and not with their moments and averages.
            parameter not in self._uses.computed_with,
            # If that does not tell, such as for several steps in one program: moments have longer
            # paths (`mu.<path>`).
            len(self._parameters[parameter]),
            parameter,
        )

    @cached_property
    def _replaced(self) -> list[int | None]:
        """For each output the parameter of which it is the new value, or the gradient.

        None if there is none.
        """
        by_end: dict[_Keys, list[int]] = {}
        for index, path in enumerate(self._parameters):
            # Without its first key, the name of an argument, which a result does not have.
            for start in range(1, len(path)):
                by_end.setdefault(path[start:], []).append(index)
        return [self._counterpart(output, by_end) for output in range(len(self._outputs))]

    def _counterpart(self, output: int, by_end: Mapping[_Keys, list[int]]) -> int | None:
        """The parameter of which an output is the new value, or the gradient; None if unknown."""
        path, made = self._outputs[output], self._uses.made_of(output)
        for start in range(len(path)):  # the longest common end first
            end = path[start:]
            fitting = [i for i in by_end.get(end, ()) if self._fits(i, output, end)]
            if fitting:
                # Of several that are named alike, the one that it is made of, and then the one with
                # the shortest path.
                return min(fitting, key=lambda i: (i not in made, len(self._parameters[i]), i))
        # No name tells, as in a function that returns a bare array.
        fitting = [i for i in made if self._ranks[i] == self._output_ranks[output]]
        if len(fitting) == 1:
            return fitting[0]
        return None

    def _fits(self, parameter: int, output: int, end: _Keys) -> bool:
        """Whether an output whose path has the same end may belong to a parameter."""
        if self._ranks[parameter] != self._output_ranks[output]:
            return False
        # An index alone, as of the second of two results, names nothing, unless the argument is a
        # list of arrays.
        is_whole_path = len(end) == len(self._parameters[parameter]) - 1
        return is_whole_path or any(isinstance(key, str) for key in end)
