"""A custom call of a compiled program ─► the flops of the kernel, by a closed form for each kind.

What a kernel computes is not in the text, but its name and its shapes are. A kernel that is not
known here is never guessed.
"""

import math
import re

from functree.compiled.convolutions import convolution_flops
from functree.compiled.hlo import ArrayType, Hlo, Instruction

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
