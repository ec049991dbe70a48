"""`rope` rotates queries or keys according to their positions (RoPE)."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from functree.argument_checks import POSITIVE, SIZE, Takes, check
from functree.devices.meshes import Entry
from functree.errors import FunctreeValueError
from functree.nn.activations import entries_of, explicit_mesh
from functree.nn.weights import accumulator

Scaling = Annotated[
    Callable[[Float[Array, "pairs"]], Float[Array, "pairs"]],
    Takes(
        "a hashable function of the frequencies, such as `ft.nn.Llama3Rope(...)`",
        lambda value: callable(value) and isinstance(value, Hashable),
    ),
]
"""A hashable function that changes the frequencies, in radians per position."""


@dataclass(frozen=True)
class Llama3Rope:
    """The frequency scaling of Llama 3.1 and later, which supports longer sequences.

    The frequencies of long waves are divided by `factor`. The frequencies of short waves are
    unchanged, and the frequencies in between are interpolated (Grattafiori et al., "The Llama 3
    herd of models", 2024). A published `config.json` selects this scaling with
    `"rope_type": "llama3"`. A call maps frequencies in radians per position, an array of shape
    `(head_dim / 2,)`, to new frequencies.

    Args:
        factor: the divisor of the frequencies of long waves.
        low: a wave is long if its period is above `original / low` positions.
        high: a wave is short if its period is below `original / high` positions.
        original: the sequence length in the original training.

    Raises:
        FunctreeError: if a value is not positive.
        FunctreeError: if `high` is not greater than `low`.

    Examples:
        >>> scaling = ft.nn.Llama3Rope(factor=8, low=1, high=4, original=8192)
        >>> attention = ft.nn.Attention(
        ...     8, 4, rope_scaling=scaling, key=jax.random.key(0)
        ... )
        >>> attention.rope_scaling.factor
        8.0
    """

    factor: float
    low: float
    high: float
    original: int

    def __post_init__(self) -> None:
        numbers = {name: (getattr(self, name), POSITIVE) for name in ("factor", "low", "high")}
        check("Llama3Rope: invalid arguments", **numbers, original=(self.original, SIZE))
        if self.high <= self.low:
            raise FunctreeValueError(
                f"Llama3Rope(low={self.low}, high={self.high}): `high` must be greater than `low`"
            )
        # NumPy scalars cannot be serialized as JSON.
        for name in numbers:
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "original", int(self.original))

    def __call__(self, frequencies: Float[Array, "pairs"]) -> Float[Array, "pairs"]:
        """Return the scaled frequencies."""
        # `waves` is the number of periods in a sequence of the original length. If it is below 1,
        # training never covered a whole period, so the angles are scaled back into the range that
        # training covered.
        waves = self.original * frequencies / (2 * math.pi)
        kept = jnp.clip((waves - self.low) / (self.high - self.low), 0, 1)
        return kept * frequencies + (1 - kept) * frequencies / self.factor


def rope(
    x: Float[Array, "*batch seq heads head_dim"],
    *,
    theta: float = 10_000.0,
    positions: Int[Array, "*#batch seq"] | None = None,
    scaling: Scaling | None = None,
) -> Float[Array, "*batch seq heads head_dim"]:
    """Rotate dimensions `i` and `i + head_dim / 2` by `position · theta^(-2i / head_dim)` radians.

    The dot product of a query and a key then depends only on the difference between their
    positions, not on each position (Su et al., "RoFormer", 2021). The dimensions are paired as in
    Hugging Face's Llama weights; Meta's weights pair neighboring dimensions. The result is computed
    in float32 or wider, and has the dtype of `x`.

    Args:
        x: queries or keys; `head_dim` must be even.
        theta: the base of the frequencies; the default is the value in RoFormer and Llama 2.
        positions: the position of each token in its sequence; by default 0, 1, 2, …
        scaling: a function that changes the frequencies, such as `Llama3Rope`.

    Examples:
        >>> from functree.nn.rope import rope
        >>> rope(jnp.ones((2, 1, 4)))[0, 0]  # position 0 is not rotated
        Array([1., 1., 1., 1.], dtype=float32)
    """
    seq, _, head_dim = x.shape[-3:]
    # bfloat16 cannot represent odd integers above 256, so neighboring positions would be equal.
    dtype = accumulator(x.dtype)
    if positions is None:
        positions = jnp.arange(seq, dtype=dtype)
    else:
        positions = _sharded_as(positions, x).astype(dtype)
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    if scaling is not None:
        frequencies = scaling(frequencies)
    # (*#batch, seq) and (pairs,) ─► (*#batch, seq, pairs)
    angles = positions[..., None] * frequencies[(None,) * positions.ndim]
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    # The tables are broadcast over the heads only here, after `cos` and `sin`. Broadcasting earlier
    # makes the compiled program longer.
    tables = jnp.cos(angles), jnp.sin(angles)
    cos, sin = (jnp.broadcast_to(table[..., None, :], first.shape) for table in tables)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def _sharded_as(
    positions: Int[Array, "*#batch seq"], x: Float[Array, "*batch seq heads head_dim"]
) -> Int[Array, "*#batch seq"]:
    """Shard positions like the tokens of `x` on Explicit axes.

    Mesh axes that shard the sequence between layers may shard heads here.
    """
    mesh = explicit_mesh(x)
    if mesh is None:
        return positions
    entries: list[Entry] = []
    of_tokens = entries_of(x)[: x.ndim - 2][-positions.ndim :]
    for size, entry in zip(positions.shape, of_tokens, strict=True):
        entries.append(None if size == 1 else entry)
    return jax.sharding.reshard(positions, NamedSharding(mesh, PartitionSpec(*entries)))
