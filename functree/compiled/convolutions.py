"""A convolution of a compiled program ─► its flops.

The compilers for TPUs write most products of matrices as convolutions, whose window may be larger
than the image, and pad it. So only positions at which the kernel meets an element of the image are
counted.
"""

import functools
import math
import re
from typing import NamedTuple

from functree.compiled.hlo import ArrayType, Instruction


class _Window(NamedTuple):
    """The window of a convolution along one spatial dimension.

    Attributes:
        size: the size of the kernel.
        stride: how far the kernel moves from one element of the output to the next.
        low: the zeros in front of the image; fewer than none if some of it is cut off.
        image_dilation: the distance of two elements of the image, with zeros in between.
        kernel_dilation: the distance of two elements of the kernel.
    """

    size: int
    stride: int
    low: int
    image_dilation: int
    kernel_dilation: int


def convolution_flops(
    one: Instruction, image: ArrayType, kernel: ArrayType, output: ArrayType
) -> int:
    """The flops of one run of a convolution.

    Args:
        one: the convolution, which tells its window and which dimension is which.
        image: the type of what is convolved.
        kernel: the type of what it is convolved with.
        output: the type of the result.
    """
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", one.attribute("dim_labels") or "")
    if labels is None:
        return 0  # no convolution is written without
    of_image, of_kernel, of_output = labels.groups()
    # `b`: batch, `f`: features, `i` and `o`: those of the kernel. Features of a group meet the
    # kernel of that group only, and `i` is their number.
    flops = 2 * output.shape[of_output.index("b")] * output.shape[of_output.index("f")]
    flops *= kernel.shape[of_kernel.index("i")]
    for dimension, window in enumerate(_windows(one)):
        label = str(dimension)
        length = image.shape[of_image.index(label)]
        flops *= _meetings(window, length, output.shape[of_output.index(label)])
    return flops


def _windows(one: Instruction) -> list[_Window]:
    """The window of each spatial dimension."""
    text = one.attribute("window") or ""
    given: dict[str, list[str]] = {}
    for name, values in re.findall(r"(\w+)=(\S+)", text.strip("{}")):
        given[name] = values.split("x")
    sizes = given.get("size", [])
    others = ["1"] * len(sizes)
    columns = zip(
        sizes,
        given.get("stride", others),
        given.get("pad", ["0_0"] * len(sizes)),
        given.get("lhs_dilate", others),
        given.get("rhs_dilate", others),
        strict=True,
    )
    windows: list[_Window] = []
    for size, stride, pad, of_image, of_kernel in columns:
        low = pad.partition("_")[0]
        windows.append(_Window(int(size), int(stride), int(low), int(of_image), int(of_kernel)))
    return windows


@functools.lru_cache(maxsize=4096)
def _meetings(window: _Window, image: int, output: int) -> int:
    """How often an element of the kernel meets one of the image along a dimension.

    Args:
        window: the window.
        image: the size of the image.
        output: the size of the output.
    """
    end = (image - 1) * window.image_dilation
    common = math.gcd(window.stride, window.image_dilation)
    # Elements of the image that are met by one element of the kernel, for outputs so far apart.
    apart = window.image_dilation // common
    total = 0
    for index in range(window.size):
        # Where this element is for output 0, in the dilated image. For output i it is at
        # `start + i * stride`, which meets an element if it is a multiple of the dilation.
        start = index * window.kernel_dilation - window.low
        if start % common:
            continue
        inverse = pow(window.stride // common, -1, apart)
        first = (-start // common) * inverse % apart
        least = max(0, -(start // window.stride))
        most = min(output - 1, (end - start) // window.stride)
        least += (first - least) % apart
        if least <= most:
            total += (most - least) // apart + 1
    return total
