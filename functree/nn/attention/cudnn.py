"""Attention by the kernel of cuDNN for GPUs, as JAX offers it."""

import jax
from jaxtyping import Array, Float


def cudnn(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    *,
    window: int | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal attention in one sequence, of grouped heads.

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        window: how many keys a query sees at most, its own among them; None for all.
    """
    size = None if window is None else (window - 1, 0)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own code adds arrays of two dtypes
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, local_window_size=size, implementation="cudnn"
        )


def why_not_cudnn(query: Array, key: Array, value: Array, window: int | None) -> str | None:
    """Why JAX does not take the kernel for these arrays on this machine; None if it does.

    Only JAX knows which dtypes, shapes and devices the installed cuDNN takes, and says so when it traces.
    """
    try:
        jax.eval_shape(lambda *arrays: cudnn(*arrays, window=window), query, key, value)
    except (RuntimeError, NotImplementedError, ValueError) as error:  # which the caller tells
        return str(error).partition("\n")[0] or type(error).__name__
    return None
