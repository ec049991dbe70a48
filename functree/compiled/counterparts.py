"""The paths and shapes of a program's parameters and outputs ─► the parameter that each output is
the new value, or the gradient, of.

Paths name a parameter only if no other one has the same end. Of several, what an output is made of
tells, and the shape; if that leaves more than one, none is named.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from functree.compiled.parameter_uses import ParameterUses
from functree.tree.paths import Path

_Keys = tuple[object, ...]
"""The end of a path."""

Shape = tuple[int, ...]


class Shapes(NamedTuple):
    """The shapes of the arrays that go into a program and come out of it, on all devices together.

    Attributes:
        parameters: that of each parameter.
        outputs: that of each output.
    """

    parameters: Sequence[Shape]
    outputs: Sequence[Shape]


class Counterparts:
    """Which parameter each output of a program belongs to; both are indices.

    Args:
        parameters: the path of each parameter, which begins with the name of an argument.
        outputs: the path of each output.
        shapes: their shapes, or what is known of them.
        uses: what outputs are made of, and what a model computes with.
    """

    def __init__(
        self,
        parameters: Sequence[Path],
        outputs: Sequence[Path],
        shapes: Shapes,
        uses: ParameterUses,
    ):
        self._parameters, self._outputs = parameters, outputs
        self._shapes, self._uses = shapes, uses

    def _is_like(self, parameter: int, output: int) -> bool:
        """Whether a parameter and an output have the same shape, as far as it is known."""
        return self._shapes.parameters[parameter] == self._shapes.outputs[output]

    @cached_property
    def of_outputs(self) -> list[int | None]:
        """For each output the parameter of which it is the new value, or the gradient.

        None if it is of none, or if it cannot be told of which.
        """
        left = [set(found) for found in self._candidates]
        known: dict[int, int] = {}
        # A parameter has one new value. That of a weight is made of its moment too, which has a
        # new value of its own.
        while True:
            single = {i: min(one) for i, one in enumerate(left) if len(one) == 1 and i not in known}
            if not single:
                break
            known |= single
            for i, one in enumerate(left):
                if len(one) > 1 and one <= set(self._uses.made_of(i)):
                    left[i] = one - set(single.values()) or one
        return [known.get(i) for i in range(len(self._outputs))]

    @cached_property
    def all(self) -> frozenset[int]:
        """The parameters that may have a counterpart among the outputs."""
        return frozenset().union(*self._candidates)

    @cached_property
    def _candidates(self) -> list[Collection[int]]:
        """For each output the parameters that it may belong to."""
        return [self._fitting(output) for output in range(len(self._outputs))]

    def _fitting(self, output: int) -> Collection[int]:
        path = self._outputs[output]
        made = self._uses.made_of(output)
        for start in range(len(path)):  # the longest common end first
            end = path[start:]
            # An index alone, as of the second of two results, names nothing.
            if not any(isinstance(key, str) for key in end):
                break
            found = [i for i in self._by_end.get(end, ()) if self._is_like(i, output)]
            if found:
                return self._chosen(found, made)
        # No name tells, as in a function that returns a bare array.
        return [i for i in made if self._is_like(i, output)]

    def _chosen(self, found: Sequence[int], made: Collection[int]) -> Collection[int]:
        """Of parameters that are named alike, those that an output is made of, or that a model
        computes with: the gradient of a weight is named as its moments are."""
        if len(found) == 1:
            return found
        of_output = [i for i in found if i in made]
        return of_output or [i for i in found if i in self._uses.in_model] or found

    def named_like(self, parameter: int, among: Collection[int]) -> int | None:
        """Of some parameters the only one whose path has the longest end in common with that of a
        parameter; None if there are several."""
        path = self._parameters[parameter]
        for start in range(1, len(path)):
            end = path[start:]
            if not any(isinstance(key, str) for key in end):
                return None
            found = [i for i in self._by_end.get(end, ()) if i in among]
            if found:
                return found[0] if len(found) == 1 else None
        return None

    @cached_property
    def _by_end(self) -> Mapping[_Keys, list[int]]:
        """The parameters by each end of their paths. A result may have the name of an argument too,
        as a dict of them."""
        by_end: dict[_Keys, list[int]] = {}
        for index, path in enumerate(self._parameters):
            for start in range(len(path)):
                by_end.setdefault(path[start:], []).append(index)
        return by_end
