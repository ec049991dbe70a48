"""A compiled program ─► how often each of its computations runs."""

import re
from collections.abc import Mapping

from functree.compiled.data_flow import CALLS, DataFlow, HloValue
from functree.compiled.hlo import Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def runs(flow: DataFlow) -> Mapping[str, int | None]:
    """How often each computation runs, by its name; None if a loop around it has an unknown length.

    Each branch of a conditional counts as if it were taken.
    """
    hlo = flow.hlo
    found: dict[str, int | None] = {hlo.entry: 1}
    # In the text, a computation stands in front of those that call it.
    for name in reversed(hlo.computations):
        times = found.setdefault(name, 0)  # 0: nothing that is counted calls it
        for one in hlo.computations[name]:
            if one.opcode not in CALLS:
                continue
            each = 1
            if one.opcode == "while":
                each = trip_count(flow, one)
            for called in one.computations:
                before = found.get(called, 0)
                # The condition of a loop runs once more than its body, and has nothing in it that
                # is counted.
                if times is None or each is None or before is None:
                    found[called] = None
                else:
                    found[called] = before + times * each
    return found


def trip_count(flow: DataFlow, loop: Instruction) -> int | None:
    """The number of iterations of a `while`; None if it depends on data, or is not understood.

    The compilers for CPUs and GPUs write it into the text. The one for TPUs does not; there it is
    read from the loop, if its condition compares i with a constant, and its body adds one to i.
    """
    known = _KNOWN.search(loop.attribute("backend_config") or "")
    if known is not None:
        return int(known[1])
    roots = flow.hlo.roots
    test = flow.source(HloValue(roots[loop.called("condition")]))
    if test.instruction.opcode != "compare":
        return None
    direction = test.instruction.attribute("direction") or ""
    counter, limit = flow.operands(test.instruction)
    if flow.source(counter).instruction.opcode != "parameter":  # `N > i`
        counter, limit, direction = limit, counter, _SWAPPED.get(direction, "")
    counter, end = flow.source(counter), _number(flow, limit)
    if counter.instruction.opcode != "parameter":
        return None
    # The counter is a part of the state of the loop: its start is that part of the operand.
    state = flow.operands(loop)[0]
    start = _number(flow, HloValue(state.instruction, state.part + counter.part))
    step = _step(flow, HloValue(roots[loop.called("body")], counter.part))
    if start is None or end is None or step is None:
        return None
    return _iterations(start, end, step, direction)


# The direction of a comparison whose operands change places.
_SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def _iterations(start: int, end: int, step: int, direction: str) -> int | None:
    """How often a counter passes a comparison with its end; None if it never stops, or ends by
    another comparison."""
    if direction in ("GT", "GE"):  # downwards, which is upwards with other signs
        start, end, step = -start, -end, -step
    elif direction not in ("LT", "LE"):
        return None
    if direction in ("LE", "GE"):
        end += 1
    if start >= end:
        return 0
    if step <= 0:
        return None
    # Rounded up, and not by a float, which has fewer digits than a counter of 64 bits.
    return -(-(end - start) // step)


def _step(flow: DataFlow, following: HloValue) -> int | None:
    """What the body of a loop adds to a part of its state; None if it is no constant."""
    added = flow.source(following).instruction
    if added.opcode == "subtract":
        old, new = flow.operands(added)
        step = _number(flow, new)
        return -step if step is not None and _is_old(flow, old, following) else None
    if added.opcode != "add":
        return None
    # `i + 1` or `1 + i`.
    first, second = flow.operands(added)
    for old, new in ((first, second), (second, first)):
        step = _number(flow, new)
        if step is not None and _is_old(flow, old, following):
            return step
    return None


def _is_old(flow: DataFlow, value: HloValue, following: HloValue) -> bool:
    """Whether a value is what a part of the state of a loop was before."""
    before = flow.source(value)
    return before.instruction.opcode == "parameter" and before.part == following.part


def _number(flow: DataFlow, value: HloValue) -> int | None:
    """The value of an integer constant."""
    one = flow.source(value).instruction
    if one.opcode != "constant" or not re.fullmatch(r"-?\d+", one.argument):
        return None
    return int(one.argument)
