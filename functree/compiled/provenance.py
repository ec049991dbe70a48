"""`Provenance` finds the parameters that a moved array serves, and the phase of the training step.

Parameters are found by following values through the program. Shapes would not suffice, since
several parameters may have the same shape. Operation names would not, either: after a
compilation-cache hit, they may come from a different program. Paths are used only to match outputs
with parameters, as new values or gradients. The phase is read from an operation's name, which
contains JAX's transformations: `jit(step)/transpose(jvp())/mul`.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from functree.compiled.data_flow import DataFlow, HloValue, is_combined
from functree.compiled.hlo import Instruction
from functree.compiled.moved_arrays import MovedArray
from functree.compiled.uses import ParameterUses, Product
from functree.tree.paths import Path

_FORWARD = ("forward", "recompute")
_Keys = tuple[object, ...]
"""A prefix or a suffix of a path."""

Shape = tuple[int, ...]


class Shapes(NamedTuple):
    """The shapes of a program's inputs and outputs.

    Attributes:
        parameters: the shape of each parameter.
        outputs: the shape of each output.
    """

    parameters: Sequence[Shape]
    outputs: Sequence[Shape]


class Served(NamedTuple):
    """The parameters that a moved array serves, and the phase.

    Attributes:
        parameters: the indices of the parameters, in order.
        moves: the role of the array for them, as in `Collective.moves`.
        phase: `forward`, `backward`, `recompute` (recomputed in the backward pass), or `update`
            (the optimizer); None if it is unknown.
    """

    parameters: list[int]
    moves: str | None
    phase: str | None


class Provenance:
    """The purpose of a program's collectives. Parameters and outputs are given as indices.

    Args:
        flow: the flow of values in the program.
        parameters: the path of each parameter of the program, which begins with the name of an
            argument.
        outputs: the path of each output of the program.
        shapes: the shapes of the parameters and outputs.
    """

    def __init__(
        self, flow: DataFlow, parameters: Sequence[Path], outputs: Sequence[Path], shapes: Shapes
    ):
        self._flow, self._parameters, self._outputs = flow, parameters, outputs
        self._uses = ParameterUses(flow)
        self._replaced_by_outputs: dict[frozenset[int], dict[int, int]] = {}
        self.shapes: Shapes = shapes
        # Values that earlier walks found independent of the backward pass: each is visited once.
        self._independent: set[HloValue] = set()
        # Values that depend on the backward pass.
        self._dependent: set[HloValue] = set()

    def of(self, moved: MovedArray) -> Served:
        """Return the parameters that an array serves, how it serves them, and in which phase."""
        phase = self.phase(moved)
        for moves, parameters in self._ways(moved, phase):
            if parameters:
                return Served(sorted(parameters), moves, phase)
        return Served([], None, phase)

    def _ways(self, moved: MovedArray, phase: str | None) -> Iterator[tuple[str, Collection[int]]]:
        """Yield each way in which an array may serve parameters, the most certain first."""
        yield "itself", self._uses.weights(moved)
        if phase == "update":
            yield "update", self._updated_by(moved)
            # Matrices of several parameters may be moved together.
            yield "update", self._gradient_of(moved)
        elif phase not in _FORWARD:  # values that a forward pass adds are not gradients
            yield "gradient", self._gradient_of(moved)
        if phase == "backward":
            # The array is a gradient whose parameter is ambiguous. Its factors are activations.
            if self._uses.outputs(moved):
                return
            # The array is a gradient that an optimizer multiplies by other gradients.
            yield "gradient", self._updated_by(moved)
        yield self._product_of(moved, phase), self._multiplied_by(moved, phase)
        # The array is a weight that was computed and then gathered.
        if phase in _FORWARD and moved.kind == "all-gather":
            yield "itself", self._uses.computed_of(moved.operand)

    def _product_of(self, moved: MovedArray, phase: str | None) -> str:
        """Return the `moves` of a product or one of its factors: mostly `activation`."""
        if phase == "update":  # an optimizer may multiply matrices, too
            return "update"
        if phase in _FORWARD and moved.kind == "all-gather":
            trained = self.trained
            weights = [
                len(product.parameters) > 1
                and not product.computed
                and product.parameters <= trained
                for product in self._uses.made_by(moved)
            ]
            if weights and all(weights):  # a weight made of two others, as in LoRA
                return "itself"
        return "activation"

    def _multiplied_by(self, moved: MovedArray, phase: str | None) -> Collection[int]:
        """Find the parameters that multiply a moved array or, if none do, its own factors."""
        # An activation is gathered for its next product. It may also be the sum of all earlier
        # layers' outputs, but it is not gathered for those layers.
        factors = self._uses.factors(moved)
        parameters = {
            factor for factor in factors if self._is_weight(factor, [moved.operand], phase)
        }
        if parameters:
            return parameters
        for product in self._uses.made_by(moved):
            parameters |= self._weights_of(product, phase)
        # A bias is added to a product before the sum is gathered.
        if parameters and phase in _FORWARD and moved.kind == "all-gather":
            parameters |= self._uses.summands(moved)
        return parameters

    def _weights_of(self, product: Product, phase: str | None) -> set[int]:
        """Return the weights among a product's factors."""
        known = {
            factor
            for factor in product.parameters
            if self._is_weight(factor, product.computed, phase)
        }
        if known or phase not in _FORWARD:
            return known
        # If a computed weight is multiplied by data, both are returned.
        for value in product.computed:
            known |= self._uses.computed_of(value)
        return known | product.parameters if known else known

    def _is_weight(self, parameter: int, others: Sequence[HloValue], phase: str | None) -> bool:
        """Return whether a parameter with these co-factors is a weight.

        Otherwise, the parameter is data that a computed weight multiplies, or a factor of a
        gradient.
        """
        trained = self.trained
        if parameter in trained:
            return True
        if phase not in _FORWARD and (phase is not None or trained):
            return False
        return not others or self._is_of_its_argument(parameter, others)

    def _is_of_its_argument(self, parameter: int, values: Sequence[HloValue]) -> bool:
        """Return whether at least one value depends on the argument that contains a parameter.

        An activation depends on other layers of the model. Computed weights do not depend on data.
        """
        name = self._parameters[parameter][0]
        siblings = {i for i, path in enumerate(self._parameters) if path[0] == name}
        return self._uses.are_made_of(values, siblings)

    def _gradient_of(self, moved: MovedArray) -> Collection[int]:
        """Find the parameters for which the moved array is a gradient, or a part of one."""
        outputs = self._uses.outputs(moved)
        families = self._families(outputs)
        # A scalar that updates many parameters is not a gradient, but a global norm.
        if len(families) > 1 and math.prod(moved.type.shape) == 1:
            return ()
        parameters: set[int] = set()
        for family in families:
            parameter = self._parameter_of(family, outputs)
            if parameter is None:
                return ()
            parameters.add(parameter)
        return parameters

    def _parameter_of(self, family: set[int], outputs: Collection[int]) -> int | None:
        """Find the family's parameter, as opposed to its state; None if it is unknown.

        Args:
            family: a parameter, and its moments and averages.
            outputs: the outputs that depend on the parameter's gradient.
        """
        # A model computes with its parameters, not with their moments and averages.
        members: set[int | None] = {*(family & self._uses.in_model), *self._in_modules(family)}
        if len(members) > 1:
            # A target network depends on the network that it follows, but not vice versa.
            made = [self._uses.made_of(i) for i in outputs if self._replaced[i] in members]
            members = members.intersection(*made)
        elif not members:
            # A pruned or quantized weight, or an accumulator with the gradient of its parameter.
            members = {*(family & self._uses.in_products)}
            members = members or {self._named_like(i, self._uses.in_model) for i in family}
        return members.pop() if len(members) == 1 else None

    def _in_modules(self, family: set[int]) -> set[int]:
        """Return the members of a family that are in modules that a model computes with.

        A computation need not use every part of a model. For example, if the loss is linear in the
        output, no gradient depends on the last layer's bias. The modules are compared from the
        innermost outward. If members share a module, modules do not tell them apart, so the result
        is empty.
        """
        shortest = min((len(self._parameters[i]) for i in family), default=0)
        for end in range(1, shortest):
            modules = {self._parameters[i][:-end]: i for i in family}
            if len(modules) < len(family):
                break
            members = {i for module, i in modules.items() if module in self._modules}
            if members:
                return members
        return set()

    @cached_property
    def _modules(self) -> frozenset[_Keys]:
        """The paths of the modules that contain a model's parameters."""
        modules: set[_Keys] = set()
        for i in self._uses.in_model:
            path = self._parameters[i]
            modules.update(path[:length] for length in range(1, len(path)))
        return frozenset(modules)

    def _updated_by(self, moved: MovedArray) -> Collection[int]:
        """Find the parameter whose new value an optimizer computes from the moved array.

        The result is empty if there are several such parameters: the norm of one gradient may be a
        part of a global norm.
        """
        replaced = self._replaced_by(self._uses.updates(moved))
        if len(replaced) <= 1:
            return replaced.keys()
        # Set operations are fast, and this runs for each part of a global norm.
        weights = replaced.keys() & self._uses.in_model
        if len(weights) != 1:
            return ()
        (weight,) = weights
        # The others are its state, such as statistics for preconditioning.
        state = replaced.keys() - weights
        return weights if self._uses.is_updated_with(replaced[weight], state) else ()

    def _replaced_by(self, outputs: frozenset[int]) -> dict[int, int]:
        """Map each parameter that some outputs replace to the output that replaces it."""
        # All parts of a global norm reach the same outputs, so the answer is cached.
        known = self._replaced_by_outputs.get(outputs)
        if known is None:
            known = self._replaced_by_outputs[outputs] = {}
            for output in outputs:
                parameter = self._replaced[output]
                if parameter is not None:
                    known[parameter] = output
        return known

    def _families(self, outputs: Collection[int]) -> list[set[int]]:
        """Group the parameters that some outputs replace, each with its moments and averages.

        A parameter's new value depends on its moments. An average's new value depends on its
        parameter.
        """
        families: list[set[int]] = []
        replaced = {self._replaced[output] for output in outputs}
        for output in outputs:
            parameter = self._replaced[output]
            if parameter is None:
                continue
            # Only updated parameters join a family. Otherwise, a mask that multiplies several
            # parameters would join their families.
            family = {parameter} | (self._uses.made_of(output) & replaced)
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
        """The parameter that each output replaces, or is the gradient of.

        The entry is None if there is no such parameter, or if the parameter is ambiguous.
        """
        left = list(map(set, self._candidates))
        known: dict[int, int] = {}
        # A parameter has one new value. A weight's new value also depends on its moment, but the
        # moment has a new value of its own.
        while True:
            single = {
                i: min(remaining)
                for i, remaining in enumerate(left)
                if len(remaining) == 1 and i not in known
            }
            if not single:
                break
            known |= single
            for i, remaining in enumerate(left):
                if len(remaining) > 1 and remaining <= set(self._uses.made_of(i)):
                    left[i] = remaining - set(single.values()) or remaining
        return list(map(known.get, range(len(self._outputs))))

    @cached_property
    def trained(self) -> frozenset[int]:
        """The parameters that may have a counterpart among the outputs."""
        return frozenset().union(*self._candidates)

    @cached_property
    def _candidates(self) -> list[Collection[int]]:
        """The parameters that each output may belong to."""
        return list(map(self._fitting, range(len(self._outputs))))

    def _fitting(self, output: int) -> Collection[int]:
        """Find the parameters that an output may belong to."""
        shapes, shape = self.shapes.parameters, self.shapes.outputs[output]
        made = self._uses.made_of(output)
        named = self._with_end(self._outputs[output], lambda i: shapes[i] == shape)
        if named:
            return self._chosen(named, made)
        # No name helps, for example if a function returns a bare array.
        return [i for i in made if shapes[i] == shape]

    def _with_end(self, path: _Keys, fits: Callable[[int], bool]) -> list[int]:
        """Find the fitting parameters whose paths share the longest suffix with a path."""
        for start in range(len(path)):
            end = path[start:]
            # An index alone, such as a result's position in a tuple, is not a name.
            if not any(isinstance(key, str) for key in end):
                break
            parameters = list(filter(fits, self._by_end.get(end, ())))
            if parameters:
                return parameters
        return []

    def _chosen(self, parameters: Sequence[int], made: Collection[int]) -> Collection[int]:
        """Choose among parameters with similar names: prefer an output's sources, then model parts.

        A weight's gradient has the same name as its moments.
        """
        if len(parameters) == 1:
            return parameters
        of_output = [i for i in parameters if i in made]
        return of_output or [i for i in parameters if i in self._uses.in_model] or parameters

    def _named_like(self, parameter: int, among: Collection[int]) -> int | None:
        """Find the parameter whose path shares the longest suffix with another parameter's path.

        Return None unless there is exactly one.
        """
        parameters = self._with_end(
            self._parameters[parameter][1:], lambda candidate: candidate in among
        )
        return parameters[0] if len(parameters) == 1 else None

    @cached_property
    def _by_end(self) -> Mapping[_Keys, list[int]]:
        """The parameters by each suffix of their paths.

        Suffixes may include an argument's name, since a result may be a dict of arguments.
        """
        by_end: dict[_Keys, list[int]] = {}
        for index, path in enumerate(self._parameters):
            for start in range(len(path)):
                by_end.setdefault(path[start:], []).append(index)
        return by_end

    def phase(self, moved: MovedArray) -> str | None:
        """Return the phase of a moved array, as in `Served.phase`.

        It is None if the compiler combined several phases, or lost the operations' names.
        """
        names = split(moved.instruction.metadata("op_name") or "")
        if len(names) == moved.arrays and names != [""]:
            return self._phase_of(names[moved.index], moved)  # one name for each array
        for described in self.described(moved):
            name = described.metadata("op_name")
            if name:
                phases = {self._phase_of(part, moved) for part in split(name)}
                # If there are several phases, this array's phase is unknown.
                return phases.pop() if len(phases) == 1 else None
        return None

    def described(self, moved: MovedArray) -> Iterator[Instruction]:
        """Yield the instructions that describe a collective, the nearest first.

        A combined collective has its first array's metadata, so the moved value comes first. Some
        compilers drop the metadata of collectives that they combine. In that case, the moved value
        or the instruction that contains the collective has metadata.
        """
        nearest = [moved.instruction, self._flow.source(moved.operand).instruction]
        if moved.arrays > 1:
            nearest.reverse()
        yield from nearest
        computation = moved.instruction.computation
        while callers := self._flow.callers.get(computation):
            yield callers[0]
            computation = callers[0].computation

    def _phase_of(self, name: str, moved: MovedArray) -> str:
        """Return the phase of the operation with this name."""
        phase = _phase(name)
        if phase is not None:
            return phase
        # All other operations come before the gradients, or depend on them.
        if self._depends_on_backward(moved.operand):
            return "update"
        # An optimizer may use a parameter without its gradient, for example in a norm.
        if self._is_for_updates(moved):
            return "update"
        return "forward"

    def _is_for_updates(self, moved: MovedArray) -> bool:
        """Return whether an optimizer computes only new values of parameters from the moved array.

        The new values must depend on the backward pass.
        """
        outputs = self._uses.updates(moved)
        if not outputs or any(self._replaced[output] is None for output in outputs):
            return False
        results = self._flow.results
        # For each part of a global norm, these are all new values, so sets are compared first.
        values = {results[output][0] for output in outputs}
        return self._dependent >= values or all(map(self._depends_on_backward, values))

    def _depends_on_backward(self, value: HloValue) -> bool:
        """Return whether a value depends on the backward pass."""
        if value in self._dependent:
            return True
        seen = {value}
        waiting = [value]
        while waiting:
            source = waiting.pop()
            if source in self._dependent or _is_backward(source.instruction):
                self._dependent.add(value)
                return True
            for before in self._flow.inputs(source):
                if before not in seen and before not in self._independent:
                    waiting.append(before)
                    seen.add(before)
        # The walk is complete, so none of these values depends on the backward pass.
        self._independent |= seen
        return False


def _is_backward(instruction: Instruction) -> bool:
    """Return whether an instruction belongs only to the backward pass."""
    # Compilers merge equal constants, so one may also serve the forward pass, despite its name.
    if instruction.opcode == "constant":
        return False
    # Parsing the name takes longest, so it comes last: this runs for each value of the program.
    if not instruction.mentions("transpose(") or is_combined(instruction):
        return False
    return _phase(instruction.metadata("op_name") or "") == "backward"


def _phase(name: str) -> str | None:
    """Read the phase from the name of an operation.

    Return None if the operation is neither differentiated nor a derivative.
    """
    # A recomputed operation is in the backward pass, so its name may contain both.
    if "rematted_computation" in name:
        return "recompute"
    if "transpose(" in name:
        return "backward"
    if "jvp(" in name:
        return "forward"
    return None


@lru_cache(maxsize=8)  # the arrays of a combined collective share a long name
def split(name: str) -> list[str]:
    """Split the name of a combined operation into the names of its parts.

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
    """Expand `a(b:c)d` into `abd` and `acd`; `start` is the index of the `(`."""
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
