"""The bytes on one device, and the memory of the hardware ─► why a candidate does not fit."""

import re
from collections.abc import Iterable

from functree.calls.out_of_memory import SMALLER
from functree.compiled.collective import Memory
from functree.devices.specs import spec_text
from functree.errors import FunctreeError, Problem
from functree.layout.plan.plan import Plan
from functree.layout.plan.row import Row
from functree.report.table import bytes_text
from functree.tree.arrays import array_text

LARGEST = 3
"""The number of arrays that are named."""


def device_bytes(plan: Plan) -> int:
    """The bytes of a plan on one device, without host memory."""
    return sum(row.bytes_per_device for row in _on_device(plan))


def too_large(plan: Plan, memory: float, there: str) -> tuple[Problem, ...]:
    """The problems of arguments that take more than the memory; empty if they may fit.

    An array without a spec is left out: the compiler may shard it.

    Args:
        plan: their plan.
        memory: the bytes of memory.
        there: the words before the memory: `there are`, `a TPU v5e has`.
    """
    rows = [row for row in _on_device(plan) if row.spec is not None]
    needed = sum(row.bytes_per_device for row in rows)
    if needed <= memory:
        return ()
    why = f"its arguments are {bytes_text(needed)} on each device, and {there} "
    why += bytes_text(round(memory))
    largest = sorted(rows, key=lambda row: -row.bytes_per_device)
    problems = [Problem(None, None, "", why, SMALLER)]
    for row in largest[:LARGEST]:
        if row.spec is None:
            continue  # not here: see above
        each = f"{bytes_text(row.bytes_per_device)} on each device, {spec_text(row.spec)}"
        problems.append(Problem(row.path, row.shape, array_text(row), each))
    return tuple(problems)


def may_not_fit(program: Memory, memory: float, kind: str) -> str:
    """That a program for this machine has a higher peak than the memory of an accelerator; empty
    if it has not. It is no problem, since the accelerator's own program has another peak."""
    if program.peak <= memory:
        return ""
    peak, there = bytes_text(program.peak), bytes_text(round(memory))
    return (
        f"may not fit: this machine's program needs {peak} of memory, and a {kind} has {there}; "
        "give a target to know"
    )


def too_high(program: Memory, memory: float) -> tuple[Problem, ...]:
    """The problem of a program whose peak is more than the memory; empty if it fits."""
    if program.peak <= memory:
        return ()
    why = f"the program needs {bytes_text(program.peak)} of memory, and there are "
    why += f"{bytes_text(round(memory))}; its arguments are "
    why += f"{bytes_text(sum(program.arguments.values()))} on each device"
    return (Problem(None, None, "", why, SMALLER),)


def problems_of(error: BaseException) -> tuple[Problem, ...]:
    """The problems of an error: its first lines, and what it lists."""
    headline = re.split(r"\n\s*\n", str(error).strip(), maxsplit=1)[0] or type(error).__name__
    if not isinstance(error, FunctreeError):
        first = headline.partition("\n")[0]
        return (Problem(None, None, "", f"{type(error).__name__}: {first}"),)
    listed_ones = [problem for problem in error.problems if problem.why != str(error)]
    return (Problem(None, None, "", headline), *listed_ones)


def _on_device(plan: Plan) -> Iterable[Row]:
    return [row for row in plan.rows if row.memory_kind is None]
