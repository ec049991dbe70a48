"""`attend` computes causal attention with the best implementation for the platform."""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from functree.argument_checks import Takes, shown
from functree.devices.meshes import devices_along, mesh_axes, platform
from functree.errors import FunctreeValueError, warn
from functree.nn.activations import divided, on_one_device, on_shards, specs_of
from functree.nn.attention.chunked import CHUNK, chunked, unchunked
from functree.nn.attention.context import (
    WHOLE,
    Context,
    OfPart,
    Parts,
    by_gathering,
    by_heads,
    by_ring,
    parts_of,
)
from functree.nn.attention.kernels import KERNELS, OF_PLATFORM, TILE, Kernel
from functree.nn.attention.mask import Index, Inputs, Mask, in_order
from functree.nn.weights import as_int32

_Name = Literal["auto", "xla", "chunked", "splash", "cudnn"]
_NAMES = get_args(_Name)
Implementation = Annotated[
    _Name | Callable[..., Array],
    Takes(
        f"one of {', '.join(map(repr, _NAMES))}, or a function that takes the arguments of "
        "`jax.nn.dot_product_attention`",
        lambda value: callable(value) or (isinstance(value, str) and value in _NAMES),
    ),
]
"""The name of an implementation of attention, or a function that takes the arguments of
`jax.nn.dot_product_attention`."""

# For at most this many queries, attention holds the weights of all cached keys at once. A step of
# generation has one query; the first step, for a prompt, may have thousands.
_FEW = 16


def attend(
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq kv_heads head_dim"],
    *,
    implementation: Implementation = "auto",
    window: int | None = None,
    segments: Int[Array, "*batch seq"] | None = None,
    positions: Int[Array, "*#batch seq"] | None = None,
    context: Context = "auto",
) -> Float[Array, "*batch seq heads head_dim"]:
    """Compute causal attention between the tokens of a sequence.

    Args:
        query: the queries; head `h` uses key and value head `h // (heads / kv_heads)`.
        key: the keys.
        value: the values.
        implementation: the name of the implementation, or a function. `"splash"` is JAX's kernel
            for TPUs, and `"cudnn"` is cuDNN's kernel for GPUs. `"xla"` holds the attention weights
            of all queries and keys at once. `"chunked"` holds only the weights of one chunk of
            queries and one chunk of keys. `"auto"` uses the kernel of the platform that the program
            is lowered for, and `"chunked"` on platforms without one. If the kernel does not support
            the call, `"auto"` issues a `FunctreeWarning` and uses `"chunked"`.
        window: the maximum number of tokens that a token attends to, including itself; None for all
            earlier tokens.
        segments: the segment of each token, or None if there is only one segment. A token attends
            only to tokens in its own segment.
        positions: the position of each token; None if the tokens are in order.
        context: how the parts of a sequence attend to each other, if the sequence is sharded over
            mesh axes that shard no heads; see `ft.nn.Attention`.

    Raises:
        FunctreeError: if `implementation` names a kernel for a different platform.
        FunctreeError: if `implementation` names a kernel that does not support the call.
        FunctreeError: if `context="heads"` and the number of parts of the sequence does not divide
            the number of heads on a device.
        FunctreeError: if `implementation` is a function and positions are passed.
        FunctreeError: if `implementation` is a function whose result has the wrong shape.

    Examples:
        >>> from functree.nn.attention.attend import attend
        >>> x = jnp.arange(6.0).reshape(3, 1, 2)
        >>> attend(x, x, x)[0]  # the first token attends only to itself
        Array([[0., 1.]], dtype=float32)
    """
    if not isinstance(implementation, str):
        if positions is not None:
            raise FunctreeValueError(
                "in_order=False: a function passed as `attention=` receives no positions, so it "
                "cannot mask tokens that are not in order. Pass the name of an implementation, "
                'such as attention="chunked"'
            )
        return _by_function(implementation, query, key, value, window, segments)
    if positions is not None:
        positions = as_int32(positions)  # differences of unsigned integers would wrap
        if positions.ndim > 1:
            positions = jnp.broadcast_to(positions, query.shape[:-2])
    given = Inputs(query, key, value, segments, positions)
    parts = _parts(given, context)
    plain = _on_shards(_plain(parts, window, math.inf if implementation == "xla" else CHUNK))
    on = platform()
    kernel, asked = OF_PLATFORM.get(on), KERNELS.get(implementation)
    if asked is not None and asked != kernel:
        raise FunctreeValueError(
            f"attention={implementation!r} is a kernel for {asked.devices}, but this program is "
            f'for {on}. Pass attention="auto" to use an implementation for {on}'
        )
    # A ring computes in chunks on every platform. If `implementation` names a kernel, the call is
    # refused below.
    in_chunks = implementation in ("xla", "chunked") or (parts.how == "ring" and asked is None)
    if kernel is None or in_chunks:
        return plain(given)
    why = _why_not(kernel, given, parts, window)
    if why is None:
        by_kernel = _on_shards(_by_kernel(kernel, parts, window), check_vma=False)
        # A trace may be lowered for several platforms, or for a different one, as in `jax.export`.
        # Both implementations are therefore traced, and lowering chooses one.
        by_platform = {kernel.platform: by_kernel}
        return jax.lax.platform_dependent(given, default=plain, **by_platform)
    problem = f'attention: the kernel "{kernel.name}" does not support this call: {why.rstrip(".")}'
    if implementation != "auto":
        raise FunctreeValueError(f'{problem}. Pass attention="chunked" to run without the kernel')
    warn(
        f'{problem}. Attention runs in chunks instead. Pass attention="chunked" to avoid this '
        "warning"
    )
    return plain(given)


