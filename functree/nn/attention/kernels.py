"""Arrays on one device ─► attention by the kernel of its platform, or why it cannot compute it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.nn.activations import HEADS, KV_HEADS, on_one_device, specs_of
from functree.nn.weights import accumulator, as_int32

AXES = (HEADS, KV_HEADS, KV_HEADS, "batch _")
"""The axes of queries, keys, values and segments, as `on_shards` takes them."""

_TILE = 128
_BLOCKS = (512, 256, 128)
_DTYPES = ("bfloat16", "float32")


class Kernel(NamedTuple):
    """A kernel of a platform.

    Attributes:
        name: what it is called in `attention=`.
        devices: the devices that it is for, in messages.
        platform: what `jax.lax.platform_dependent` calls their platform.
        run: computes it, of queries, keys, values and perhaps segments, and `window=`.
        why_not: why it cannot compute these arrays with this window; None if it can.
    """

    name: str
    devices: str
    platform: str
    run: Callable[..., Array]
    why_not: Callable[[Sequence[Array], int | None], str | None]


def splash(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention in one sequence, of grouped heads, by JAX's kernel for TPUs.

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        segments: the segment of each token; None if all are in one.
        window: how many keys a query attends to at most, its own among them; None for all.
        interpret: whether JAX interprets the kernel, on any device and slowly, for tests.
    """
    # Imported here: it takes half a second, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        CausalMask,
        LocalMask,
        MultiHeadMask,
        SegmentIds,
        make_splash_mha_single_device,
    )

    seq, heads, head_dim = query.shape[1:]
    # The kernel takes whole tiles only, and a block that divides the sequence: the largest is best.
    more = -seq % _TILE
    length = seq + more
    block = next(size for size in _BLOCKS if length % size == 0)
    mask = CausalMask((length, length))
    if window is not None:
        mask = LocalMask((length, length), (window - 1, 0), 0)
    kernel: Any = make_splash_mha_single_device(
        mask=MultiHeadMask([mask] * heads),
        block_sizes=BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        interpret=interpret,
    )
    # The kernel does not divide by the root of the size of a head. Divided in the wide dtype, and
    # cast back, since it multiplies queries and keys of one dtype.
    scaled = (query.astype(accumulator(query.dtype)) / math.sqrt(head_dim)).astype(query.dtype)
    # A padded key is after all tokens, so that no token attends to it. The kernel takes heads
    # first, and no batch: hence `vmap`.
    arrays = [_padded_heads_first(x, more) for x in (scaled, key, value)]
    if segments is None:
        mixed = jax.vmap(kernel)(*arrays)
    else:
        padded = jnp.pad(as_int32(segments), [(0, 0), (0, more)], mode="edge")
        mixed = jax.vmap(kernel)(*arrays, SegmentIds(padded, padded))
    return mixed.transpose(0, 2, 1, 3)[:, :seq]


def _padded_heads_first(
    x: Float[Array, "batch seq heads head_dim"], more: int
) -> Float[Array, "batch heads length head_dim"]:
    return jnp.pad(x, [(0, 0), (0, more), (0, 0), (0, 0)]).transpose(0, 2, 1, 3)


def _why_not_splash(arrays: Sequence[Array], window: int | None) -> str | None:
    if not on_one_device() and specs_of(arrays, AXES[: len(arrays)]) is None:
        return (
            "on several devices it has to know how batches and heads are sharded: give rules "
            "(`ft.jit(rules=...)`), a mesh, and arrays with one batch dimension instead of "
            "`jax.vmap`"
        )
    dtype = arrays[0].dtype.name
    if dtype not in _DTYPES:
        return f"it computes in {' or '.join(_DTYPES)}, and the heads are {dtype}"
    return None


def cudnn(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    *,
    window: int | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention in one sequence, of grouped heads, by cuDNN's kernel for NVIDIA's GPUs.

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        window: how many keys a query attends to at most, its own among them; None for all.
    """
    size = None if window is None else (window - 1, 0)
    # JAX's own code adds arrays of two dtypes, which is an error under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, local_window_size=size, implementation="cudnn"
        )


def _why_not_cudnn(arrays: Sequence[Array], window: int | None) -> str | None:
    if len(arrays) > 3:
        # As a mask that would be the large array that a kernel is there to avoid.
        return "it takes packed segments as an array of all queries by all keys only"
    # Only JAX knows which dtypes, shapes and devices the installed cuDNN takes, and it says so when
    # the kernel is traced.
    try:
        jax.eval_shape(lambda *arrays: cudnn(*arrays, window=window), *arrays)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        # These are what JAX raises for it. Another error would be a mistake of ours.
        return str(error).partition("\n")[0] or type(error).__name__
    return None


_SPLASH = Kernel("splash", "TPUs", "tpu", splash, _why_not_splash)
_CUDNN = Kernel("cudnn", "NVIDIA's GPUs", "cuda", cudnn, _why_not_cudnn)

KERNELS = {"splash": _SPLASH, "cudnn": _CUDNN}
"""The kernels by name."""

# GPUs call themselves by either name.
OF_PLATFORM = {"tpu": _SPLASH, "gpu": _CUDNN, "cuda": _CUDNN}
"""The kernels by platform."""
