"""`DataFlow` follows a value in a compiled program back to the values that it was computed from.

It walks through tuples, fusions, calls and loops. `runs` counts how often each computation runs.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from functree.compiled.hlo import ArrayType, Hlo, Instruction

# Opcodes that compilers insert to move a value within memory.
COPIES = frozenset(
    {"bitcast", "copy", "copy-done", "copy-start", "optimization-barrier", "reshape"}
)
# Opcodes that change only the shape.
RESHAPES = frozenset({"bitcast", "reshape"})
# Opcodes that change the place, order, number or precision of elements, and compute nothing.
MOVES = COPIES | {
    "broadcast", "concatenate", "convert", "dynamic-slice", "dynamic-update-slice", "pad",
    "reduce-precision", "reverse", "slice", "slice-done", "slice-start", "transpose",
}  # fmt: skip
# For each opcode, the range of operands that hold the value. Other operands are indices, padding or
# conditions.
_PASSED = {
    "dynamic-slice": (0, 1),
    "dynamic-update-slice": (0, 2),
    "gather": (0, 1),
    "pad": (0, 1),
    # The array that is sent, and the array that receives it.
    "ragged-all-to-all": (0, 2),
    "select": (1, 3),
}

# Opcodes that run one computation once, with their operands as its parameters.
_ONCE = frozenset({"async-start", "call", "fusion", "fusion-start"})
CALLS = _ONCE | {"conditional", "custom-call", "while"}
"""The opcodes that call computations, except those that call one per element (`reduce`)."""

PASSES_ON = COPIES | _ONCE | {
    "all-gather-done", "all-reduce-done", "async-done", "collective-permute-done", "conditional",
    "fusion-done", "get-tuple-element", "parameter", "reduce-scatter-done", "slice", "tuple",
    "while",
}  # fmt: skip
"""The opcodes whose result is a value that another instruction computed."""

# Predicates must see reshapes: a scalar may have become an array.
_HANDS_ON = PASSES_ON - RESHAPES
# Predicates see the excluded opcodes, too: a slice need not be a part of a joined array, and the
# start of an asynchronous operation is not a result.
_FROM_ELSEWHERE = _HANDS_ON - {"async-start", "fusion-start", "slice", "tuple"}

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute",
)  # fmt: skip
"""The kinds of collectives."""

COLLECTIVES = {f"{kind}{ending}": kind for kind in KINDS for ending in ("", "-start")}
"""The kind of collective that each opcode starts or runs."""


def is_in_pieces(one: Instruction) -> bool:
    """Return whether an instruction is an all-to-all with a separate operand for each device.

    Each piece of the result comes from a different device. The receiver's position in the group
    determines which of the sender's operands becomes this piece.
    """
    return one.opcode == "all-to-all" and one.attribute("dimensions") is None


def is_combined(one: Instruction) -> bool:
    """Return whether the compiler combined several collectives into this instruction.

    The instruction's `op_name` covers all of these collectives, so the moved values are more
    informative.
    """
    return one.opcode in COLLECTIVES and len(one.arrays) > 1 and not is_in_pieces(one)


class HloValue(NamedTuple):
    """The result of an instruction, or a part of it.

    Attributes:
        instruction: the instruction.
        part: the indices of the part in nested tuples, outermost first; empty for the full result.
            For the start of an asynchronous collective, the indices refer to the collective's
            result.
    """

    instruction: Instruction
    part: tuple[int, ...] = ()


class DataFlow:
    """The flow of values through a program.

    Args:
        hlo: the program.
    """

    def __init__(self, hlo: Hlo):
        self.hlo: Hlo = hlo
        # These are caches, since walks meet the same values repeatedly. Each question about a
        # program is a separate walk, and the histories of a parameter and its moments largely
        # coincide.
        self._known_handed_on: dict[HloValue, HloValue] = {}
        self._known_inputs: dict[HloValue, list[HloValue]] = {}

    @cached_property
    def callers(self) -> Mapping[str, list[Instruction]]:
        """The instructions that call each computation, by the computation's name."""
        callers: defaultdict[str, list[Instruction]] = defaultdict(list)
        for opcode in CALLS:
            for instruction in self.hlo.by_opcode.get(opcode, ()):
                for name in instruction.computations:
                    callers[name].append(instruction)
        return callers

    @cached_property
    def differentiated(self) -> list[Instruction]:
        """The instructions that are differentiated, or compute a part of a gradient.

        Instructions that only pass values on are left out, whatever their names. A fusion, for
        example, is named after one of its instructions.
        """
        differentiated: list[Instruction] = []
        for opcode, instructions in self.hlo.by_opcode.items():
            if opcode not in PASSES_ON:
                differentiated += [
                    instruction for instruction in instructions if instruction.is_differentiated
                ]
        return differentiated

    @cached_property
    def results(self) -> list[tuple[HloValue, ArrayType]]:
        """The results of the program with their types, without tokens."""
        root = self.hlo.roots[self.hlo.entry]
        if root.opcode == "tuple":
            values = list(map(self._value, root.operands))
        elif root.type.startswith("("):  # such as a loop
            values = [HloValue(root, (i,)) for i in range(len(root.arrays))]
        else:
            values = [HloValue(root)]
        results: list[tuple[HloValue, ArrayType]] = []
        for value, type_ in zip(values, root.arrays, strict=True):
            if not type_.is_token:
                results.append((value, type_))
        return results

    def source(self, value: HloValue) -> HloValue:
        """Trace a value back through copies, tuples and fusions, without leaving its loop."""
        while True:
            before = self._inside(value)
            if before is None:
                return value
            value = before

    def origins(
        self, value: HloValue, passes: Callable[[Instruction], bool]
    ) -> frozenset[HloValue]:
        """Return the values that a value was computed from, even through loops and branches.

        Args:
            value: the value.
            passes: a function that returns whether the walk continues from an instruction to its
                operands.
        """
        return self.history([value], passes)[0]

    def history(
        self,
        values: Iterable[HloValue],
        passes: Callable[[Instruction], bool],
        *,
        conditions: bool = False,
    ) -> tuple[frozenset[HloValue], frozenset[HloValue]]:
        """Return the origins of some values, and all values in their histories.

        A value's history includes the value itself.

        Args:
            values: the values.
            passes: as in `origins`.
            conditions: whether the condition of a `select` belongs to the history of its result.
        """
        origins: set[HloValue] = set()
        seen: set[HloValue] = set(map(self._handed_on, values))
        waiting = list(seen)
        while waiting:
            value = waiting.pop()
            before = self._made_of(value, passes, conditions)
            if not before:
                origins.add(value)
                continue
            for new in before:
                if new not in seen:
                    seen.add(new)
                    waiting.append(new)
        return frozenset(origins), frozenset(seen)

    def reached(
        self,
        values: Sequence[HloValue],
        passes: Callable[[Instruction], bool],
        *,
        conditions: bool = False,
    ) -> dict[HloValue, int]:
        """Find which of the given values depend on each value in their histories.

        The result maps each value of a history to a bit mask, with one bit for each of `values`.
        All outputs of a program may depend on one number, such as a global norm, so a separate walk
        for each output would take quadratic time.

        Args:
            values: the values.
            passes: as in `history`.
            conditions: as in `history`.
        """
        before: dict[HloValue, list[HloValue]] = {}
        order: dict[HloValue, None] = {}  # inputs before the values made of them, except in loops
        values = list(map(self._handed_on, values))
        waiting = list(values)
        while waiting:
            top = waiting[-1]
            if top in before:
                order.setdefault(waiting.pop())
            else:
                before[top] = self._made_of(top, passes, conditions)
                waiting += [new for new in before[top] if new not in before]
        bits = dict.fromkeys(order, 0)
        for i, value in enumerate(values):
            bits[value] |= 1 << i
        while _spread(bits, before):
            pass
        return bits

    def _made_of(
        self, value: HloValue, passes: Callable[[Instruction], bool], conditions: bool
    ) -> list[HloValue]:
        """Return a value's direct inputs; empty where its history ends."""
        instruction = value.instruction
        if instruction.opcode not in _FROM_ELSEWHERE and not passes(instruction):
            return []
        if conditions and instruction.opcode == "select":
            return self.operands(instruction)
        return self.inputs(value)

    def inputs(self, value: HloValue) -> list[HloValue]:
        """Return a value's direct inputs, without the indices and conditions that selected it."""
        known = self._known_inputs.get(value)
        if known is None:
            before: list[HloValue] = []
            # Most instructions compute something.
            if value.instruction.opcode in PASSES_ON:
                before = list(map(self._handed_on, self._before(value)))
            known = self._known_inputs[value] = before or self._passed(value)
        return known

    def operands(self, one: Instruction) -> list[HloValue]:
        """Return an instruction's operands, traced back through tuples, fusions and copies."""
        return [self._handed_on(self._value(name)) for name in one.operands]

    def concatenated(self, collective: Instruction) -> list[tuple[HloValue, int]]:
        """Return the values that the compiler joined for one collective, with their element counts.

        Joined values form one flat array. The list is empty for a collective that moves its
        operands unchanged.
        """
        if len(collective.operands) != 1:
            return []
        joined = self.source(self._value(collective.operands[0])).instruction
        # A concatenation with more dimensions comes from the user's program.
        if joined.opcode != "concatenate" or len(joined.arrays[0].shape) != 1:
            return []
        parts: list[tuple[HloValue, int]] = []
        for value in map(self._value, joined.operands):
            parts.append((value, math.prod(value.instruction.arrays[0].shape)))
        return parts

    def _part_of_joined(self, instruction: Instruction) -> HloValue | None:
        """Return the array that a slice takes from a collective's joined result.

        Return None for all other slices.
        """
        whole = self.source(self._value(instruction.operands[0]))
        span = re.fullmatch(r"\{\[(\d+):(\d+)\]\}", instruction.attribute("slice") or "")
        if span is None or whole.instruction.opcode not in COLLECTIVES:
            return None
        start = 0
        for i, (_, size) in enumerate(self.concatenated(whole.instruction)):
            if (start, start + size) == (int(span[1]), int(span[2])):
                return HloValue(whole.instruction, (i,))
            start += size
        return None

    def _passed(self, value: HloValue) -> list[HloValue]:
        """Return the operands that an instruction passes on, without indices and conditions."""
        instruction, part = value
        if (
            part
            and part[0] < len(instruction.operands)
            and len(instruction.arrays) > 1
            and not is_in_pieces(instruction)
        ):
            # A combined collective: one part for each operand.
            return [self._handed_on(self._value(instruction.operands[part[0]], part[1:]))]
        operands = self.operands(instruction)
        if instruction.opcode not in _PASSED:
            return operands
        first, last = _PASSED[instruction.opcode]
        return operands[first:last]

    def _handed_on(self, value: HloValue) -> HloValue:
        """Trace a value back through tuples, fusions and copies, but not through reshapes.

        Walks skip these instructions, since they compute nothing.
        """
        if value.instruction.opcode not in _HANDS_ON:
            return value
        known = self._known_handed_on.get(value)
        if known is None:
            before = self._inside(value)
            known = value if before is None else self._handed_on(before)
            self._known_handed_on[value] = known
        return known

    def _before(self, value: HloValue) -> list[HloValue]:
        """Return the values that an instruction may pass on as this value.

        For a loop or a conditional, there are several.
        """
        inside = self._inside(value)
        if inside is not None:
            return [inside]
        instruction, part = value
        if instruction.opcode == "parameter":
            values: list[HloValue] = []
            for caller in self.callers.get(instruction.computation, []):
                values += self._given(caller, value)
            return values
        if instruction.opcode == "while":
            # The first iteration starts from the operand, and later ones from the body's result.
            following = self.hlo.roots[instruction.called("body")]
            return [self._value(instruction.operands[0], part), HloValue(following, part)]
        if instruction.opcode == "conditional":
            return [HloValue(self.hlo.roots[name], part) for name in instruction.computations]
        return []

    def _given(self, caller: Instruction, parameter: HloValue) -> list[HloValue]:
        """Return the values that a caller passes as a parameter, or as a part of one."""
        instruction, part = parameter
        match caller.opcode:
            case "while":
                return self.inputs(HloValue(caller, part))
            case "conditional":
                values: list[HloValue] = []
                # The first operand selects the branch; each of the others is a branch's parameter.
                for i, name in enumerate(caller.computations, start=1):
                    if name == instruction.computation:
                        values.append(self._value(caller.operands[i], part))
                return values
            case "custom-call":  # the text does not show how it uses the parameters
                return []
        return [self._value(caller.operands[int(instruction.argument)], part)]

    def _inside(self, value: HloValue) -> HloValue | None:
        """Return the single value that is passed on as this value.

        Return None if this value is computed, or if it may come from several values, as in a loop.
        """
        instruction, part = value
        if instruction.opcode in COPIES:
            return self._value(instruction.operands[0], part)
        match instruction.opcode:  # the most frequent first: walks call this for each value
            case "parameter":
                callers = self.callers.get(instruction.computation, [])
                # If a computation has several callers, its parameter has several values.
                if len(callers) == 1 and callers[0].opcode in _ONCE:
                    return self._value(callers[0].operands[int(instruction.argument)], part)
                return None
            case "fusion" | "call":
                return HloValue(self.hlo.roots[instruction.computations[0]], part)
            case "get-tuple-element":
                index = int(instruction.attribute("index") or 0)
                return self._value(instruction.operands[0], (index, *part))
            case "slice":
                return self._part_of_joined(instruction)
            case "tuple" if part:
                return self._value(instruction.operands[part[0]], part[1:])
            case "fusion-done" | "async-done":
                start = self.hlo.instructions[instruction.operands[0]]
                return HloValue(self.hlo.roots[start.computations[0]], part)
            case (
                "all-gather-done"
                | "all-reduce-done"
                | "collective-permute-done"
                | "reduce-scatter-done"
            ):
                # The start stands for the collective, so this is a part of its result.
                return self._value(instruction.operands[0], part)
        return None

    def _value(self, name: str, part: tuple[int, ...] = ()) -> HloValue:
        """Return the result of the instruction with this name, or a part of it."""
        return HloValue(self.hlo.instructions[name], part)