def _parts(given: Inputs, context: Context) -> Parts:
    """Return how the sequence is divided into parts inside attention."""
    if on_one_device():
        return WHOLE
    specs = specs_of(given.arrays, given.names)
    if specs is None:
        return WHOLE
    *_, seq, of_heads, _ = specs[0]
    axes = mesh_axes(divided(seq))
    heads = given.query.shape[-2] // devices_along(mesh_axes(of_heads))
    return parts_of(axes, devices_along(axes), context, heads)


def _plain(parts: Parts, window: int | None, chunk: float) -> Callable[[Inputs], Array]:
    """Build a function that computes attention for a part of a sequence, without a kernel."""

    def of_part(own: Inputs, whole: Inputs, first: Index) -> Array:
        queries, keys = own.positions, whole.positions
        if queries is None or keys is None:
            queries, keys = in_order(own.query.shape[1], first), in_order(whole.key.shape[1])
        mask = Mask(queries, keys, own.segments, whole.segments, window)
        return chunked(own.query, whole.key, whole.value, mask, chunk)

    if parts.how == "ring":
        return partial(by_ring, parts=parts, window=window, chunk=chunk)
    return _in_parts(parts, lambda given: of_part(given, given, 0), of_part)


def _by_kernel(kernel: Kernel, parts: Parts, window: int | None) -> Callable[[Inputs], Array]:
    """Build a function that computes attention for a part of a sequence, using a kernel."""

    def whole(given: Inputs) -> Array:
        return kernel.run(*given.arrays, window=window)

    of_part = None
    if kernel.of_part is not None:
        of_part = partial(kernel.of_part, parts=parts.number, window=window)
    return _in_parts(parts, whole, of_part)


def _in_parts(
    parts: Parts, whole: Callable[[Inputs], Array], of_part: OfPart | None
) -> Callable[[Inputs], Array]:
    """Build attention over divided sequences from functions for a whole sequence and for a part."""
    if parts.how == "heads":
        return partial(by_heads, parts=parts, whole=whole)
    if parts.how == "gather" and of_part is not None:
        return partial(by_gathering, parts=parts, of_part=of_part)
    return whole


def _why_not(kernel: Kernel, given: Inputs, parts: Parts, window: int | None) -> str | None:
    """Return why a kernel does not support a call, or None if it does."""
    if given.positions is not None:
        return "it masks by index, but with `in_order=False` the tokens are not in order"
    if parts.how == "ring":
        return 'with context="ring", attention runs in chunks'
    if parts.how == "gather":
        if kernel.of_part is None:
            return (
                'it needs queries and keys from the same tokens, but context="gather" adds keys '
                "from other parts of the sequence"
            )
        own = given.query.shape[1] // parts.number
        if own % TILE:
            return f"each part of the sequence has {own} tokens, which is not a multiple of {TILE}"
    return kernel.why_not(given.arrays, window)


