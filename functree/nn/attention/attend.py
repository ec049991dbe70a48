"""Queries, keys and values of a sequence ─► their mix, by what computes it best where the program will run."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from functree.errors import FunctreeError, warn
from functree.nn.attention.chunked import CHUNK, Places, chunked
from functree.nn.attention.cudnn import cudnn, why_not_cudnn
from functree.nn.attention.splash import splash, why_not_splash
from functree.nn.shards import HEADS, KV_HEADS, on_one_device, on_shards, specs_of
from functree.parameters import Takes

NAMES = ("auto", "xla", "chunked", "splash", "cudnn")
Implementation = Literal["auto", "xla", "chunked", "splash", "cudnn"] | Callable[..., Array]
"""What computes attention, by its name; or a function of the arguments of `jax.nn.dot_product_attention`."""

IMPLEMENTATION = Takes(
    f"one of {', '.join(map(repr, NAMES))}, or a function of the arguments of `jax.nn.dot_product_attention`",
    lambda value: callable(value) or value in NAMES,
)


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
        implementation: what computes it. `"splash"` is the kernel of JAX for TPUs, `"cudnn"` that for GPUs, `"chunked"`
            never holds the weights of all queries and keys, `"xla"` does. `"auto"` is the kernel of the platform that
            the program is lowered for, and `"chunked"` elsewhere, or with a `FunctreeWarning` where a condition of the
            kernel does not hold.
        window: how many tokens a token sees at most, itself among them; None for all before it.
        segments: the segment of each token; a token sees only those of its own. None if all are in one.

    Raises:
        FunctreeError: a kernel that is asked for by its name is not for this platform, or cannot compute this.

    Examples:
        >>> from functree.nn.attention.attend import attend
        >>> x = jnp.arange(6.0).reshape(3, 1, 2)
        >>> attend(x, x, x)[0]  # the first token sees only itself
        Array([[0., 1.]], dtype=float32)
    """
    if not isinstance(implementation, str):
        return _by_function(implementation, query, key, value, window, segments)
    arrays = [query, key, value] if segments is None else [query, key, value, segments]
    plain = _on_shards(partial(_chunked, window=window, chunk=math.inf if implementation == "xla" else CHUNK))
    kernel = _KERNELS.get(_platform())
    if implementation in _PLATFORMS and (kernel is None or kernel.name != implementation):
        raise FunctreeError(
            f"attention={implementation!r} is a kernel for {_PLATFORMS[implementation]}, and this program is for "
            f'{_platform()}: "auto" takes it wherever it can'
        )
    if kernel is None or implementation in ("xla", "chunked"):
        return plain(*arrays)
    why = kernel.why_not(arrays, window)
    if why is None:
        # What is traced here may be lowered for several platforms, or another one: `jax.export`.
        return jax.lax.platform_dependent(
            *arrays, default=plain, **{kernel.platform: _on_shards(partial(kernel.run, window=window), check_vma=False)}
        )
    problem = f'attention: the kernel "{kernel.name}" cannot compute this: {why.rstrip(".")}'
    if implementation != "auto":
        raise FunctreeError(problem)
    warn(f'{problem}. It is computed in chunks instead; attention="chunked" says that this is meant')
    return plain(*arrays)


def _by_function(
    function: Callable[..., Array],
    query: Array,
    key: Array,
    value: Array,
    window: int | None,
    segments: Array | None,
) -> Array:
    """The result of a user's function, which is given those arguments of JAX's function that are needed."""
    options: dict[str, Any] = {"is_causal": True}
    if window is not None:
        options["local_window_size"] = (window - 1, 0)
    if segments is not None:
        options["mask"] = (segments[..., :, None] == segments[..., None, :])[..., None, :, :]
    mixed = function(query, key, value, **options)
    if not isinstance(mixed, jax.Array) or mixed.shape != query.shape:
        shape = getattr(mixed, "shape", type(mixed).__name__)
        raise FunctreeError(f"the function that is given as `attention=` returns {shape}, and not {query.shape}")
    return mixed


def _on_shards(fun: Callable[..., Array], check_vma: bool = True) -> Callable[..., Array]:
    """A function of arrays with one batch dimension ─► of any number of them, computed on the shards of each device."""

    def of_batch(*arrays: Array) -> Array:
        inner = [3, 3, 3, 1]  # the dimensions of queries, keys, values and segments without batches
        flat = [x.reshape(-1, *x.shape[x.ndim - n :]) for x, n in zip(arrays, inner, strict=False)]
        return fun(*flat).reshape(arrays[0].shape)

    return lambda *arrays: on_shards(of_batch, arrays, _NAMES[: len(arrays)], check_vma)


_NAMES = (HEADS, KV_HEADS, KV_HEADS, "batch _")


def _platform() -> str:
    """The platform of the current mesh, or else the default one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _chunked(
    query: Array, key: Array, value: Array, segments: Array | None = None, *, window: int | None, chunk: float
) -> Array:
    return chunked(query, key, value, Places(query_segment=segments, key_segment=segments), window, chunk)


class _Kernel(NamedTuple):
    """A kernel of a platform.

    Attributes:
        name: what it is called in `attention=`.
        platform: what `jax.lax.platform_dependent` calls its platform.
        run: computes it, of arrays with one batch dimension, and `window=`.
        why_not: why it cannot compute something; None if it can.
    """

    name: str
    platform: str
    run: Callable[..., Array]
    why_not: Callable[[list[Array], int | None], str | None]


def _why_not_splash(arrays: list[Array], window: int | None) -> str | None:
    if not on_one_device() and specs_of(arrays, _NAMES[: len(arrays)]) is None:
        return (
            "on several devices it has to know how batches and heads are sharded: give rules (`ft.jit(rules=...)`), a "
            "mesh, and arrays with one batch dimension instead of `jax.vmap`"
        )
    return why_not_splash(arrays[0].dtype)


def _why_not_cudnn(arrays: list[Array], window: int | None) -> str | None:
    if len(arrays) > 3:
        return "it takes packed segments as an array of all queries by all keys only"
    return why_not_cudnn(arrays[0], arrays[1], arrays[2], window)


_TPU = _Kernel("splash", "tpu", splash, _why_not_splash)
_GPU = _Kernel("cudnn", "cuda", cudnn, _why_not_cudnn)
_KERNELS = {"tpu": _TPU, "gpu": _GPU, "cuda": _GPU}  # GPUs call themselves by either name
_PLATFORMS = {"splash": "TPUs", "cudnn": "NVIDIA's GPUs"}
