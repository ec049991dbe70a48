"""`count_flops` counts a compiled program's flops on one device, including every loop iteration.

The compilers' own count includes each loop body only once, and leaves out custom kernels. Here, the
flops of products, convolutions and known kernels are computed from their shapes. All other
operations, such as sums, cost comparatively little and are left out. A program shows a kernel's
name and shapes, but not its computation, so each known kind of kernel has its own formula. The
flops of unknown kernels are never guessed.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from functree.compiled.data_flow import DataFlow, runs
from functree.compiled.hlo import ArrayType, Hlo, Instruction, numbers
from functree.errors import count


class Flops(NamedTuple):
    """The flops of a compiled program on one device.

    Attributes:
        total: the number of flops. A multiply-add is two flops. Every branch of a conditional is
            assumed to be taken, and a loop of unknown length is assumed to run once.
        not_understood: one sentence for each part that is missing from the total or may be
            undercounted.
    """

    total: int
    not_understood: tuple[str, ...]


# Operations whose flops cannot be derived from the text.
_UNKNOWN = ("cholesky", "fft", "ragged-dot", "triangular-solve")


def count_flops(text: str) -> Flops:
    """Count the flops of a program.

    Args:
        text: the text of the compiled program.
    """
    flow = DataFlow(Hlo(text))
    times = runs(flow)
    total = 0
    unknown: Counter[str] = Counter()
    endless: dict[str, None] = {}
    for instruction, flops in _each(flow.hlo):
        often = times[instruction.computation]
        if flops is None:
            unknown[kernel_name(instruction)] += 1
            continue
        if often is None and flops:
            endless[instruction.name] = None
            often = 1
        total += flops * (often or 0)
    sentences: list[str] = []
    for name, number in unknown.items():
        sentences.append(f"{name}: the flops of {count(number, 'call')} are unknown and left out")
    if endless:
        why = "a loop's length depends on data, so each operation is counted once"
        sentences.append(f"the number of runs of {', '.join(endless)} is unknown: {why}")
    return Flops(total, tuple(sentences))


def _each(hlo: Hlo) -> Iterator[tuple[Instruction, int | None]]:
    """Yield each instruction that multiplies, with the flops of one run, or None if unknown."""
    for opcode in ("dot", "scaled-dot"):
        for instruction in hlo.by_opcode.get(opcode, ()):
            yield instruction, _dot_flops(hlo, instruction)
    for instruction in hlo.by_opcode.get("convolution", ()):
        image, kernel = (hlo.instructions[name].arrays[0] for name in instruction.operands[:2])
        yield instruction, convolution_flops(instruction, image, kernel, instruction.arrays[0])
    for instruction in hlo.by_opcode.get("custom-call", ()):
        yield instruction, kernel_flops(hlo, instruction)
    for opcode in _UNKNOWN:
        for instruction in hlo.by_opcode.get(opcode, ()):
            yield instruction, None


def _dot_flops(hlo: Hlo, dot: Instruction) -> int:
    left = hlo.instructions[dot.operands[0]].arrays[0]
    summed = numbers((dot.attribute("lhs_contracting_dims") or "").strip("{}"))
    return 2 * math.prod(dot.arrays[0].shape) * math.prod(left.shape[i] for i in summed)


# Custom calls that multiply nothing: compiler annotations, buffers, callbacks, sorts, random bits.
_NO_PRODUCTS = re.compile(
    r"AllocateBuffer|\w*Bitcast\w*|Assume\w+|Async\w+|ResizeBuffer|PadToStatic|SliceToDynamic|SetBound|Pin|Unpin"
    r"|Sharding|SPMD\w+|X64\w*|MoveTo\w+|annotate_device_placement|TopK|PartialReduce|.*callback.*"
    r"|__cub\$.*|__gpu\$TopK|__topk|cu_threefry.*|.*_threefry.*|LayoutConstraint|inspect_sharding"
    r"|xla\.sdy\..*|ErfInv|GatherScatter\w+|mhlo\.\w+|dynamic_\w+|tanh|Barrier|barrier|nop|StochasticConvert"
)
# The numbers of products that a kernel computes for each pair of a query and a key: (products over
# a key's head size, products over a value's head size).
_SPLASH = {"fwd": (1, 1), "dkv": (2, 2), "dq": (2, 1)}
_SPLASH_NAME = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)")
# A fused backward kernel computes the gradient of the queries, too.
_FUSED = (3, 2)
_CUDNN_CONVOLUTIONS = {
    # The indices of (image, kernel, output) in (first operand, second operand, result).
    "__cudnn$convForward": (0, 1, 2),
    "__cudnn$convForwardGraph": (0, 1, 2),
    "__cudnn$convBiasActivationForward": (0, 1, 2),
    "__cudnn$convBackwardInput": (2, 1, 0),
    "__cudnn$convBackwardFilter": (0, 2, 1),
}


def kernel_name(one: Instruction) -> str:
    """Return the name that messages use for an instruction.

    For a custom call, the name is its target. If the target names only the compiler that generated
    the kernel, the name is the instruction's own name.
    """
    if one.opcode != "custom-call":
        return one.opcode
    target = _target(one)
    if not target or target in ("tpu_custom_call", "mosaic_gpu", "__gpu$xla.gpu.triton"):
        return re.sub(r"[.\d]+$", "", one.name)
    return target


def kernel_flops(hlo: Hlo, one: Instruction) -> int | None:
    """Count the flops of one run of a custom call, or return None if they are unknown."""
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
    # The author of a Pallas kernel may have given a cost estimate.
    said = re.search(
        r'"cost_estimate":\{[^}]*"flops":"?(\d+)', one.attribute("backend_config") or ""
    )
    if said is not None:
        return int(said[1])
    return None


def _target(instruction: Instruction) -> str:
    return (instruction.attribute("custom_call_target") or "").strip('"')


def _operands(hlo: Hlo, instruction: Instruction) -> list[ArrayType]:
    return [hlo.instructions[name].arrays[0] for name in instruction.operands]


def _splash_flops(hlo: Hlo, kernel: Instruction, part: str) -> int | None:
    """Count the flops of a splash kernel, which computes attention on TPUs.

    Its operands are the block mask, if any, the queries, the keys and the values. The last three
    dimensions of the queries, keys and values are heads, sequence and head size. The text does not
    show which blocks the mask excludes. The mask is assumed to be causal, as nearly all masks are.
    Blocks on the diagonal are computed in full.
    """
    arrays = [type_ for type_ in _operands(hlo, kernel) if len(type_.shape) >= 3]
    blocks = [type_.shape for type_ in arrays if type_.dtype == "s8"]
    heads = [type_.shape for type_ in arrays if type_.dtype in ("bf16", "f16", "f32")]
    if len(heads) < 3:
        return None
    query, key, value = heads[:3]
    by_keys, by_values = _SPLASH[part]
    if part == "dkv" and len(kernel.arrays) > 2:
        by_keys, by_values = _FUSED
    pairs = math.prod(query[:-1]) * key[-2]
    whole = 2 * pairs * (by_keys * query[-1] + by_values * value[-1])
    if not blocks:
        return whole
    rows, columns = blocks[-1][-2:]
    # The mask of a sliding window has fewer columns than there are blocks of keys. Such a mask has
    # square blocks.
    across = columns
    if rows * key[-2] > columns * query[-2]:
        across = max(columns, rows * key[-2] // query[-2])
    computed = sum(min(-(-(row + 1) * across // rows), columns) for row in range(rows))
    return whole * computed // (rows * across)


def _cublas_flops(hlo: Hlo, product: Instruction) -> int | None:
    """Count the flops of a cuBLAS product, whose configuration names the contracted dimensions."""
    config = product.attribute("backend_config") or ""
    named = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', config)
    if named is None:
        return None
    left = _operands(hlo, product)[0].shape
    summed = math.prod(left[int(dimension)] for dimension in re.findall(r"\d+", named[1]))
    # Only the first result is the product; the others are workspace.
    return 2 * math.prod(product.arrays[0].shape) * summed


def _cudnn_attention_flops(hlo: Hlo, kernel: Instruction, target: str) -> int | None:
    """Count the flops of cuDNN attention, whose configuration gives the scores' shape."""
    config = kernel.attribute("backend_config") or ""
    named = re.search(r'"intermediate_tensor_shape":\{[^}]*?"dimensions":\[([^\]]*)\]', config)
    if named is None:
        return None
    pairs = math.prod(map(int, re.findall(r"\d+", named[1])))
    batch, heads, queries, _ = map(int, re.findall(r"\d+", named[1]))
    head_dim = math.prod(_operands(hlo, kernel)[0].shape) // (batch * heads * queries)
    products = 5 if target.endswith("Backward") else 2
    flops = 2 * pairs * head_dim * products
    if "CAUSAL" in config:
        return flops // 2
    return flops


