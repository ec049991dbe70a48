"""The flops of a compiled program: of single instructions by tables, of programs by closed forms."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
from functree.compiled.flops import Flops, count_flops


def program(line: str, *types: str) -> str:
    """The text of a program with one instruction, of operands of these types."""
    lines = ["ENTRY %main.1 (p: f32[]) -> f32[] {"]
    for i, type_ in enumerate(types):
        lines.append(f"  %p{i} = {type_} parameter({i})")
    operands = ", ".join(f"%p{i}" for i in range(len(types)))
    return "\n".join([*lines, f"  ROOT {line.replace('(...)', f'({operands})')}", "}", ""])


# The splash kernels of 4 × 4 heads of 128, of 2,048 queries in four blocks, of which ten of sixteen
# are computed.
HEADS = ("s8[1,4,4]{2,1,0}", "s8[1,4,4]{2,1,0}", *["bf16[4,4,2048,128]{3,2,1,0}"] * 3)
PRODUCT = 2 * 16 * 2048 * 2048 * 128
WHOLE = HEADS[2:]
WINDOW = ("s8[1,4,2]{2,1,0}", "s8[1,4,2]{2,1,0}", *WHOLE)
KERNEL = 'custom-call(...), custom_call_target="tpu_custom_call"'
FMHA = (
    '"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","8","64","32"],'
    '"tuple_shapes":[]},"mask_type":"%s"'
)
CONV = "window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_01io->b01f"
BLAS = '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}'

# An instruction, the types of its operands, its flops.
INSTRUCTIONS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "a product": (
        "%dot.1 = f32[8,128]{1,0} dot(...), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        ("f32[8,64]{1,0}", "f32[64,128]{1,0}"),
        2 * 8 * 128 * 64,
    ),
    "of batches, over two dimensions": (
        "%dot.2 = bf16[5,8,7]{2,1,0} dot(...), lhs_batch_dims={0}, lhs_contracting_dims={1,3}, rhs_batch_dims={0}, rhs_contracting_dims={1,2}",
        ("bf16[5,3,8,4]{3,2,1,0}", "bf16[5,3,4,7]{3,2,1,0}"),
        2 * 5 * 8 * 7 * 12,
    ),
    "an outer product": (
        "%dot.3 = f32[8,7]{1,0} dot(...), lhs_contracting_dims={}, rhs_contracting_dims={}",
        ("f32[8]{0}", "f32[7]{0}"),
        2 * 8 * 7,
    ),
    "a product, as a TPU writes it": (
        "%convolution.16 = f32[8,256]{1,0:T(8,128)} convolution(...), dim_labels=bf_io->bf",
        ("bf16[8,128]{1,0}", "bf16[128,256]{1,0}"),
        2 * 8 * 256 * 128,
    ),
    "of which one dimension is summed by a window": (
        "%convolution.238 = bf16[4,512,512,1]{2,1,3,0} convolution(...), window={size=1x4}, dim_labels=0b1f_1io0->0bf1",
        ("bf16[4,512,4,64]{3,2,1,0}", "bf16[4,64,512,1]{3,2,1,0}"),
        2 * 4 * 512 * 512 * 4 * 64,
    ),
    "a convolution": (
        f"%convolution = f32[2,16,16,16]{{3,2,1,0}} convolution(...), {CONV}",
        ("f32[2,32,32,8]{3,2,1,0}", "f32[3,3,8,16]{3,2,1,0}"),
        2 * 2 * 16 * 8 * 47**2,  # at the end of each dimension the kernel meets two, and not three
    ),
    "by groups of features": (
        f"%convolution = f32[2,16,16,16]{{3,2,1,0}} convolution(...), {CONV}, feature_group_count=4",
        ("f32[2,32,32,8]{3,2,1,0}", "f32[3,3,2,16]{3,2,1,0}"),
        2 * 2 * 16 * 2 * 47**2,
    ),
    "of cuDNN": (
        '%cudnn-conv.2 = (f32[1,16,16,16]{3,2,1,0}, u8[0]{0}) custom-call(...), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"',
        ("f32[1,33,33,8]{3,2,1,0}", "f32[16,3,3,8]{3,2,1,0}"),
        2 * 16 * 8 * 48**2,
    ),
    "of cuDNN as a graph": (
        '%cudnn-conv.3 = (f32[1,16,16,16]{3,2,1,0}, u8[0]{0}) custom-call(...), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForwardGraph"',
        ("f32[1,33,33,8]{3,2,1,0}", "f32[16,3,3,8]{3,2,1,0}"),
        2 * 16 * 8 * 48**2,
    ),
    "its gradient of the kernel": (
        '%cudnn-conv-bw-filter.2 = (f32[16,3,3,8]{3,2,1,0}, u8[0]{0}) custom-call(...), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"',
        ("f32[1,33,33,8]{3,2,1,0}", "f32[1,16,16,16]{3,2,1,0}"),
        2 * 16 * 8 * 48**2,
    ),
    "its gradient of the image": (
        '%cudnn-conv-bw-input.2 = (f32[1,33,33,8]{3,2,1,0}, u8[0]{0}) custom-call(...), window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"',
        ("f32[1,16,16,16]{3,2,1,0}", "f32[16,3,3,8]{3,2,1,0}"),
        2 * 16 * 8 * 48**2,
    ),
    "cuBLAS": (
        f'%gemm.1 = (bf16[16,32]{{1,0}}, s8[33554432]{{0}}) custom-call(...), custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_config":{{"alpha_real":1,{BLAS}}}}}',
        ("bf16[16,64]{1,0}", "bf16[64,32]{1,0}"),
        2 * 16 * 32 * 64,
    ),
    "oneDNN": (
        '%matmul.1 = f32[3,16,32]{2,1,0} custom-call(...), custom_call_target="__onednn$matmul"',
        ("f32[3,16,64]{2,1,0}", "f32[3,32,64]{2,1,0}"),
        2 * 3 * 16 * 32 * 64,
    ),
    "attention of cuDNN": (
        f'%fmha.1 = (bf16[2,64,8,128]{{3,2,1,0}}, u8[0]{{0}}) custom-call(...), custom_call_target="__cudnn$fmhaSoftmax", backend_config={{"cudnn_fmha_backend_config":{{{FMHA % "NO_MASK"}}}}}',
        ("bf16[2,64,8,128]{3,2,1,0}", "bf16[2,32,8,128]{3,2,1,0}", "bf16[2,32,8,128]{3,2,1,0}"),
        2 * 2 * (2 * 8 * 64 * 32) * 128,
    ),
    "its gradient, causal": (
        f'%fmha.2 = (bf16[2,64,8,128]{{3,2,1,0}}, u8[0]{{0}}) custom-call(...), custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={{"cudnn_fmha_backend_config":{{{FMHA % "CAUSAL"}}}}}',
        ("bf16[2,64,8,128]{3,2,1,0}", "bf16[2,32,8,128]{3,2,1,0}", "bf16[2,32,8,128]{3,2,1,0}"),
        5 * (2 * 8 * 64 * 32) * 128,
    ),
    "splash": (
        f"%splash_mha_fwd_residuals.3 = (bf16[4,4,2048,128]{{3,2,1,0}}, f32[4,4,2048,128]{{3,2,1,0}}) {KERNEL}",
        HEADS,
        2 * PRODUCT * 10 // 16,
    ),
    "its gradients of keys and values": (
        f"%splash_mha_dkv_no_residuals.1 = (bf16[4,4,2048,128]{{3,2,1,0}}, bf16[4,4,2048,128]{{3,2,1,0}}) {KERNEL}",
        (*HEADS, "f32[4,4,8,2048]{3,2,1,0}"),
        4 * PRODUCT * 10 // 16,
    ),
    "its gradient of queries": (
        f"%splash_mha_dq_no_residuals.1 = bf16[4,4,2048,128]{{3,2,1,0}} {KERNEL}",
        HEADS,
        3 * PRODUCT * 10 // 16,
    ),
    "all three at once": (
        f"%splash_mha_dkv_no_residuals.1 = (bf16[4,4,2048,128]{{3,2,1,0}}, bf16[4,4,2048,128]{{3,2,1,0}}, bf16[4,4,2048,128]{{3,2,1,0}}) {KERNEL}",
        HEADS,
        5 * PRODUCT * 10 // 16,
    ),
    "without a mask": (
        f"%splash_mha_fwd_residuals.3 = (bf16[4,4,2048,128]{{3,2,1,0}}, f32[4,4,2048,128]{{3,2,1,0}}) {KERNEL}",
        WHOLE,
        2 * PRODUCT,
    ),
    "in a window of two blocks": (
        f"%splash_mha_fwd_residuals.3 = (bf16[4,4,2048,128]{{3,2,1,0}}, f32[4,4,2048,128]{{3,2,1,0}}) {KERNEL}",
        WINDOW,
        2 * PRODUCT * 7 // 16,
    ),
    "a kernel whose author has said it": (
        f'%mine.2 = f32[8]{{0}} {KERNEL}, backend_config={{"custom_call_config":{{"body":"TUx","cost_estimate":{{"flops":"12345","transcendentals":"0"}}}}}}',
        ("f32[8]{0}",),
        12345,
    ),
    "a buffer": ('%b.1 = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"', (), 0),
    "a callback": (
        '%c.1 = f32[8]{0} custom-call(...), custom_call_target="xla_ffi_python_cpu_callback"',
        ("f32[8]{0}",),
        0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_an_instruction(name: str) -> None:
    line, types, flops = INSTRUCTIONS[name]
    assert count_flops(program(line, *types)) == Flops(flops, ())


# What is left out, and what is said of it.
UNKNOWN: dict[str, tuple[str, str]] = {
    "a kernel of the user's": (f"%my_kernel.7 = f32[8]{{0}} {KERNEL}", "my_kernel"),
    "a solver": (
        '%s.1 = f32[8,8]{1,0} custom-call(...), custom_call_target="lapack_sgesdd_ffi"',
        "lapack_sgesdd_ffi",
    ),
    "a Fourier transform": ("%f.1 = c64[8]{0} fft(...), fft_type=FFT, fft_length={8}", "fft"),
    "cuBLAS without its dimensions": (
        '%g.1 = f32[8]{0} custom-call(...), custom_call_target="__cublas$gemm"',
        "__cublas$gemm",
    ),
    "splash without heads": (f"%splash_mha_fwd.1 = f32[8]{{0}} {KERNEL}", "splash_mha_fwd"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_never_guessed(name: str) -> None:
    line, called = UNKNOWN[name]
    said = f"{called}: the flops of 1 call are unknown and left out"
    assert count_flops(program(line, "f32[8]{0}")) == Flops(0, (said,))


@given(
    size=st.integers(1, 5),
    stride=st.integers(1, 4),
    low=st.integers(-4, 4),
    image_dilation=st.integers(1, 4),
    kernel_dilation=st.integers(1, 3),
    image=st.integers(1, 9),
    output=st.integers(1, 12),
)
def test_a_window_meets_as_many_elements_as_a_walk_over_all_finds(
    size: int,
    stride: int,
    low: int,
    image_dilation: int,
    kernel_dilation: int,
    image: int,
    output: int,
) -> None:
    elements = {i * image_dilation for i in range(image)}
    met = 0
    for i in range(output):
        met += sum(i * stride + k * kernel_dilation - low in elements for k in range(size))
    window = f"{{size={size} stride={stride} pad={low}_0 lhs_dilate={image_dilation} rhs_dilate={kernel_dilation}}}"
    line = f"%c.1 = f32[1,{output},1]{{2,1,0}} convolution(...), window={window}, dim_labels=b0f_0io->b0f"
    text = program(line, f"f32[1,{image},1]{{2,1,0}}", f"f32[{size},1,1]{{2,1,0}}")
    assert count_flops(text).total == 2 * met


# Programs of the compiler for CPUs

LAYERS, EMBED, HIDDEN, BATCH = 3, 32, 64, 16


def mlp(up: Any, down: Any, x: Any, scanned: bool, remat: bool) -> Any:
    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        return x + jnp.tanh(x @ weights[0]) @ weights[1], None

    if remat:
        layer = jax.checkpoint(layer)
    if scanned:
        return (jax.lax.scan(layer, x, (up, down))[0] ** 2).sum()
    for weights in zip(up, down, strict=True):
        x, _ = layer(x, weights)
    return (x**2).sum()


# Not unrolled and recomputed: there some versions of the compiler find what they have computed.
@pytest.mark.parametrize(
    ("scanned", "remat"),
    [(False, False), (True, False), (True, True)],
    ids=["unrolled", "scanned", "recomputed"],
)
def test_an_mlp(scanned: bool, remat: bool) -> None:
    mesh = ft.make_mesh(data=2, model=4)
    layouts = (ft.P(None, None, "model"), ft.P(None, "model"), ft.P("data"))
    gradient = ft.jit(
        jax.grad(functools.partial(mlp, scanned=scanned, remat=remat), (0, 1, 2)),
        in_shardings=layouts,
        mesh=mesh,
    )
    shapes = [(LAYERS, EMBED, HIDDEN), (LAYERS, HIDDEN, EMBED), (BATCH, EMBED)]
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    text = gradient.lower(*arrays).compile().as_text()
    product = 2 * (BATCH // 2) * EMBED * (HIDDEN // 4)
    # Two forward, four backward, and `up` once more if it was not kept.
    products = LAYERS * (2 + 4 + remat)
    assert text is not None
    assert count_flops(text) == Flops(product * products, ())


def test_a_loop_of_unknown_length_counts_once_and_that_is_said() -> None:
    @jax.jit
    def powers(x: Any, n: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda _, x: x @ x, x)

    arrays = [jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((), "int32")]
    found = count_flops(powers.lower(*arrays).compile().as_text() or "")
    assert found.total == 2 * 8**3
    assert len(found.not_understood) == 1
    assert found.not_understood[0].startswith("the number of runs of ")
    assert found.not_understood[0].endswith(
        "a loop's length depends on data, so each operation is counted once"
    )