def _on_shards(
    compute: Callable[[Inputs], Array], check_vma: bool = True
) -> Callable[[Inputs], Array]:
    """Extend `compute` to any number of batch dimensions, and run it on each device's shards."""

    def of_inputs(given: Inputs) -> Array:
        arrays, structure = jax.tree.flatten(given)

        def of_batches(*arrays: Array) -> Array:
            # (*batch, seq, heads, head_dim) ─► (batch, seq, heads, head_dim), segments ─► (batch,
            # seq). On a shard, this reshape moves no data. On whole arrays, it may need a gather.
            flat = [x.reshape(-1, *x.shape[-3:]) for x in arrays[:3]]
            flat += [x.reshape(-1, x.shape[-1]) for x in arrays[3:]]
            return compute(structure.unflatten(flat)).reshape(arrays[0].shape)

        return on_shards(of_batches, arrays, given.names, check_vma)

    return of_inputs


def _by_function(
    function: Callable[..., Array],
    query: Float[Array, "*batch seq heads head_dim"],
    key: Float[Array, "*batch seq kv_heads head_dim"],
    value: Float[Array, "*batch seq kv_heads head_dim"],
    window: int | None,
    segments: Int[Array, "*batch seq"] | None,
) -> Float[Array, "*batch seq heads head_dim"]:
    """Call a user's function with the necessary arguments of `jax.nn.dot_product_attention`."""
    # Other arguments are omitted, not passed as None: the function may lack parameters for them.
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
        raise FunctreeValueError(
            f"the function passed as `attention=` returned {shown(mixed)}, but must return a JAX "
            f"array of shape {query.shape}"
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
    """Compute causal attention of tokens to each other and to earlier tokens in a cache.

    Args:
        query: the queries of the tokens.
        key: the keys of the tokens.
        value: the values of the tokens.
        cached_key: the keys of earlier tokens.
        cached_value: the values of earlier tokens.
        filled: the number of earlier tokens in each row. The cache holds the most recent of these
            tokens, each in the slot whose index is the token's position modulo the number of slots.
        window: the maximum number of tokens that a token attends to, including itself; None for all
            earlier tokens.
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
            # The cache and the new tokens are separate parts: joining them would copy the whole
            # cache for each token.
            parts = [(cached_key, cached_value), (key, value)]
            return unchunked(query, parts, mask)
        # With more queries, the copy is cheap compared with the attention.
        keys = jnp.concatenate([cached_key, key], 1)
        values = jnp.concatenate([cached_value, value], 1)
        return chunked(query, keys, values, mask)

    arrays = query, key, value, cached_key, cached_value, filled
    # Neither the slots of a cache nor the new tokens are sharded along the sequence.
    of_kv = "batch _ kv_heads _"
    return on_shards(of_shard, arrays, ["batch _ heads _", *[of_kv] * 4, "batch"])


def next_positions(filled: Int[Array, "batch"], seq: int) -> Int[Array, "batch seq"]:
    """Return the positions of the next tokens in rows that already have `filled` tokens."""
    return as_int32(filled)[:, None] + jnp.arange(seq, dtype=jnp.int32)[None]


def cached_positions(filled: Int[Array, "batch"], slots: int) -> Int[Array, "batch slots"]:
    """Return the position of each cache slot's token, or a negative number for an empty slot.

    Examples:
        >>> from functree.nn.attention.attend import cached_positions
        >>> cached_positions(jnp.array([2, 5]), 4)
        Array([[ 0,  1, -2, -1],
               [ 4,  1,  2,  3]], dtype=int32)
    """
    # A slot holds the latest token whose position is congruent to the slot's index modulo `slots`.
    last = as_int32(filled)[:, None] - 1
    return last - (last - jnp.arange(slots, dtype=jnp.int32)[None]) % slots