def _onednn_flops(hlo: Hlo, product: Instruction) -> int:
    """Count the flops of a oneDNN product, whose operands may be transposed."""
    left, right = (type_.shape for type_ in _operands(hlo, product)[:2])
    output = product.arrays[0].shape
    # [B, M, K] times [B, K, N] is [B, M, N]. Each operand's last two dimensions may be swapped.
    batch = math.prod(output[:-2])
    ratio = math.prod(left) * math.prod(right) // (math.prod(output) * batch)
    return 2 * math.prod(output) * math.isqrt(ratio)


class _Window(NamedTuple):
    """The window of a convolution along one spatial dimension.

    Attributes:
        size: the size of the kernel.
        stride: the step of the kernel between neighboring output elements.
        low: the number of zeros before the image; negative if the image is cropped.
        image_dilation: the distance between neighboring image elements, with zeros in between.
        kernel_dilation: the distance between neighboring kernel elements.
    """

    size: int
    stride: int
    low: int
    image_dilation: int
    kernel_dilation: int


def convolution_flops(
    one: Instruction, image: ArrayType, kernel: ArrayType, output: ArrayType
) -> int:
    """Count the flops of one run of a convolution.

    Args:
        one: the convolution, with its window and the order of its dimensions.
        image: the type of the convolved array.
        kernel: the type of the kernel.
        output: the type of the result.
    """
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", one.attribute("dim_labels") or "")
    if labels is None:
        return 0  # every convolution has labels
    of_image, of_kernel, of_output = labels.groups()
    # `b` is the batch, `f` the features, and `i` and `o` are the kernel's input and output
    # features. If features are in groups, `i` is the number of input features in one group.
    flops = 2 * output.shape[of_output.index("b")] * output.shape[of_output.index("f")]
    flops *= kernel.shape[of_kernel.index("i")]
    for dimension, window in enumerate(_windows(one)):
        label = str(dimension)
        length = image.shape[of_image.index(label)]
        flops *= _meetings(window, length, output.shape[of_output.index(label)])
    return flops


