"""Each platform's kernel computes attention on one device, or reports why it cannot."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from functree.nn.activations import on_one_device, specs_of
from functree.nn.attention.mask import AXES, Inputs, padded
from functree.nn.weights import accumulator, as_int32

TILE = 128
"""The TPU kernel requires the number of tokens to be a multiple of this value."""

_BLOCKS = (512, 256, 128)
# Above this many tokens, blocks are larger. Building the kernel reads all blocks of the mask, and
# their number is quadratic in the length. With blocks of 512, this takes minutes for 1,048,576
# tokens.
_LONG, _LONG_BLOCK = 2**18, 1024
# The kernel keeps three bytes for each block of its mask in a core's scalar memory, which has room
# for this many blocks. The queries of longer sequences are processed in pieces.
_MOST_BLOCKS = 2**18
_DTYPES = ("bfloat16", "float32")


class Kernel(NamedTuple):
    """An attention kernel for one platform.

    Attributes:
        name: the kernel's name in `attention=`.
        devices: the devices that the kernel runs on, for messages.
        platform: the name of the platform for `jax.lax.platform_dependent`.
        run: computes attention from queries, keys, values, optional segments, and `window=`.
        why_not: returns why the kernel does not support given arrays and a window, or None if it
            does.
        of_part: computes attention of the queries in one part of the sequence to all keys; None if
            the kernel cannot do this.
    """

    name: str
    devices: str
    platform: str
    run: Callable[..., Array]
    why_not: Callable[[Sequence[Array], int | None], str | None]
    of_part: Callable[..., Array] | None = None


# A mask for the TPU kernel, with blocks that are cheap to compute

_Ids = TypeVar("_Ids", np.ndarray, Array)


@dataclass(frozen=True)
class CausalMask:
    """A causal mask with an optional window, in the form that the kernel for TPUs reads.

    It has the interface of the kernel's own `CausalMask` and `LocalMask`. To find out whether a
    block is empty or full, those classes compute the block as an array. This takes minutes for
    131,072 tokens. This class computes only blocks that are neither empty nor full, and computes
    each distinct block once.

    Attributes:
        length: the number of keys.
        window: the maximum number of keys that a query attends to, including its own; None for all.
        first: the index of the first query; the other queries follow it.

    Examples:
        >>> from functree.nn.attention.kernels import CausalMask
        >>> CausalMask(4, window=2)[0:4, 0:4].astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]])
    """

    length: int
    window: int | None = None
    first: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """The number of queries and the number of keys."""
        return self.length - self.first, self.length

    @property
    def q_sequence(self) -> Int[np.ndarray, "queries"]:
        """The index of each query."""
        return np.arange(self.first, self.length, dtype=np.int32)

    def mask_function(self, queries: _Ids, keys: _Ids) -> _Ids:
        """Compute which keys the queries attend to, from the indices of the queries and keys.

        The kernel traces this method.
        """
        visible = queries >= keys
        if self.window is not None:
            visible &= queries - keys < self.window
        return visible

    def __getitem__(self, block: tuple[slice, slice]) -> Bool[np.ndarray, "queries keys"]:
        """Return a block of the mask."""
        queries, keys = range(self.first, self.length)[block[0]], range(self.length)[block[1]]
        reaches = self.length if self.window is None else self.window
        shape = len(queries), len(keys)
        if keys[0] > queries[-1] or queries[0] - keys[-1] >= reaches:
            return _uniform(shape, False)
        if keys[-1] <= queries[0] and queries[-1] - keys[0] < reaches:
            return _uniform(shape, True)
        return _partial(shape, queries[0] - keys[0], self.window)


class _Uniform(np.ndarray):
    """An array of equal flags with fast `any` and `all`, which the kernel calls for each block."""

    def any(self, *args: Any, **kwargs: Any) -> Any:
        return self.flat[0]

    def all(self, *args: Any, **kwargs: Any) -> Any:
        return self.flat[0]


@functools.cache
def _uniform(shape: tuple[int, int], value: bool) -> Bool[np.ndarray, "queries keys"]:
    return np.broadcast_to(np.asarray(value), shape).view(_Uniform)


@functools.lru_cache(maxsize=16)
def _partial(
    shape: tuple[int, int], ahead: int, window: int | None
) -> Bool[np.ndarray, "queries keys"]:
    """Return a block whose first query is `ahead` tokens after its first key."""
    queries, keys = (np.arange(size, dtype=np.int32) for size in shape)
    mask = CausalMask(max(shape), window)
    return mask.mask_function(queries[:, None] + ahead, keys[None])


# The kernel for TPUs


def splash(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute causal self-attention with grouped heads, using JAX's kernel for TPUs.

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        segments: the segment of each token; None if there is only one segment.
        window: the maximum number of keys that a query attends to, including its own; None for all.
        interpret: whether to run the kernel in JAX's interpreter, for tests. The interpreter is
            slow, but works on any device.
    """
    seq, heads = query.shape[1:3]
    pieces, more = _pieces(seq)
    # A padded key comes after all tokens, so no token attends to it.
    query, key, value = (padded(x, more, 1) for x in (_scaled(query), key, value))
    ids = None if segments is None else padded(as_int32(segments), more, 1)
    size = (seq + more) // pieces
    mixed: list[Array] = []
    for first in range(0, seq + more, size):
        # Each piece of the queries reads the keys up to the piece's own end.
        last = first + size
        kernel = _splash_kernel(heads, CausalMask(last, window, first), 1, interpret)
        own = query[:, first:last], key[:, :last], value[:, :last]
        own_ids = None if ids is None else (ids[:, first:last], ids[:, :last])
        mixed.append(_by_splash(kernel, own, own_ids))
    return jnp.concatenate(mixed, 1)[:, :seq]


