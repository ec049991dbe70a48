"""Queries, keys and values ─► causal attention, by what computes it best where the program runs."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from functree.argument_checks import Takes
from functree.errors import FunctreeValueError, warn
from functree.nn.activations import HEADS, KV_HEADS, on_shards
from functree.nn.attention.chunked import CHUNK, Mask, chunked, unchunked
from functree.nn.attention.kernels import AXES, KERNELS, OF_PLATFORM
from functree.nn.weights import as_int32

NAMES = ("auto", "xla", "chunked", "splash", "cudnn")
Implementation = Literal["auto", "xla", "chunked", "splash", "cudnn"] | Callable[..., Array]
"""What computes attention, by its name; or a function of the arguments of
`jax.nn.dot_product_attention`."""

IMPLEMENTATION = Takes(
    f"one of {', '.join(map(repr, NAMES))}, or a function of the arguments of "
    "`jax.nn.dot_product_attention`",
    lambda value: callable(value) or isinstance(value, str),
    lambda value: callable(value) or value in NAMES,
)

# Up to so many queries at a time are computed with an array of their weights of all cached keys.
# A step of generation has one; the first step of a prompt may have thousands.
_FEW = 16


def attend(
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq kv_heads head_dim"],
    *,
    implementation: Implementation = "auto",
    window: int | None = None,
    segments: Int[Array, "*batch seq"] | None = None,
) -> Float[Array, "*batch seq heads head_dim"]:
    """Causal attention of the tokens of a sequence to each other.

    Args:
        query: the queries; head `h` uses key and value head `h // (heads / kv_heads)`.
        key: the keys.
        value: the values.
        implementation: what computes it. `"splash"` is the kernel of JAX for TPUs, `"cudnn"` that
            for GPUs, `"chunked"` never holds the weights of all queries and keys, `"xla"` does.
            `"auto"` is the kernel of the platform that the program is lowered for, and `"chunked"`
            elsewhere, or with a `FunctreeWarning` where a condition of the kernel does not hold.
        window: how many tokens a token attends to at most, itself among them; None for all before
            it.
        segments: the segment of each token; a token attends only to those of its own. None if all
            are in one.

    Raises:
        FunctreeError: a kernel that is asked for by its name is not for this platform, or cannot
            compute this.

    Examples:
        >>> from functree.nn.attention.attend import attend
        >>> x = jnp.arange(6.0).reshape(3, 1, 2)
        >>> attend(x, x, x)[0]  # the first token attends only to itself
        Array([[0., 1.]], dtype=float32)
    """
    if not isinstance(implementation, str):
        return _by_function(implementation, query, key, value, window, segments)
    arrays = [query, key, value]
    if segments is not None:
        arrays.append(segments)
    chunk = math.inf if implementation == "xla" else CHUNK
    plain = _on_shards(partial(_causal, window=window, chunk=chunk))
    platform = _platform()
    kernel, asked = OF_PLATFORM.get(platform), KERNELS.get(implementation)
    if asked is not None and asked != kernel:
        raise FunctreeValueError(
            f"attention={implementation!r} is a kernel for {asked.devices}, and this program is "
            f'for {platform}: "auto" takes it wherever it can'
        )
    if kernel is None or implementation in ("xla", "chunked"):
        return plain(*arrays)
    why = kernel.why_not(arrays, window)
    if why is None:
        by_kernel = _on_shards(partial(kernel.run, window=window), check_vma=False)
        # What is traced here may be lowered for several platforms, or another one: `jax.export`.
        # So both are traced, and the one that is lowered is chosen then.
        return jax.lax.platform_dependent(*arrays, default=plain, **{kernel.platform: by_kernel})
    problem = f'attention: the kernel "{kernel.name}" cannot compute this: {why.rstrip(".")}'
    if implementation != "auto":
        raise FunctreeValueError(problem)
    warn(
        f'{problem}. It is computed in chunks instead; attention="chunked" says that this is meant'
    )
    return plain(*arrays)


def _platform() -> str:
    """The platform of the current mesh, or else the default one."""
    # Of the mesh first: the program may be compiled for devices that are not there. Its abstract
    # device is a part of the key of every trace, so a trace is not taken for another platform.
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _on_shards(fun: Callable[..., Array], check_vma: bool = True) -> Callable[..., Array]:
    """A function of arrays with one batch dimension ─► of any number of them, on each shard."""

    def of_batches(*arrays: Array) -> Array:
        # (*batch, seq, heads, head_dim) ─► (batch, seq, heads, head_dim), segments ─► (batch, seq).
        # On the shards, where it moves nothing: to join sharded dimensions may need a gather.
        flat = [x.reshape(-1, *x.shape[-3:]) for x in arrays[:3]]
        flat += [x.reshape(-1, x.shape[-1]) for x in arrays[3:]]
        return fun(*flat).reshape(arrays[0].shape)

    return lambda *arrays: on_shards(of_batches, arrays, AXES[: len(arrays)], check_vma)


def _causal(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None = None,
    *,
    window: int | None,
    chunk: float,
) -> Float[Array, "batch seq heads head_dim"]:
    mask = Mask(query_segments=segments, key_segments=segments, window=window)
    return chunked(query, key, value, mask, chunk)


def _by_function(
    function: Callable[..., Array],
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq kv_heads head_dim"],
    window: int | None,
    segments: Int[Array, "*batch seq"] | None,
) -> Float[Array, "*batch seq heads head_dim"]:
    """The result of a user's function, given the arguments of JAX's function that are needed."""
    # Others are left out, and not given as None: the function need not have parameters for them.
    options: dict[str, bool | tuple[int, int] | Bool[Array, "*batch 1 seq seq"]] = {
        "is_causal": True
    }
    if window is not None:
        options["local_window_size"] = (window - 1, 0)  # without the token itself
    if segments is not None:
        same = segments[..., :, None] == segments[..., None, :]
        options["mask"] = same[..., None, :, :]  # the same for all heads
    mixed = function(query, key, value, **options)
    if not isinstance(mixed, jax.Array) or mixed.shape != query.shape:
        shape = getattr(mixed, "shape", type(mixed).__name__)
        raise FunctreeValueError(
            f"the function that is given as `attention=` returns {shape}, and not {query.shape}"
        )
    return mixed


# With a cache


def attend_cached(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    cached_key: Float[Array, "batch slots kv_heads head_dim"],
    cached_value: Float[Array, "batch slots kv_heads head_dim"],
    filled: Int[Array, "batch"],
    *,
    window: int | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention of tokens to those before them, in a cache, and to each other.

    Args:
        query: the queries of the tokens.
        key: their keys.
        value: their values.
        cached_key: the keys of the tokens before them.
        cached_value: the values of these.
        filled: how many tokens each row had before; the last of them are in the cache, at their
            positions modulo its length.
        window: how many tokens a token attends to at most, itself among them; None for all before
            it.
    """

    def of_shard(
        query: Array,
        key: Array,
        value: Array,
        cached_key: Array,
        cached_value: Array,
        filled: Array,
    ) -> Array:
        new = next_positions(filled, query.shape[1])
        cached = cached_positions(filled, cached_key.shape[1])
        mask = Mask(new, jnp.concatenate([cached, new], 1), window=window)
        if query.shape[1] <= _FEW:
            # In two parts: joined in one array, the whole cache would be copied for each token.
            parts = [(cached_key, cached_value), (key, value)]
            return unchunked(query, parts, mask, attends_to_some=True)
        # With more queries the copy is small beside what they compute.
        keys = jnp.concatenate([cached_key, key], 1)
        values = jnp.concatenate([cached_value, value], 1)
        return chunked(query, keys, values, mask)

    arrays = query, key, value, cached_key, cached_value, filled
    return on_shards(of_shard, arrays, [HEADS, *[KV_HEADS] * 4, "batch"])


def next_positions(filled: Int[Array, "batch"], seq: int) -> Int[Array, "batch seq"]:
    """The positions of the next tokens of rows that had so many."""
    return as_int32(filled)[:, None] + jnp.arange(seq, dtype=jnp.int32)[None]


def cached_positions(filled: Int[Array, "batch"], slots: int) -> Int[Array, "batch slots"]:
    """The position of the token in each slot of a cache; negative for an empty slot.

    Examples:
        >>> from functree.nn.attention.attend import cached_positions
        >>> cached_positions(jnp.array([2, 5]), 4)
        Array([[ 0,  1, -2, -1],
               [ 4,  1,  2,  3]], dtype=int32)
    """
    # Of all positions that are the slot modulo `slots`, the largest one up to the last token.
    last = as_int32(filled)[:, None] - 1
    return last - (last - jnp.arange(slots, dtype=jnp.int32)[None]) % slots
