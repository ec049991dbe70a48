"""Arrays on one device ─► attention by the kernel of its platform, or why it cannot compute it."""

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
from functree.nn.attention.mask import AXES, Inputs
from functree.nn.weights import accumulator, as_int32

TILE = 128
"""The kernel for TPUs takes multiples of so many tokens."""

_BLOCKS = (512, 256, 128)
# Above so many tokens blocks are larger. All of a mask are looked at while the kernel is made, and
# the time of that grows with the square of the length: of 1,048,576 tokens, minutes for blocks of
# 512.
_LONG, _LONG_BLOCK = 2**18, 1024
# What a kernel knows about the blocks of its mask, it keeps in the scalar memory of a core. So many
# blocks fit, with the three bytes of each; of longer sequences the queries are computed in pieces.
_MOST_BLOCKS = 2**18
_DTYPES = ("bfloat16", "float32")


class Kernel(NamedTuple):
    """A kernel of a platform.

    Attributes:
        name: what it is called in `attention=`.
        devices: the devices that it is for, in messages.
        platform: what `jax.lax.platform_dependent` calls their platform.
        run: computes it, of queries, keys, values and perhaps segments, and `window=`.
        why_not: why it cannot compute these arrays with this window; None if it can.
        of_part: computes it of the queries of one part of the sequence and all keys; None if it
            cannot.
    """

    name: str
    devices: str
    platform: str
    run: Callable[..., Array]
    why_not: Callable[[Sequence[Array], int | None], str | None]
    of_part: Callable[..., Array] | None = None


# The mask of the kernel for TPUs, whose blocks cost next to nothing

_Ids = TypeVar("_Ids", np.ndarray, Array)