def _spread(reached: dict[HloValue, int], before: Mapping[HloValue, Sequence[HloValue]]) -> bool:
    """Add each value's bits to its inputs. Return whether another pass is needed.

    An iteration of a loop depends on the previous one, so one pass may not be enough.
    """
    done: set[HloValue] = set()
    again = False
    for value in reversed(reached):
        done.add(value)
        bits = reached[value]
        for source in before[value]:
            known = reached[source]
            if known | bits != known:
                reached[source] = known | bits
                again = again or source in done
    return again


def bits_of(number: int) -> list[int]:
    """Return the indices of the bits that are set in a number.

    >>> bits_of(0b1010)
    [1, 3]
    """
    indices: list[int] = []
    while number:
        lowest = number & -number
        indices.append(lowest.bit_length() - 1)
        number ^= lowest
    return indices


_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def runs(flow: DataFlow) -> Mapping[str, int | None]:
    """Count the runs of each computation, by its name.

    The count is None if the length of an enclosing loop is unknown.

    Every branch of a conditional is assumed to be taken.
    """
    counts: dict[str, int | None] = {flow.hlo.entry: 1}
    # In the text, a computation comes before its callers.
    for name in reversed(flow.hlo.computations):
        total = counts.setdefault(name, 0)  # 0 if no counted instruction calls it
        for caller in flow.callers.get(name, ()):
            # The condition of a loop runs once more than its body, but contains nothing that is
            # counted.
            each = trip_count(flow, caller) if caller.opcode == "while" else 1
            times = counts[caller.computation]
            if total is None or times is None or each is None:
                total = None
            else:
                total += times * each
        counts[name] = total
    return counts


