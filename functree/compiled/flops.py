"""The text of a compiled program ─► the flops of its products on one device, loops multiplied out.

The compilers' own count leaves out loops and kernels: the body of a loop counts once, and what a
custom kernel computes counts nothing. So products, convolutions and the kernels that are known are
counted here by their shapes. Everything else, such as a sum, is small beside them, and is left out.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from functree.compiled.convolutions import convolution_flops
from functree.compiled.data_flow import DataFlow
from functree.compiled.hlo import Hlo, Instruction
from functree.compiled.kernel_flops import kernel_flops, kernel_name
from functree.compiled.loops import runs
from functree.errors import count


class Flops(NamedTuple):
    """The flops of a compiled program on one device.

    Attributes:
        total: their number; a product and a sum of two numbers are two. Each branch of a
            conditional counts as if it were taken, and a loop of unknown length counts once.
        not_understood: what is not a part of the number, or may be too small in it, a sentence for
            each.
    """

    total: int
    not_understood: tuple[str, ...]


# What multiplies matrices inside, by algorithms that the text does not tell.
_UNKNOWN = ("cholesky", "fft", "ragged-dot", "triangular-solve")


def count_flops(text: str) -> Flops:
    """The flops of a program.

    Args:
        text: the text of the compiled program.
    """
    flow = DataFlow(Hlo(text))
    times = runs(flow)
    total = 0
    unknown: Counter[str] = Counter()
    endless: dict[str, None] = {}
    for one, flops in _each(flow.hlo):
        often = times[one.computation]
        if flops is None:
            unknown[kernel_name(one)] += 1
            continue
        if often is None and flops:
            endless[one.name] = None
            often = 1
        total += flops * (often or 0)
    sentences: list[str] = []
    for name, number in unknown.items():
        sentences.append(f"{name}: the flops of {count(number, 'call')} are not known, left out")
    if endless:
        why = "the length of a loop depends on data; they count once"
        sentences.append(f"how often {', '.join(endless)} run: {why}")
    return Flops(total, tuple(sentences))


def _each(hlo: Hlo) -> Iterator[tuple[Instruction, int | None]]:
    """The instructions that multiply, with the flops of one run; None if these are not known."""
    for opcode in ("dot", "scaled-dot"):
        for one in hlo.by_opcode.get(opcode, ()):
            yield one, _dot_flops(hlo, one)
    for one in hlo.by_opcode.get("convolution", ()):
        image, kernel = (hlo.instructions[name].arrays[0] for name in one.operands[:2])
        yield one, convolution_flops(one, image, kernel, one.arrays[0])
    for one in hlo.by_opcode.get("custom-call", ()):
        yield one, kernel_flops(hlo, one)
    for opcode in _UNKNOWN:
        for one in hlo.by_opcode.get(opcode, ()):
            yield one, None


def _dot_flops(hlo: Hlo, one: Instruction) -> int:
    left = hlo.instructions[one.operands[0]].arrays[0]
    summed = 1
    for dimension in (one.attribute("lhs_contracting_dims") or "{}").strip("{}").split(","):
        # The text of a product without a sum is empty.
        if dimension:
            summed *= left.shape[int(dimension)]
    return 2 * math.prod(one.arrays[0].shape) * summed