@dataclass(frozen=True)
class CausalMask:
    """Which keys each query attends to: those that are not after it, in its window.

    It has what the kernel's own `CausalMask` and `LocalMask` have. These compute each block of the
    mask as an array, for the kernel to see which blocks are empty or full: of 131,072 tokens that
    takes minutes. Here only blocks that are neither are computed, each that differs once, and what
    the kernel asks of the others costs nothing.

    Attributes:
        length: the number of keys.
        window: how many keys a query attends to at most, its own among them; None for all.
        first: the index of the first query; the others are all that follow it.

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
        """The numbers of queries and keys."""
        return self.length - self.first, self.length

    @property
    def q_sequence(self) -> Int[np.ndarray, "queries"]:
        """The index of each query."""
        return np.arange(self.first, self.length, dtype=np.int32)

    def mask_function(self, queries: _Ids, keys: _Ids) -> _Ids:
        """Which keys queries attend to, by the indices of both; the kernel traces it."""
        visible = queries >= keys
        if self.window is not None:
            visible &= queries - keys < self.window
        return visible

    def __getitem__(self, block: tuple[slice, slice]) -> Bool[np.ndarray, "queries keys"]:
        """A block of the mask."""
        queries, keys = range(self.first, self.length)[block[0]], range(self.length)[block[1]]
        reaches = self.length if self.window is None else self.window
        shape = len(queries), len(keys)
        if keys[0] > queries[-1] or queries[0] - keys[-1] >= reaches:
            return _uniform(shape, False)
        if keys[-1] <= queries[0] and queries[-1] - keys[0] < reaches:
            return _uniform(shape, True)
        return _partial(shape, queries[0] - keys[0], self.window)


class _Uniform(np.ndarray):
    """An array of flags that are all the same, of which the kernel asks whether any or all are
    set, once for each block."""

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
    """A block whose first query is so many tokens after its first key."""
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
    """Causal attention in one sequence, of grouped heads, by JAX's kernel for TPUs.

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        segments: the segment of each token; None if all are in one.
        window: how many keys a query attends to at most, its own among them; None for all.
        interpret: whether JAX interprets the kernel, on any device and slowly, for tests.
    """
    seq, heads = query.shape[1:3]
    pieces, more = _pieces(seq)
    # A padded key is after all tokens, so that no token attends to it.
    query, key, value = (_padded(x, more) for x in (_scaled(query), key, value))
    ids = None if segments is None else _padded(as_int32(segments), more, mode="edge")
    size = (seq + more) // pieces
    mixed: list[Array] = []
    for first in range(0, seq + more, size):
        # Each piece of the queries reads the keys up to its own end.
        last = first + size
        kernel = _splash_kernel(heads, CausalMask(last, window, first), 1, interpret)
        own = query[:, first:last], key[:, :last], value[:, :last]
        own_ids = None if ids is None else (ids[:, first:last], ids[:, :last])
        mixed.append(_by_splash(kernel, own, own_ids))
    return jnp.concatenate(mixed, 1)[:, :seq]


def _pieces(seq: int) -> tuple[int, int]:
    """In how many pieces the queries of a sequence are computed, and how many are padded."""
    if seq <= _LONG:
        return 1, -seq % TILE
    blocks = -(-seq // _LONG_BLOCK)
    pieces = -(-(blocks**2) // _MOST_BLOCKS)
    return pieces, -seq % (pieces * _LONG_BLOCK)


def _scaled(query: Float[Array, "..."]) -> Float[Array, "..."]:
    """The kernel does not divide by the root of the size of a head.

    Divided in the wide dtype, and cast back, since it multiplies queries and keys of one dtype.
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
    """As `splash`, of the queries of one of several parts of a sequence, and all of its keys.

    Args:
        own: the part; its queries are a multiple of `TILE`.
        whole: the queries of the part, and all keys and values.
        first: the index of the first query in the sequence.
        parts: the number of parts.
        window: as in `splash`.
        interpret: as in `splash`.
    """
    seq, heads = own.query.shape[1:3]
    kernel = _splash_kernel(heads, CausalMask(whole.key.shape[1], window), parts, interpret)
    # The kernel of all parts has what it knows about the mask in arrays, of which each device takes
    # its own: the same that a shard_map does with the specs that the kernel has for it.
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
    """The kernel for queries and keys with this mask; the queries are in so many parts."""
    # Imported here: it takes half a second, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        MultiHeadMask,
        make_splash_mha,
    )

    # A block has to divide the queries of a part, and all keys: the largest is best.
    sizes = _BLOCKS if mask.length <= _LONG else (_LONG_BLOCK, *_BLOCKS)
    queries = (mask.length - mask.first) // parts
    block = next(size for size in sizes if queries % size == 0)
    # Weights of so many keys are held at one time.
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
    """`CausalMask` as a class of the kernel's masks; one class, since the kernel remembers what it
    has read of equal masks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import Mask

    class SplashMask(CausalMask, Mask):
        pass

    return SplashMask


def _by_splash(
    kernel: Any, arrays: Sequence[Array], segments: tuple[Array, Array] | None
) -> Float[Array, "batch seq heads head_dim"]:
    """The result of the kernel, which takes heads first, and no batch: hence `vmap`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    arrays = [x.transpose(0, 2, 1, 3) for x in arrays]
    if segments is None:
        mixed = jax.vmap(kernel)(*arrays)
    else:
        mixed = jax.vmap(kernel)(*arrays, SegmentIds(*segments))
    return mixed.transpose(0, 2, 1, 3)


def _padded(x: Array, more: int, mode: str = "constant") -> Array:
    """An array of tokens with so many more behind them."""
    return jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)], mode=mode)


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


# The kernel for GPUs


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


_SPLASH = Kernel("splash", "TPUs", "tpu", splash, _why_not_splash, splash_of_part)
_CUDNN = Kernel("cudnn", "NVIDIA's GPUs", "cuda", cudnn, _why_not_cudnn)

KERNELS = {"splash": _SPLASH, "cudnn": _CUDNN}
"""The kernels by name."""

# GPUs call themselves by either name.
OF_PLATFORM = {"tpu": _SPLASH, "gpu": _CUDNN, "cuda": _CUDNN}
"""The kernels by platform."""