def _pieces(seq: int) -> tuple[int, int]:
    """Return the number of pieces to divide the queries into, and the number of padding tokens."""
    if seq <= _LONG:
        return 1, -seq % TILE
    blocks = -(-seq // _LONG_BLOCK)
    pieces = -(-(blocks**2) // _MOST_BLOCKS)
    return pieces, -seq % (pieces * _LONG_BLOCK)


def _scaled(query: Float[Array, "..."]) -> Float[Array, "..."]:
    """Divide queries by the square root of `head_dim`, since the kernel does not.

    The quotient is computed in the wide dtype. The result is cast back, since the kernel needs
    queries and keys of the same dtype.
    """
    scale = math.sqrt(query.shape[-1])
    return (query.astype(accumulator(query.dtype)) / scale).astype(query.dtype)


def splash_of_part(
    own: Inputs,
    whole: Inputs,
    first: Int[Array, ""],
    *,
    parts: int,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute attention of one part's queries to all keys of the sequence; see `splash`.

    Args:
        own: the part; the number of its queries is a multiple of `TILE`.
        whole: the queries of the part, and all keys and values.
        first: the index of the first query in the sequence.
        parts: the number of parts.
        window: as in `splash`.
        interpret: as in `splash`.
    """
    seq, heads = own.query.shape[1:3]
    kernel = _splash_kernel(heads, CausalMask(whole.key.shape[1], window), parts, interpret)
    # The kernel for all parts keeps its information about the mask in arrays. Each device slices
    # its own part of these arrays, as a shard_map would with the specs that the kernel provides.
    mesh = AbstractMesh((parts,), ("parts",))
    specs = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, "parts")))

    def of_device(x: Array, spec: PartitionSpec) -> Array:
        if "parts" not in spec:
            return x
        axis = tuple(spec).index("parts")
        size = x.shape[axis] // parts
        return jax.lax.dynamic_slice_in_dim(x, first // seq * size, size, axis)

    ids = None
    if own.segments is not None and whole.segments is not None:
        ids = as_int32(own.segments), as_int32(whole.segments)
    arrays = _scaled(own.query), whole.key, whole.value
    return _by_splash(jax.tree.map(of_device, kernel, specs), arrays, ids)


def _splash_kernel(heads: int, mask: CausalMask, parts: int, interpret: bool) -> Any:
    """Build the kernel for a mask, with the queries divided into `parts` parts."""
    # Imported here, since the import is slow and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        MultiHeadMask,
        make_splash_mha,
    )

    # The block size must divide the number of queries in a part, which divides the number of keys.
    # The largest such size is used.
    sizes = _BLOCKS if mask.length <= _LONG else (_LONG_BLOCK, *_BLOCKS)
    queries = (mask.length - mask.first) // parts
    block = next(size for size in sizes if queries % size == 0)
    # The number of keys whose weights are held at one time.
    compute = min(block, _BLOCKS[0])
    own = _mask_class()(mask.length, mask.window, mask.first)
    return make_splash_mha(
        mask=MultiHeadMask([own] * heads),
        block_sizes=BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=compute,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=compute,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=parts,
        interpret=interpret,
    )


@functools.cache
def _mask_class() -> Any:
    """Return a subclass of `CausalMask` that the kernel accepts as a mask.

    The class is created once: the kernel's cache compares masks, and masks of different classes are
    unequal.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import Mask

    class SplashMask(CausalMask, Mask):
        pass

    return SplashMask


def _by_splash(
    kernel: Any, arrays: Sequence[Array], segments: tuple[Array, Array] | None
) -> Float[Array, "batch seq heads head_dim"]:
    """Run the kernel under `vmap` over the batch, with the heads as the first dimension."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    arrays = [x.transpose(0, 2, 1, 3) for x in arrays]
    if segments is None:
        mixed = jax.vmap(kernel)(*arrays)
    else:
        mixed = jax.vmap(kernel)(*arrays, SegmentIds(*segments))
    return mixed.transpose(0, 2, 1, 3)


def _why_not_splash(arrays: Sequence[Array], window: int | None) -> str | None:
    if not on_one_device() and specs_of(arrays, AXES[: len(arrays)]) is None:
        return (
            "on several devices, the sharding of the batch and the heads must be known. Pass "
            "rules (`ft.jit(rules=...)`) under a mesh, and use one batch dimension instead of "
            "`jax.vmap`"
        )
    dtype = arrays[0].dtype.name
    if dtype not in _DTYPES:
        return f"it supports {' and '.join(_DTYPES)}, but the queries have dtype {dtype}"
    return None


# The kernel for GPUs


def cudnn(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    *,
    window: int | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute causal self-attention with grouped heads, using cuDNN's kernel for GPUs.

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        window: the maximum number of keys that a query attends to, including its own; None for all.
    """
    size = None if window is None else (window - 1, 0)
    # JAX's own code adds arrays of different dtypes, which is an error under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, local_window_size=size, implementation="cudnn"
        )


def _why_not_cudnn(arrays: Sequence[Array], window: int | None) -> str | None:
    if len(arrays) > 3:
        # A dense mask would be the large array that kernels avoid.
        return "it supports segments only with a dense mask over all queries and keys"
    # JAX checks whether the installed cuDNN supports the dtypes, shapes and devices. If not, it
    # raises an error when the kernel is traced.
    try:
        jax.eval_shape(lambda *arrays: cudnn(*arrays, window=window), *arrays)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        # JAX raises these errors for unsupported arguments. Any other error would be a bug here.
        return str(error).partition("\n")[0] or type(error).__name__
    return None


_SPLASH = Kernel("splash", "TPUs", "tpu", splash, _why_not_splash, splash_of_part)
_CUDNN = Kernel("cudnn", "NVIDIA GPUs", "cuda", cudnn, _why_not_cudnn)

KERNELS = {"splash": _SPLASH, "cudnn": _CUDNN}
"""The kernels by name."""

# JAX names the platform of GPUs "gpu" or "cuda".
OF_PLATFORM = {"tpu": _SPLASH, "gpu": _CUDNN, "cuda": _CUDNN}
"""The kernels by platform."""