def trip_count(flow: DataFlow, loop: Instruction) -> int | None:
    """Count the iterations of a `while`; return None if the number depends on data or is unknown.

    The compilers for CPUs and GPUs write the number into the text. The TPU compiler does not, so
    the number is derived from the loop: the condition must compare a counter with a constant, and
    the body must add a constant to the counter. XLA rewrites loops into this form: it makes the
    constant the second operand, and replaces a subtraction with the addition of a negative number.
    """
    known = _KNOWN.search(loop.attribute("backend_config") or "")
    if known is not None:
        return int(known[1])
    roots = flow.hlo.roots
    test = flow.source(HloValue(roots[loop.called("condition")])).instruction
    if test.opcode != "compare":
        return None
    counter, end = flow.operands(test)
    counter = flow.source(counter)
    # The counter is a part of the loop's state, so it starts as the same part of the operand.
    state = flow.operands(loop)[0]
    start = HloValue(state.instruction, state.part + counter.part)
    following = flow.source(HloValue(roots[loop.called("body")], counter.part)).instruction
    if following.opcode != "add":
        return None
    old, step = flow.operands(following)
    old = flow.source(old)
    if counter.instruction.opcode != "parameter" or old.instruction.opcode != "parameter":
        return None
    if old.part != counter.part:  # another part of the state
        return None
    first, last, each = _number(flow, start), _number(flow, end), _number(flow, step)
    direction = test.attribute("direction") or ""
    sign = _SIGNS.get(direction)
    if first is None or last is None or each is None or sign is None:
        return None
    if direction in ("LE", "GE"):
        last += sign
    if (last - first) * sign <= 0:
        return 0
    if each * sign <= 0:
        return None  # the counter moves away from its end
    # Rounded up without a float, which has fewer digits than a 64-bit counter.
    return -((first - last) // each)


# The sign of the step for which a comparison of the counter with its end becomes false.
_SIGNS = {"LT": 1, "LE": 1, "GT": -1, "GE": -1}


def _number(flow: DataFlow, value: HloValue) -> int | None:
    """Return the number that an integer constant holds; return None for any other value."""
    instruction = flow.source(value).instruction
    if instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.argument):
        return None
    return int(instruction.argument)
