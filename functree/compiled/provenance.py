"""An array that a collective moves ─► what it serves: the parameters, what it is of them, and the
phase of the training step.

Parameters are found by what is made of what in the program, never by their shapes, which several
may have, nor by the names of operations, which after a hit of the persistent cache are those of
another program. Paths only tell which output is the new value, or the gradient, of which parameter.
The phase is read from the name of an operation, which has the transformations in it that JAX has
made it by: `jit(step)/transpose(jvp())/mul`.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from functree.compiled.data_flow import DataFlow, HloValue, is_combined
from functree.compiled.hlo import Instruction
from functree.compiled.moved_arrays import MovedArray
from functree.compiled.uses import ParameterUses, Product
from functree.tree.paths import Path

_FORWARD = ("forward", "recompute")
_Keys = tuple[object, ...]
"""The beginning, or the end, of a path."""

Shape = tuple[int, ...]


class Shapes(NamedTuple):
    """The shapes of the arrays that go into a program and come out of it.

    Attributes:
        parameters: that of each parameter.
        outputs: that of each output.
    """

    parameters: Sequence[Shape]
    outputs: Sequence[Shape]


class Served(NamedTuple):
    """What a moved array serves.

    Attributes:
        parameters: the indices of the parameters, in order.
        moves: what is moved for them, as `Collective.moves` says it.
        phase: `forward`, `backward`, `recompute` (what the backward pass computes again), `update`
            (the optimizer); None if it is not known.
    """

    parameters: list[int]
    moves: str | None
    phase: str | None


class Provenance:
    """What the collectives of a program serve; parameters and outputs are indices.

    Args:
        flow: where the values of the program come from.
        parameters: the path of each parameter of the program, which begins with the name of an
            argument.
        outputs: the path of each output of the program.
        shapes: their shapes.
    """

    def __init__(
        self,
        flow: DataFlow,
        parameters: Sequence[Path],
        outputs: Sequence[Path],
        shapes: Shapes,
    ):
        self._flow, self._parameters, self._outputs = flow, parameters, outputs
        self._uses = ParameterUses(flow)
        self.phases: Phases = Phases(flow)
        self._replaced_by_outputs: dict[frozenset[int], dict[int, int]] = {}
        self._shapes = shapes

    def of(self, moved: MovedArray) -> Served:
        """What an array serves. It is made of parameters, is their gradient, or is multiplied by
        them."""
        phase = self.phases.phase(moved, self._new_values)
        for moves, found in self._ways(moved, phase):
            if found:
                return Served(sorted(found), moves, phase)
        return Served([], None, phase)

    def _ways(self, moved: MovedArray, phase: str | None) -> Iterator[tuple[str, Collection[int]]]:
        """What an array may be of parameters, the surest first, with those that are found so."""
        yield "itself", self._uses.weights(moved)
        if phase == "update":
            yield "update", self._updated_by(moved)
            # Matrices of several parameters that are moved at once.
            yield "update", self._gradient_of(moved)
        elif phase not in _FORWARD:  # what the forward pass adds to an argument is no gradient
            yield "gradient", self._gradient_of(moved)
        if phase == "backward":
            # A gradient of which nobody can tell the parameter. What it was multiplied by are
            # activations.
            if self._uses.outputs(moved):
                return
            # One that an optimizer multiplies with others.
            yield "gradient", self._updated_by(moved)
        yield self._product_of(moved, phase), self._multiplied_by(moved, phase)
        # A weight that was computed, and is gathered then.
        if phase in _FORWARD and moved.kind == "all-gather":
            yield "itself", self._uses.computed_of(moved.operand)

    def _product_of(self, moved: MovedArray, phase: str | None) -> str:
        """What an array is that was made by products, or is multiplied: mostly an activation."""
        if phase == "update":  # an optimizer may multiply matrices too
            return "update"
        if phase in _FORWARD and moved.kind == "all-gather":
            trained = self.trained
            weights = [
                len(one.parameters) > 1 and not one.computed and one.parameters <= trained
                for one in self._uses.made_by(moved)
            ]
            if weights and all(weights):  # a weight made of two, such as those of an adapter
                return "itself"
        return "activation"

    def _multiplied_by(self, moved: MovedArray, phase: str | None) -> Collection[int]:
        """The parameters that a moved array is multiplied by, or else was made of by products."""
        # An activation is gathered for what it is multiplied by, and not for the sum of all layers
        # that it may be.
        factors = self._uses.factors(moved)
        found = {one for one in factors if self._is_weight(one, [moved.operand], phase)}
        if found:
            return found
        for product in self._uses.made_by(moved):
            found |= self._weights_of(product, phase)
        # What is added to a product that was computed, and is gathered then.
        if found and phase in _FORWARD and moved.kind == "all-gather":
            found |= self._uses.summands(moved)
        return found

    def _weights_of(self, product: Product, phase: str | None) -> set[int]:
        """The weights that a product was made of."""
        known = {one for one in product.parameters if self._is_weight(one, product.computed, phase)}
        if known or phase not in _FORWARD:
            return known
        # A weight that was computed, and data: both.
        for value in product.computed:
            known |= self._uses.computed_of(value)
        return known | product.parameters if known else known

    def _is_weight(self, parameter: int, others: Sequence[HloValue], phase: str | None) -> bool:
        """Whether a parameter that is multiplied by others is a weight, and not the data that a
        computed weight is multiplied by, or a gradient is made of."""
        trained = self.trained
        if parameter in trained:
            return True
        if phase not in _FORWARD and (phase is not None or trained):
            return False
        return not others or self._is_of_its_argument(parameter, others)

    def _is_of_its_argument(self, parameter: int, values: Sequence[HloValue]) -> bool:
        """Whether some values are made of the argument of a parameter, as an activation is made of
        other layers of the model. Computed weights are not made of the data."""
        name = self._parameters[parameter][0]
        own = {i for i, path in enumerate(self._parameters) if path[0] == name}
        return self._uses.are_made_of(values, own)

    def _gradient_of(self, moved: MovedArray) -> Collection[int]:
        """The parameters whose gradients, or parts of them, the moved array is."""
        outputs = self._uses.outputs(moved)
        families = self._families(outputs)
        # A single number that many parameters are updated by is no gradient, but the norm of all
        # gradients.
        if len(families) > 1 and math.prod(moved.type.shape) == 1:
            return ()
        found: set[int] = set()
        for family in families:
            one = self._parameter_of(family, outputs)
            if one is None:
                return ()
            found.add(one)
        return found

    def _parameter_of(self, family: set[int], outputs: Collection[int]) -> int | None:
        """The one of a family that is the parameter itself, and not its state; None if unknown.

        Args:
            family: a parameter, and its moments and averages.
            outputs: the outputs that are made of its gradient.
        """
        # A model computes with its parameters, and not with their moments and averages. Its weights
        # tell most of it; what else it computes with is found by a longer walk.
        found = self._in_model(family, self._uses.multiplied, self._weight_trees)
        if len(found) != 1:
            found = self._in_model(family, self._uses.in_model, self._model_trees)
            found = found or family & self._uses.in_products
        if not found:
            # An accumulator, of whose parameter the gradient is.
            named = {self._named_like(one, self._uses.in_model) for one in family}
            return named.pop() if len(named) == 1 else None
        if len(found) == 1:
            return min(found)
        # A network that follows another one is made of it, and the other is not made of it.
        made = [self._uses.made_of(i) for i in outputs if self._replaced[i] in found]
        common = found.intersection(*made)
        return min(common) if len(common) == 1 else None

    def _in_model(
        self, family: set[int], known: Collection[int], trees: Collection[_Keys]
    ) -> set[int]:
        """Those of a family that are parts of a model.

        A model may not compute with each of its parts: no gradient is made of the last bias. So it
        counts if it computes with another part of the same tree.

        Args:
            family: a parameter, and its moments and averages.
            known: parameters that a model computes with.
            trees: the beginnings of their paths.
        """
        paths = {one: self._parameters[one] for one in family}
        end = _common_end(list(paths.values()))
        found: set[int] = set()
        for one, path in paths.items():
            if one in known or path[: len(path) - end] in trees:
                found.add(one)
        return found

    @cached_property
    def _weight_trees(self) -> frozenset[_Keys]:
        return self._beginnings(self._uses.multiplied)

    @cached_property
    def _model_trees(self) -> frozenset[_Keys]:
        return self._beginnings(self._uses.in_model)

    def _beginnings(self, parameters: Collection[int]) -> frozenset[_Keys]:
        """The beginnings of the paths of some parameters."""
        found: set[_Keys] = set()
        for one in parameters:
            path = self._parameters[one]
            found.update(path[:length] for length in range(1, len(path) + 1))
        return frozenset(found)

    def _updated_by(self, moved: MovedArray) -> Collection[int]:
        """The parameters that an optimizer computes the new values of with the moved array.

        Empty if there are several: the norm of one gradient may be a part of that of all gradients.
        """
        replaced = self._replaced_by(self._uses.updates(moved))
        if len(replaced) <= 1:
            return replaced.keys()
        # By sets: all parts of the norm of all gradients ask for this.
        weights = replaced.keys() & self._uses.multiplied
        if len(weights) != 1:
            return ()
        (weight,) = weights
        # The others are its state, such as statistics by which gradients are preconditioned.
        state = replaced.keys() - weights
        return weights if self._uses.is_updated_with(replaced[weight], state) else ()

    def _replaced_by(self, outputs: frozenset[int]) -> dict[int, int]:
        """Of some outputs the parameters of which they are new values, each with its output."""
        # All parts of the norm of all gradients reach the same outputs: these are looked at once.
        known = self._replaced_by_outputs.get(outputs)
        if known is None:
            known = self._replaced_by_outputs[outputs] = {}
            for output in outputs:
                parameter = self._replaced[output]
                if parameter is not None:
                    known[parameter] = output
        return known

    def _new_values(self, moved: MovedArray) -> list[HloValue]:
        """The new values of parameters that an optimizer makes of the moved array.

        Empty if anything else is made of it.
        """
        outputs = self._uses.updates(moved)
        if any(self._replaced[output] is None for output in outputs):
            return []
        results = self._flow.results  # which are looked up each time
        return [results[output][0] for output in outputs]

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

    @cached_property
    def _replaced(self) -> list[int | None]:
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
    def trained(self) -> frozenset[int]:
        """The parameters that may have a counterpart among the outputs."""
        return frozenset().union(*self._candidates)

    @cached_property
    def _candidates(self) -> list[Collection[int]]:
        """For each output the parameters that it may belong to."""
        return list(map(self._fitting, range(len(self._outputs))))

    def _is_like(self, parameter: int, output: int) -> bool:
        """Whether a parameter and an output have the same shape, as far as it is known."""
        return self._shapes.parameters[parameter] == self._shapes.outputs[output]

    def _fitting(self, output: int) -> Collection[int]:
        """The parameters that an output may belong to."""
        made = self._uses.made_of(output)
        found = self._with_end(self._outputs[output], lambda one: self._is_like(one, output))
        if found:
            return self._chosen(found, made)
        # No name tells, as in a function that returns a bare array.
        return [i for i in made if self._is_like(i, output)]

    def _with_end(self, path: _Keys, fits: Callable[[int], bool]) -> list[int]:
        """Of the parameters that fit, those with the longest end in common with a path."""
        for start in range(len(path)):
            end = path[start:]
            # An index alone, as of the second of two results, names nothing.
            if not any(isinstance(key, str) for key in end):
                break
            found = list(filter(fits, self._by_end.get(end, ())))
            if found:
                return found
        return []

    def _chosen(self, found: Sequence[int], made: Collection[int]) -> Collection[int]:
        """Of parameters that are named alike, those that an output is made of, or that a model
        computes with: the gradient of a weight is named as its moments are."""
        if len(found) == 1:
            return found
        of_output = [i for i in found if i in made]
        return of_output or [i for i in found if i in self._uses.in_model] or found

    def _named_like(self, parameter: int, among: Collection[int]) -> int | None:
        """Of some parameters the only one whose path has the longest end in common with that of a
        parameter; None if there are several."""
        found = self._with_end(self._parameters[parameter][1:], lambda one: one in among)
        return found[0] if len(found) == 1 else None

    @cached_property
    def _by_end(self) -> Mapping[_Keys, list[int]]:
        """The parameters by each end of their paths. A result may have the name of an argument too,
        as a dict of them."""
        by_end: dict[_Keys, list[int]] = {}
        for index, path in enumerate(self._parameters):
            for start in range(len(path)):
                by_end.setdefault(path[start:], []).append(index)
        return by_end


def _common_end(paths: Sequence[Path]) -> int:
    """The number of keys that all paths end with, without the names of arguments."""
    if len(paths) < 2:
        return 0
    length = 0
    for keys in zip(*(reversed(path[1:]) for path in paths), strict=False):
        if len(set(keys)) > 1:
            break
        length += 1
    return length


NewValues = Callable[[MovedArray], Sequence[HloValue]]
"""A moved array ─► the new values of parameters that are made of it."""


class Phases:
    """The phases of the collectives of a program.

    Args:
        flow: where the values of the program come from.
    """

    def __init__(self, flow: DataFlow):
        self._flow = flow
        # Those of a collective, once for all arrays that the compiler has combined in it.
        self._names: dict[Instruction, list[str]] = {}
        # What earlier walks have found to be made of nothing of the backward pass: each value is
        # met once.
        self._independent: set[HloValue] = set()
        # Those that were found to be made of something of it.
        self._dependent: set[HloValue] = set()

    def phase(self, moved: MovedArray, new_values: NewValues) -> str | None:
        """The phase of a moved array, as `Served.phase` says it.

        Args:
            moved: the array.
            new_values: the new values of parameters that are made of it; none if it serves anything
                else. Not an attribute: a method of what has this one would be a reference cycle.

        Returns:
            None if the compiler has combined operations of several phases, or lost their names.
        """
        one = moved.instruction
        if one not in self._names:
            self._names[one] = split(one.metadata("op_name") or "")
        own = self._names[one]
        if len(own) == moved.arrays and own != [""]:
            return self._of(own[moved.index], moved, new_values)  # one name for each array
        # Of combined arrays some compilers name only the first. Then what is moved says more.
        if moved.arrays > 1:
            source = self._flow.source(moved.operand).instruction
            phase = _phase(source.metadata("op_name") or "")
            if phase is not None:
                return phase
        for described in self.described(moved):
            name = described.metadata("op_name")
            if name:
                phases = {self._of(part, moved, new_values) for part in split(name)}
                # Of several it is not known which one is that of this array.
                return phases.pop() if len(phases) == 1 else None
        return None

    def described(self, moved: MovedArray) -> Iterator[Instruction]:
        """The instructions that describe a collective, the nearest first.

        Some compilers leave a collective without metadata that they have made of others. Then what
        it moves says where it comes from, and else what it is a part of.
        """
        yield moved.instruction
        yield self._flow.source(moved.operand).instruction
        computation = moved.instruction.computation
        while callers := self._flow.callers.get(computation):
            yield callers[0]
            computation = callers[0].computation

    def _of(self, name: str, moved: MovedArray, new_values: NewValues) -> str:
        """The phase of an operation of this name."""
        phase = _phase(name)
        if phase is not None:
            return phase
        # What is neither differentiated nor a derivative is before the gradients, or made of them.
        if self._depends_on_backward(moved.operand):
            return "update"
        # An optimizer may need a parameter alone, such as its norm.
        if self._are_updates(new_values(moved)):
            return "update"
        return "forward"

    def _are_updates(self, values: Sequence[HloValue]) -> bool:
        """Whether there are values, and each is made of something of the backward pass."""
        # Each part of the norm of all gradients asks for all new values.
        known = self._dependent.issuperset(values)
        return bool(values) and (known or all(map(self._depends_on_backward, values)))

    def _depends_on_backward(self, value: HloValue) -> bool:
        """Whether a value is made of something of the backward pass."""
        if value in self._dependent:
            return True
        seen = {value}
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if one in self._dependent or _is_backward(one.instruction):
                self._dependent.add(value)
                return True
            for before in self._flow.inputs(one):
                if before not in seen and before not in self._independent:
                    waiting.append(before)
                    seen.add(before)
        # None of them depends on it: the walk has come to the end of each.
        self._independent |= seen
        return False


def _is_backward(one: Instruction) -> bool:
    """Whether an instruction is of the backward pass alone."""
    # Compilers join equal constants: one may serve the forward pass too, whatever its name says.
    if one.opcode == "constant":
        return False
    # The name is read last, for it takes longest, and this is asked of each value of the program.
    if not one.mentions("transpose(") or is_combined(one):
        return False
    return _phase(one.metadata("op_name") or "") == "backward"


def _phase(name: str) -> str | None:
    """The phase that the name of an operation says.

    None if it was neither differentiated nor is a derivative.
    """
    # What is recomputed is a part of the backward pass, and may be named by both.
    if "rematted_computation" in name:
        return "recompute"
    if "transpose(" in name:
        return "backward"
    if "jvp(" in name:
        return "forward"
    return None


def split(name: str) -> list[str]:
    """The names of the operations that a compiler has combined.

    >>> split("jit(f)/transpose(jvp())/(reduce_sum:while/dot_general)")
    ['jit(f)/transpose(jvp())/reduce_sum',
    'jit(f)/transpose(jvp())/while/dot_general']
    """
    opened: list[int] = []
    for i, letter in enumerate(name):
        if letter == "(":
            opened.append(i)
        elif letter == ")" and opened:
            opened.pop()
        elif letter == ":" and opened:
            return _distributed(name, opened[-1])
    return [name]


def _distributed(name: str, start: int) -> list[str]:
    """`a(b:c)d` ─► `abd` and `acd`, where `start` is the index of the parenthesis."""
    parts, depth, end = [""], 0, start
    for end in range(start + 1, len(name)):
        letter = name[end]
        if letter == ")" and depth == 0:
            break
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [name[:start] + part + name[end + 1 :] for part in parts]
