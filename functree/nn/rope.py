"""Queries or keys ─► the same, rotated by their positions (RoPE), so that attention depends on relative positions."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.nn.weights import accumulator


def rope(
    x: Float[Array, "*batch seq heads head_dim"],
    *,
    theta: float = 10_000.0,
    positions: Int[Array, "seq"] | None = None,
) -> Float[Array, "*batch seq heads head_dim"]:
    """Rotate each pair of dimensions `i` and `i + head_dim / 2` by `position · theta^(-2i / head_dim)` radians.

    The pairs are those of the Llama weights of Hugging Face. (In Meta's weights neighbouring dimensions are pairs.) It
    is computed in float32 or wider, and returned in the dtype of `x`.

    Args:
        x: queries or keys; `head_dim` is even.
        theta: the base of the frequencies.
        positions: the position of each token in its sequence; by default 0, 1, 2, …

    Examples:
        >>> from functree.nn.rope import rope
        >>> rope(jnp.ones((2, 1, 4)))[0, 0]  # position 0 is not rotated
        Array([1., 1., 1., 1.], dtype=float32)
    """
    seq, _, head_dim = x.shape[-3:]
    dtype = accumulator(x.dtype)
    positions = jnp.arange(seq, dtype=dtype) if positions is None else positions.astype(dtype)
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    angles = jnp.outer(positions, frequencies)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    # The tables are broadcast over the heads only here, after `cos` and `sin`: earlier, the compiled program is longer.
    cos, sin = (jnp.broadcast_to(table[:, None, :], first.shape) for table in (jnp.cos(angles), jnp.sin(angles)))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
