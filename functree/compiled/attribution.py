"""An array that a collective moves ─► the paths of the parameters that it serves.

Parameters are found by what is made of what in the program, never by their shapes, which several may have, nor by the
names of operations, which after a hit of the persistent cache are those of another program. Paths only tell which
output is the new value, or the gradient, of which parameter.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from functree.compiled.flow import Flow
from functree.compiled.moved import Moved
from functree.compiled.served import Served
from functree.tree.paths import Path


class Attribution:
    """The parameters that the collectives of a program serve, by number.

    Args:
        flow: where the values of the program come from.
        parameters: the path of each parameter of the program, which begins with the name of an argument.
        outputs: the path of each output of the program.
    """

    def __init__(self, flow: Flow, parameters: Sequence[Path], outputs: Sequence[Path]):
        self._served, self._parameters, self._outputs = Served(flow), parameters, outputs
        self._ranks = [len(one.arrays[0].shape) for one in flow.hlo.parameters]
        self._output_ranks = [len(type_.shape) for _, type_ in flow.results]

    def of(self, moved: Moved, phase: str | None) -> list[int]:
        """The parameters that an array serves: it is made of them, is their gradient, or is multiplied by them.

        Args:
            moved: the array.
            phase: the phase of the collective. What the forward pass adds to an argument is no gradient of it.
        """
        served = self._served
        found: Collection[int] = served.weights(moved)
        if not found and phase not in ("forward", "recompute"):
            found = self._gradient_of(moved)
            # A gradient of which nobody can tell the parameter. What it was multiplied by are activations.
            if not found and phase == "backward" and served.outputs(moved):
                return []
        # An activation is gathered for what it is multiplied by, and not for the sum of all layers that it may be.
        found = found or served.factors(moved) or served.products(moved)
        return sorted(found)

    def _gradient_of(self, moved: Moved) -> Collection[int]:
        """The parameters whose gradients, or parts of them, the moved array is."""
        families = self._families(self._served.outputs(moved))
        # A single number that many parameters are updated by is no gradient, but the norm of all gradients.
        if len(families) > 1 and math.prod(moved.type.shape) == 1:
            return ()
        return {min(family, key=self._rank) for family in families}

    def _families(self, outputs: Collection[int]) -> list[set[int]]:
        """The parameters that outputs belong to, each with its state: moments, averages, the parameter itself.

        The new value of a parameter is made of its moments; that of an average is made of the parameter.
        """
        families: list[set[int]] = []
        replaced = {self._replaced[output] for output in outputs}
        for output in outputs:
            own = self._replaced[output]
            if own is None:
                continue
            joined = {own} | (self._served.made_of(output) & replaced)
            for family in [family for family in families if family & joined]:
                families.remove(family)
                joined |= family
            families.append(joined)
        return families

    def _rank(self, parameter: int) -> tuple[bool, int, int]:
        """The order in a family: the model computes with its parameters, and not with their moments and averages.

        If that does not tell, such as for several steps in one program: moments have longer paths (`mu.<path>`).
        """
        return parameter not in self._served.computed_with, len(self._parameters[parameter]), parameter

    @cached_property
    def _replaced(self) -> list[int | None]:
        """For each output the parameter of which it is the new value, or the gradient; None if there is none."""
        by_end: dict[tuple[Any, ...], list[int]] = {}
        for number, path in enumerate(self._parameters):
            for start in range(1, len(path)):
                by_end.setdefault(path[start:], []).append(number)
        return [self._counterpart(i, by_end) for i in range(len(self._outputs))]

    def _counterpart(self, output: int, by_end: Mapping[tuple[Any, ...], list[int]]) -> int | None:
        path, made = self._outputs[output], self._served.made_of(output)
        for start in range(len(path)):  # the longest common end first
            fitting = [i for i in by_end.get(path[start:], ()) if self._fits(i, output, path[start:])]
            if fitting:
                # Of several that are named alike, the one that it is made of, and then the one with the shortest path.
                return min(fitting, key=lambda i: (i not in made, len(self._parameters[i]), i))
        fitting = [i for i in made if self._ranks[i] == self._output_ranks[output]]
        return fitting[0] if len(fitting) == 1 else None

    def _fits(self, parameter: int, output: int, end: tuple[Any, ...]) -> bool:
        """Whether an output whose path has the same end may belong to a parameter: with as many dimensions, and named.

        An index alone, as of the second of two results, names nothing, unless the argument is a list of arrays.
        """
        named = any(isinstance(key, str) for key in end) or len(end) == len(self._parameters[parameter]) - 1
        return named and self._ranks[parameter] == self._output_ranks[output]
