"""A collective of a training step ─► its phase: forward, backward, recompute or update.

Recompute is what the backward pass computes again, update is the optimizer. The name of an
operation has the transformations in it that JAX has made it by: `jit(step)/transpose(jvp())/mul`.
Names of parameters in it are never read: after a hit of the persistent cache they are those of
another program.
"""

from collections.abc import Callable, Iterator, Sequence

from functree.compiled.data_flow import COLLECTIVES, DataFlow, HloValue, is_in_pieces
from functree.compiled.hlo import Instruction
from functree.compiled.moved_arrays import MovedArray

PHASES = ("forward", "backward", "recompute", "update")


class Phases:
    """The phases of the collectives of a program.

    Args:
        flow: where the values of the program come from.
        new_values: the new values of parameters that are made of a moved array; none if it serves
            anything else.
    """

    def __init__(self, flow: DataFlow, new_values: Callable[[MovedArray], Sequence[HloValue]]):
        self._flow, self._new_values = flow, new_values
        # Those of a collective, once for all arrays that the compiler has combined in it.
        self._names: dict[Instruction, list[str]] = {}
        # What earlier walks have found to be made of nothing of the backward pass: each value is
        # met once.
        self._independent: set[HloValue] = set()
        # Those that were found to be made of something of it.
        self._dependent: set[HloValue] = set()

    def phase(self, moved: MovedArray) -> str | None:
        """The phase of a moved array, one of `PHASES`.

        None if the compiler has combined operations of several phases, or lost their names.
        """
        one = moved.instruction
        if one not in self._names:
            self._names[one] = split(one.metadata("op_name") or "")
        own = self._names[one]
        if len(own) == moved.arrays and own != [""]:
            return self._of(own[moved.index], moved)  # one name for each array
        # Of combined arrays some compilers name only the first. Then what is moved says more.
        if moved.arrays > 1:
            source = self._flow.source(moved.operand).instruction
            phase = _phase(source.metadata("op_name") or "")
            if phase is not None:
                return phase
        for described in self.described(moved):
            name = described.metadata("op_name")
            if name:
                phases = {self._of(part, moved) for part in split(name)}
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

    def _of(self, name: str, moved: MovedArray) -> str:
        """The phase of an operation of this name."""
        phase = _phase(name)
        if phase is not None:
            return phase
        # What is neither differentiated nor a derivative is before the gradients, or made of them.
        if self._depends_on_backward(moved.operand):
            return "update"
        # An optimizer may need a parameter alone, such as its norm.
        if self._are_updates(self._new_values(moved)):
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
    # Nor does the name of a collective that they have combined of several say of which it is.
    if one.opcode in COLLECTIVES and len(one.arrays) > 1 and not is_in_pieces(one):
        return False
    # The name is read last, for it takes longest, and this is asked of each value of the program.
    if not one.mentions("transpose("):
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
