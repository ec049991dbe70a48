"""A collective of a training step ─► its phase: forward, backward, recomputation, or the update of the optimizer.

The name of an operation has the transformations in it that JAX has made it by: `jit(step)/transpose(jvp())/mul`. Names
of parameters in it are never read: after a hit of the persistent cache they are those of another program.
"""

from collections.abc import Iterator

from functree.compiled.flow import Flow, Value
from functree.compiled.hlo import Instruction
from functree.compiled.moved import Moved

PHASES = ("forward", "backward", "recompute", "update")


class Phases:
    """The phases of the collectives of a program.

    Args:
        flow: where the values of the program come from.
    """

    def __init__(self, flow: Flow):
        self._flow = flow
        # Those of a collective, once for all arrays that the compiler has combined in it.
        self._names: dict[Instruction, list[str]] = {}
        # What earlier walks have found to be made of nothing of the backward pass: each value is met once.
        self._independent: set[Value] = set()

    def phase(self, moved: Moved) -> str | None:
        """One of `PHASES`; None if the compiler has combined operations of several phases, or lost their names."""
        one = moved.instruction
        if one not in self._names:
            self._names[one] = split(one.metadata("op_name") or "")
        own = self._names[one]
        if len(own) == moved.arrays and own != [""]:
            return self._of(own[moved.index], moved)  # one name for each array
        # Of combined arrays some compilers name only the first. Then what is moved says more.
        moving = self._flow.source(moved.operand).instruction.metadata("op_name") or ""
        if moved.arrays > 1 and _phase(moving) is not None:
            return _phase(moving)
        named = next((name for one in self.described(moved) if (name := one.metadata("op_name"))), None)
        if named is None:
            return None
        phases = {self._of(name, moved) for name in split(named)}
        return phases.pop() if len(phases) == 1 else None

    def described(self, moved: Moved) -> Iterator[Instruction]:
        """The instructions that describe a collective, the nearest first.

        Some compilers leave a collective without metadata that they have made of others. Then what it moves says where
        it comes from, and else what it is a part of.
        """
        yield moved.instruction
        yield self._flow.source(moved.operand).instruction
        computation = moved.instruction.computation
        while callers := self._flow.callers.get(computation):
            yield callers[0]
            computation = callers[0].computation

    def _of(self, name: str, moved: Moved) -> str:
        """The phase of an operation of this name.

        What is neither differentiated nor a derivative is before the gradients, or is made of them.
        """
        return _phase(name) or ("update" if self._depends_on_backward(moved) else "forward")

    def _depends_on_backward(self, moved: Moved) -> bool:
        seen = {moved.operand}
        waiting = [moved.operand]
        while waiting:
            one = waiting.pop()
            if _is_backward(one.instruction):
                return True
            new = [value for value in self._flow.inputs(one) if value not in seen and value not in self._independent]
            waiting += new
            seen.update(new)
        self._independent |= seen
        return False


def _is_backward(one: Instruction) -> bool:
    """Whether an instruction is of the backward pass alone: one constant may serve the forward pass too."""
    if one.opcode == "constant" or not one.mentions("transpose("):
        return False
    return _phase(one.metadata("op_name") or "") == "backward"


def _phase(name: str) -> str | None:
    """The phase that the name of an operation says; None if it was neither differentiated nor is a derivative."""
    if "rematted_computation" in name:
        return "recompute"
    if "transpose(" in name:
        return "backward"
    return "forward" if "jvp(" in name else None


def split(name: str) -> list[str]:
    """The names of the operations that a compiler has combined.

    >>> split("jit(f)/transpose(jvp())/(reduce_sum:while/dot_general)")
    ['jit(f)/transpose(jvp())/reduce_sum', 'jit(f)/transpose(jvp())/while/dot_general']
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
