"""The text of a compiled program ─► the flops of its products on one device, loops multiplied out.

The compilers' own count leaves out loops and kernels: the body of a loop counts once, and what a
custom kernel computes counts nothing. So products, convolutions and the kernels that are known are
counted here by their shapes. Everything else, such as a sum, is small beside them, and is left out.
What a kernel computes is not in the text, but its name and its shapes are: there is a closed form
for each kind. A kernel that is not known here is never guessed.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from functree.compiled.data_flow import DataFlow, runs
from functree.compiled.hlo import ArrayType, Hlo, Instruction
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


# What multiplies nothing: marks of the compilers, buffers, callbacks, sorts, random bits.
_NO_PRODUCTS = re.compile(
    r"AllocateBuffer|\w*Bitcast\w*|Assume\w+|Async\w+|ResizeBuffer|PadToStatic|SliceToDynamic|SetBound|Pin|Unpin"
    r"|Sharding|SPMD\w+|X64\w*|MoveTo\w+|annotate_device_placement|TopK|PartialReduce|.*callback.*"
    r"|__cub\$.*|__gpu\$TopK|__topk|cu_threefry.*|.*_threefry.*|LayoutConstraint|inspect_sharding"
    r"|xla\.sdy\..*|ErfInv|GatherScatter\w+|mhlo\.\w+|dynamic_\w+|tanh|Barrier|barrier|nop|StochasticConvert"
)
# The products of queries by keys that a kernel computes: (those as wide as a head of the keys,
# those as wide as a head of the values).
_SPLASH = {"fwd": (1, 1), "dkv": (2, 2), "dq": (2, 1)}
_SPLASH_NAME = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)")
# The backward kernel that computes the gradient of the queries as well.
_FUSED = (3, 2)
_CUDNN_CONVOLUTIONS = {
    # Which of (first operand, second operand, result) are (image, kernel, output).
    "__cudnn$convForward": (0, 1, 2),
    "__cudnn$convForwardGraph": (0, 1, 2),
    "__cudnn$convBiasActivationForward": (0, 1, 2),
    "__cudnn$convBackwardInput": (2, 1, 0),
    "__cudnn$convBackwardFilter": (0, 2, 1),
}


def kernel_name(one: Instruction) -> str:
    """What an instruction is called in messages.

    Of a custom call it is the target, or, if that only tells which compiler made the kernel, the
    name.
    """
    if one.opcode != "custom-call":
        return one.opcode
    target = _target(one)
    if not target or target in ("tpu_custom_call", "mosaic_gpu", "__gpu$xla.gpu.triton"):
        return re.sub(r"[.\d]+$", "", one.name)
    return target


def kernel_flops(hlo: Hlo, one: Instruction) -> int | None:
    """The flops of one run of a custom call; None if they are not known."""
    target = _target(one)
    if _NO_PRODUCTS.fullmatch(target):
        return 0
    splash = _SPLASH_NAME.search(one.name)
    if splash is not None:
        return _splash_flops(hlo, one, splash[1])
    if target in _CUDNN_CONVOLUTIONS:
        types = [*_operands(hlo, one)[:2], one.arrays[0]]
        image, kernel, output = (types[i] for i in _CUDNN_CONVOLUTIONS[target])
        return convolution_flops(one, image, kernel, output)
    if target.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
        return _cublas_flops(hlo, one)
    if target.startswith("__cudnn$fmha"):
        return _cudnn_attention_flops(hlo, one, target)
    if target in ("__onednn$matmul", "__onednn$matmul_reorder"):
        return _onednn_flops(hlo, one)
    # What the author of a Pallas kernel has said of it.
    said = re.search(
        r'"cost_estimate":\{[^}]*"flops":"?(\d+)', one.attribute("backend_config") or ""
    )
    if said is not None:
        return int(said[1])
    return None


def _target(one: Instruction) -> str:
    return (one.attribute("custom_call_target") or "").strip('"')


def _operands(hlo: Hlo, one: Instruction) -> list[ArrayType]:
    return [hlo.instructions[name].arrays[0] for name in one.operands]


def _splash_flops(hlo: Hlo, one: Instruction, part: str) -> int | None:
    """The flops of a splash kernel, of attention on a TPU.

    Its operands are the mask by blocks, if it has one, queries, keys, values; each array has heads,
    the sequence, and the size of a head last. The text does not tell which blocks the mask leaves
    out; it is taken as causal, as that of nearly all of them. A block on the diagonal is computed
    as a whole.
    """
    arrays = [type_ for type_ in _operands(hlo, one) if len(type_.shape) >= 3]
    blocks = [type_.shape for type_ in arrays if type_.dtype == "s8"]
    heads = [type_.shape for type_ in arrays if type_.dtype in ("bf16", "f16", "f32")]
    if len(heads) < 3:
        return None
    query, key, value = heads[:3]
    by_keys, by_values = _SPLASH[part]
    if part == "dkv" and len(one.arrays) > 2:
        by_keys, by_values = _FUSED
    pairs = math.prod(query[:-1]) * key[-2]
    whole = 2 * pairs * (by_keys * query[-1] + by_values * value[-1])
    if not blocks:
        return whole
    rows, columns = blocks[-1][-2:]
    # A mask of a window has fewer columns than there are blocks of keys. Blocks are square then.
    across = columns
    if rows * key[-2] > columns * query[-2]:
        across = max(columns, rows * key[-2] // query[-2])
    computed = sum(min(-(-(row + 1) * across // rows), columns) for row in range(rows))
    return whole * computed // (rows * across)


def _cublas_flops(hlo: Hlo, one: Instruction) -> int | None:
    """The flops of a product by cuBLAS, which tells its dimensions in its configuration."""
    config = one.attribute("backend_config") or ""
    named = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', config)
    if named is None:
        return None
    left = _operands(hlo, one)[0].shape
    summed = math.prod(left[int(dimension)] for dimension in re.findall(r"\d+", named[1]))
    # The first of its results: the others are for its own use.
    return 2 * math.prod(one.arrays[0].shape) * summed


def _cudnn_attention_flops(hlo: Hlo, one: Instruction, target: str) -> int | None:
    """The flops of attention by cuDNN, which tells the shape of queries by keys."""
    config = one.attribute("backend_config") or ""
    named = re.search(r'"intermediate_tensor_shape":\{[^}]*?"dimensions":\[([^\]]*)\]', config)
    if named is None:
        return None
    pairs = math.prod(map(int, re.findall(r"\d+", named[1])))
    batch, heads, queries, _ = map(int, re.findall(r"\d+", named[1]))
    head_dim = math.prod(_operands(hlo, one)[0].shape) // (batch * heads * queries)
    products = 5 if target.endswith("Backward") else 2
    flops = 2 * pairs * head_dim * products
    if "CAUSAL" in config:
        return flops // 2
    return flops


def _onednn_flops(hlo: Hlo, one: Instruction) -> int:
    """The flops of a product by oneDNN, which may have transposed its operands."""
    left, right = (type_.shape for type_ in _operands(hlo, one)[:2])
    output = one.arrays[0].shape
    # [B, M, K] by [B, K, N] is [B, M, N], whichever order the last two dimensions have.
    batch = math.prod(output[:-2])
    ratio = math.prod(left) * math.prod(right) // (math.prod(output) * batch)
    return 2 * math.prod(output) * math.isqrt(ratio)


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
