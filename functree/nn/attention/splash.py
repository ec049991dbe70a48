"""Attention by the kernel of JAX for TPUs, on one device."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from functree.nn.weights import accumulator

_TILE = 128
_BLOCKS = (512, 256, 128)
_DTYPES = ("bfloat16", "float32")


def why_not_splash(dtype: DTypeLike) -> str | None:
    """Why the kernel cannot compute with heads of a dtype; None if it can."""
    name = jnp.dtype(dtype).name
    return None if name in _DTYPES else f"it computes in {' or '.join(_DTYPES)}, and the heads are {name}"


def splash(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention in one sequence, of grouped heads.

    Sequences are padded to a multiple of 128, the size of its tiles.

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        segments: the segment of each token; None if all are in one.
        window: how many keys a query sees at most, its own among them; None for all.
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
    more = -seq % _TILE
    length = seq + more
    block = next(size for size in _BLOCKS if length % size == 0)
    shape = (length, length)
    mask = CausalMask(shape) if window is None else LocalMask(shape, (window - 1, 0), 0)
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
    scaled = (query.astype(accumulator(query.dtype)) / math.sqrt(head_dim)).astype(query.dtype)
    # A padded key is behind all tokens, so that no token sees it.
    arrays = [jnp.pad(x, [(0, 0), (0, more), (0, 0), (0, 0)]).transpose(0, 2, 1, 3) for x in (scaled, key, value)]
    if segments is None:
        mixed = jax.vmap(kernel)(*arrays)
    else:
        padded = jnp.pad(segments, [(0, 0), (0, more)], mode="edge")
        mixed = jax.vmap(kernel)(*arrays, SegmentIds(padded, padded))
    return mixed.transpose(0, 2, 1, 3)[:, :seq]
