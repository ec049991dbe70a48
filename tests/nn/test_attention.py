"""Attention: against an oracle in float64, in chunks, by TPU's kernel (interpreted), in a cache,
and on a mesh."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from functree.nn.attention import attend as attending
from functree.nn.attention import kernels
from functree.nn.attention.attend import attend
from functree.nn.attention.chunked import Mask, chunked
from functree.nn.attention.kernels import CausalMask, splash
from tests.lib.checks import raises
from tests.nn.attention_oracle import causal, oracle

RANDOM = np.random.default_rng(0)


def arrays(
    seq: int, heads: int, kv_heads: int, head_dim: int = 8, dtype: Any = "float32", keys: int = 0
) -> Any:
    sizes = ((seq, heads), (keys or seq, kv_heads), (keys or seq, kv_heads))
    return [jnp.asarray(RANDOM.normal(size=(2, n, h, head_dim)), dtype) for n, h in sizes]


def packed(seq: int) -> Any:
    """Texts of several lengths in each row; a segment may have the id 0."""
    return jnp.asarray(np.sort(RANDOM.integers(0, 4, (2, seq)), 1), jnp.int32)


def close(found: Any, expected: Any, tolerance: float) -> None:
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint32"])
def test_positions_of_any_integer_dtype(dtype: str) -> None:
    seq, window = 1024, 5
    query, key, value = arrays(seq, 2, 1)
    reverse = jnp.arange(seq)[::-1]
    found = attend(
        query, key, value, window=window, positions=reverse.astype(dtype), implementation="chunked"
    )
    mask = Mask(reverse[None], reverse[None], None, None, window)
    close(found, oracle(query, key, value, mask), 1e-5)


# seq, heads, kv_heads, window, packed, chunk
CHUNKED = [
    (40, 4, 2, None, False, math.inf),
    (40, 4, 4, 7, True, math.inf),
    (40, 4, 2, None, False, 16),
    (40, 4, 1, 7, False, 16),
    (33, 4, 4, 13, True, 8),
    (33, 2, 2, None, True, 8),
    (32, 2, 1, 8, False, 8),
    (32, 2, 1, 9, False, 8),
    (32, 2, 1, 1, False, 8),
]


@pytest.mark.parametrize(("seq", "heads", "kv_heads", "window", "is_packed", "chunk"), CHUNKED)
def test_chunks_against_the_oracle(
    seq: int, heads: int, kv_heads: int, window: int | None, is_packed: bool, chunk: float
) -> None:
    given = arrays(seq, heads, kv_heads)
    segments = packed(seq) if is_packed else None
    mask = causal(seq, segments, window)
    found = jax.jit(lambda *given: chunked(*given, mask, chunk))(*given)
    close(found, oracle(*given, mask), 2e-6)

    def loss(*given: Any, size: float) -> Any:
        return jnp.sin(chunked(*given, mask, size)).sum()

    # JAX differentiates the form that holds all weights.
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnames="size")
    found, expected = gradient(*given, size=chunk), gradient(*given, size=math.inf)
    for one, other in zip(found, expected, strict=True):
        close(one, other, 1e-5)


@pytest.mark.parametrize("chunk", [2, math.inf])
def test_a_query_that_attends_to_nothing_gets_zeros(chunk: float) -> None:
    given = arrays(2, 4, 2, keys=8)
    queries = jnp.array([[5, 6], [-1, 1]])
    keys = jnp.array([[4, -1, 6, 5, 0, 1, 2, 3], [-1, -1, -1, -1, 1, 0, -1, -1]])
    mask = Mask(queries, keys, window=3)
    found = chunked(*given, mask, chunk)
    close(found, oracle(*given, mask), 2e-6)
    assert not found[1, 0].any() and found[1, 1].all()
    total = jax.jit(lambda *given: chunked(*given, mask, chunk).sum())
    gradients = jax.grad(total, (0, 1, 2))(*given)
    assert all(np.isfinite(one).all() for one in gradients)
    assert not gradients[0][1, 0].any() and not gradients[1][1, :4].any()


def test_chunks_that_no_query_attends_to_are_not_computed() -> None:
    """A NaN in them would come out, with a weight of zero too. By a window of 8, queries 32 to 39
    attend to keys 25 to 39, and keys 24 to 31 get gradients of queries 24 to 38."""
    mask = causal(64, window=8)

    def mixed_and_gradients(*given: Any) -> Any:
        mixed, pull = jax.vjp(lambda *given: chunked(*given, mask, 8), *given)
        return mixed, *pull(jnp.ones_like(mixed))

    def only(x: Any) -> Any:
        return jnp.full_like(x, jnp.nan).at[:, 24:40].set(x[:, 24:40])

    query, key, value = arrays(64, 2, 2)
    mixed, *_ = jax.jit(mixed_and_gradients)(query, only(key), only(value))
    assert np.isfinite(mixed[:, 32:40]).all() and np.isnan(mixed[:, 48:]).all()
    _, _, *of_keys = jax.jit(mixed_and_gradients)(only(query), key, value)
    assert all(np.isfinite(one[:, 24:32]).all() for one in of_keys)


@pytest.mark.parametrize("window", [None, 100])
def test_bfloat16_in_long_sequences(window: int | None) -> None:
    seq, rows = 8192, [0, 1, 511, 512, 4097, 8191]
    given = [x[:1] for x in arrays(seq, 2, 1, 16, "bfloat16")]
    segments = jnp.asarray(np.sort(RANDOM.integers(0, 3, (1, seq)), 1))
    mask = causal(seq, segments, window)
    found = jax.jit(lambda *given: chunked(*given, mask))(*given)
    some = jnp.array(rows)
    of_rows = Mask(some[None], jnp.arange(seq)[None], segments[:, some], segments, window)
    expected = oracle(given[0][:, some], *given[1:], of_rows)
    np.testing.assert_allclose(np.asarray(found, np.float64)[:, rows], expected, atol=2e-2)


def test_no_array_of_all_queries_by_all_keys() -> None:
    seq = 2048
    given = [jax.ShapeDtypeStruct((1, seq, 4, 16), "float32")] * 3
    gradient = jax.grad(lambda *given: attend(*given).sum(), (0, 1, 2))
    memory = jax.jit(gradient).lower(*given).compile().memory_analysis()
    assert (
        memory is not None and memory.temp_size_in_bytes < 4 * seq * seq * 4
    )  # bytes of float32, for 4 heads


# seq, heads, kv_heads, head_dim, window, packed, dtype, tolerance
KERNEL = [
    (256, 4, 2, 128, None, False, "float32", 1e-5),
    (200, 4, 1, 32, 100, True, "float32", 1e-5),
    (256, 2, 2, 64, 17, False, "bfloat16", 2e-2),
]


@pytest.mark.parametrize(
    ("seq", "heads", "kv_heads", "head_dim", "window", "is_packed", "dtype", "tolerance"), KERNEL
)
def test_the_kernel_for_tpus(
    seq: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    is_packed: bool,
    dtype: str,
    tolerance: float,
) -> None:
    given = arrays(seq, heads, kv_heads, head_dim, dtype)
    segments = packed(seq) if is_packed else None
    mask = causal(seq, segments, window)
    found = splash(*given, segments, window=window, interpret=True)
    close(found, oracle(*given, mask), tolerance)
    if dtype == "float32":
        losses = [
            lambda *x: jnp.sin(splash(*x, segments, window=window, interpret=True)).sum(),
            lambda *x: jnp.sin(chunked(*x, mask)).sum(),
        ]
        gradients = (jax.jit(jax.grad(loss, (0, 1, 2)))(*given) for loss in losses)
        for one, other in zip(*gradients, strict=True):
            close(one, other, 2e-5)


@pytest.mark.parametrize(("window", "is_packed"), [(None, True), (150, False)])
def test_the_kernel_in_pieces(
    monkeypatch: pytest.MonkeyPatch, window: int | None, is_packed: bool
) -> None:
    """Of a long sequence, whose mask has more blocks than the kernel has room for."""
    monkeypatch.setattr(kernels, "_LONG", 256)
    monkeypatch.setattr(kernels, "_LONG_BLOCK", 128)
    monkeypatch.setattr(kernels, "_BLOCKS", (128,))
    monkeypatch.setattr(kernels, "_MOST_BLOCKS", 8)
    assert kernels._pieces(500) == (2, 12)  # 4 × 4 blocks
    given = arrays(500, 2, 1, 32, "float32")
    segments = packed(500) if is_packed else None
    mask = causal(500, segments, window)
    losses = [
        lambda *x: jnp.sin(splash(*x, segments, window=window, interpret=True)).sum(),
        lambda *x: jnp.sin(chunked(*x, mask)).sum(),
    ]
    found, wanted = (jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*given) for loss in losses)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(one, other, 2e-5)


def test_a_block_of_the_kernels_mask_costs_nothing() -> None:
    """The kernel asks for each block, of which a long sequence has a million: those that are equal
    are one array, and what is full or empty is not looked through."""
    mask = CausalMask(2**20)
    blocks = [
        mask[i : i + 1024, j : j + 1024] for i in (0, 2**15, 2**19) for j in (0, 2**15, 2**19)
    ]
    assert len({id(block) for block in blocks}) == 3
    assert sum(block.strides == (0, 0) for block in blocks) == 6
    for one in (blocks[1], blocks[3]):
        assert type(one).any is not np.ndarray.any and type(one).all is not np.ndarray.all


@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("first", [0, 5])
def test_each_block_of_the_kernels_mask(window: int | None, first: int) -> None:
    """Beside the mask as an array."""
    queries, keys = np.arange(first, 16)[:, None], np.arange(16)
    whole = (keys <= queries) & (queries - keys < (window or 16))
    mask = CausalMask(16, window, first)
    edges = [slice(i, i + 4) for i in range(0, 12, 2)]
    for rows, columns in itertools.product([e for e in edges if e.stop <= 16 - first], edges):
        np.testing.assert_array_equal(mask[rows, columns], whole[rows, columns])


# What computes it


def test_a_function_gets_the_arguments_of_jaxs_function() -> None:
    given, seen = arrays(6, 4, 2), []

    def own(query: Any, key: Any, value: Any, **options: Any) -> Any:
        seen.append(sorted(options))
        return jax.nn.dot_product_attention(query, key, value, **options)

    segments = packed(6)
    close(attend(*given, implementation=own), attend(*given, implementation="xla"), 1e-6)
    found = attend(*given, implementation=own, window=3, segments=segments)
    close(found, attend(*given, implementation="xla", window=3, segments=segments), 1e-6)
    assert seen == [["is_causal"], ["is_causal", "local_window_size", "mask"]]
    with raises(
        "the function passed as `attention=` returned float32[2, 6, 8], but must return a JAX array of shape (2, 6, 4, 8)"
    ):
        attend(*given, implementation=lambda q, k, v, **_: q[:, :, 0])


@pytest.mark.parametrize("name", ["splash", "cudnn"])
def test_a_kernel_of_another_platform_is_refused(name: Any) -> None:
    devices = {"splash": "TPUs", "cudnn": "NVIDIA GPUs"}[name]
    with raises(f"attention='{name}' is a kernel for {devices}, but this program is for cpu"):
        attend(*arrays(4, 2, 2), implementation=name)


def test_a_kernel_that_cannot_compute_something_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a TPU, of which the platform is all that is asked before the program is lowered."""
    monkeypatch.setattr(attending, "platform", lambda: "tpu")
    monkeypatch.setattr(kernels, "on_one_device", lambda: True)
    half = arrays(4, 2, 2, dtype="float16")
    with pytest.warns(
        ft.FunctreeWarning,
        match='"splash" does not support this call: it supports bfloat16 and float32',
    ):
        found = attend(*half)
    close(found, oracle(*half, causal(4)), 1e-2)
    with raises(
        'the kernel "splash" does not support this call: it supports bfloat16 and float32, but the queries have dtype float16'
    ):
        attend(*half, implementation="splash")
    monkeypatch.undo()
    monkeypatch.setattr(attending, "platform", lambda: "gpu")
    with pytest.warns(ft.FunctreeWarning, match='"cudnn" does not support this call'):
        attend(*arrays(4, 2, 2))