def _windows(convolution: Instruction) -> list[_Window]:
    """Return the window of each spatial dimension."""
    attributes: dict[str, list[str]] = {}
    for name, values in re.findall(r"(\w+)=([^\s}]+)", convolution.attribute("window") or ""):
        attributes[name] = values.split("x")
    sizes = attributes.get("size", [])
    ones = ["1"] * len(sizes)
    pads = [pad.partition("_")[0] for pad in attributes.get("pad", ["0"] * len(sizes))]
    stride, of_image, of_kernel = (
        attributes.get(name, ones) for name in ("stride", "lhs_dilate", "rhs_dilate")
    )
    columns = zip(sizes, stride, pads, of_image, of_kernel, strict=True)
    return [_Window(*map(int, each)) for each in columns]


@functools.lru_cache(maxsize=4096)
def _meetings(window: _Window, image: int, output: int) -> int:
    """Count the pairs of a kernel element and an image element that meet along one dimension.

    Args:
        window: the window.
        image: the size of the image.
        output: the size of the output.
    """
    end = (image - 1) * window.image_dilation
    common = math.gcd(window.stride, window.image_dilation)
    # A kernel element meets an image element at every `apart`-th output.
    apart = window.image_dilation // common
    total = 0
    for index in range(window.size):
        # The kernel element's position in the dilated image, for output 0. For output i, it is at
        # `start + i * stride`. It meets an element if that position is a multiple of the dilation.
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