@pytest.mark.parametrize("name", ["chunked", "xla"])
def test_no_kernel_is_tried_beside_a_chosen_implementation(
    monkeypatch: pytest.MonkeyPatch, name: Any
) -> None:
    """The kernel would refuse this data type."""
    monkeypatch.setattr(attending, "platform", lambda: "tpu")
    monkeypatch.setattr(kernels, "on_one_device", lambda: True)
    half = arrays(4, 2, 2, dtype="float16")
    close(attend(*half, implementation=name), oracle(*half, causal(4)), 1e-2)


def test_several_devices_and_no_rules_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "platform", lambda: "tpu")
    with jax.set_mesh(ft.make_mesh(data=8)):
        with pytest.warns(
            ft.FunctreeWarning,
            match="the sharding of the batch and the heads must be known. Pass rules",
        ):
            jax.jit(attend).trace(*arrays(4, 2, 2))


# On a mesh

LAYOUTS = {
    # Mesh axes of heads, and of key and value heads; their numbers; the size of the mesh axis
    # `model`.
    "heads": ("model", "model", 8, 4, 4),
    "whole groups": ("model", None, 8, 4, 4),
    "parts of a group": ("model", None, 8, 2, 4),
    "parts of several groups": ("model", None, 12, 4, 6),
    "no heads": (None, None, 4, 2, 4),
}


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_shards(name: str, explicit: bool) -> None:
    over, kv_over, heads, kv_heads, size = LAYOUTS[name]
    data = 8 // size
    mesh = ft.make_mesh(
        data=data, model=size, devices=jax.devices()[: data * size], explicit=explicit
    )
    rules = ft.AxisRules({"batch": "data", "heads": over, "kv_heads": kv_over, ...: None})
    given, segments = arrays(20, heads, kv_heads), packed(20)

    def loss(query: Any, key: Any, value: Any, segments: Any) -> Any:
        mixed = attend(query, key, value, segments=segments, window=9)
        return jnp.sin(mixed).sum(), mixed

    step = jax.grad(loss, (0, 1, 2), has_aux=True)
    expected_gradients, expected = jax.jit(step)(*given, segments)
    names = ["batch seq heads head_dim", *["batch seq kv_heads head_dim"] * 2, "batch seq"]
    placed = [
        ft.shard(x, rules, mesh, axes=axes)
        for x, axes in zip([*given, segments], names, strict=True)
    ]
    gradients, mixed = ft.jit(step, rules=rules, mesh=mesh)(*placed)
    close(mixed, expected, 1e-6)
    assert mixed.sharding.is_equivalent_to(placed[0].sharding, 4)
    for one, other in zip(gradients, expected_gradients, strict=True):
        close(one, other, 1e-5)


def test_a_model_under_vmap_keeps_its_batch_sharded() -> None:
    """`jax.vmap` hides the batch from the rules; then it is left to the partitioner, which does not
    gather it."""
    mesh, rules = ft.make_mesh(data=8), ft.AxisRules({"batch": "data", ...: None})
    given = [
        jax.device_put(jnp.ones((8, 6, 2, 4)), jax.NamedSharding(mesh, ft.P("data")))
        for _ in range(3)
    ]
    fun = ft.jit(jax.vmap(attend), rules=rules, mesh=mesh)
    assert not fun.lower(*given).compile().ledger().collectives
