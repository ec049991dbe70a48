"""The experts of some tokens ─► the rows that each expert computes, and which token is in a row.

A token has `top_k` assignments, which are numbered token by token. A row holds one of them. Static
shapes mean that there are more rows than assignments: a row without one has the number behind the
last, `nothing`, which reads zeros and is added to no token.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.nn.weights import accumulator


class Sorted(NamedTuple):
    """Assignments, ordered by their expert; those of one keep the order of their tokens.

    Attributes:
        order: the assignments in this order.
        place: for each assignment its place in the order.
        sizes: how many assignments each expert has.
        starts: the place of the first assignment of each expert.
    """

    order: Int[Array, "assignments"]
    place: Int[Array, "assignments"]
    sizes: Int[Array, "experts"]
    starts: Int[Array, "experts"]

    @classmethod
    def of(cls, experts: Int[Array, "assignments"], number: int) -> "Sorted":
        """The assignments to `number` experts; an expert that is not among them comes last."""
        # By two sorts and comparisons: scatters are slow on TPUs, where a sort is not.
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.sum(experts[:, None] == jnp.arange(number)[None], axis=0, dtype=jnp.int32)
        return cls(order, jnp.argsort(order), sizes, jnp.cumsum(sizes) - sizes)

    def blocks(self, first: Int[Array, "blocks"], used: Int[Array, "blocks"], size: int) -> Array:
        """The assignments of consecutive places, in rows of blocks.

        Args:
            first: the first place of each block.
            used: how many places a block has.
            size: the number of its rows.

        Returns:
            The assignment in each row, of shape (blocks, size).
        """
        row = jnp.arange(size)[None]
        place = first[:, None] + row
        nothing = self.order.shape[0]
        found = self.order.at[place].get(mode="fill", fill_value=nothing)
        return jnp.where(row < used[:, None], found, nothing)

    def first(self, size: int) -> Int[Array, "rows"]:
        """The assignments to the experts, in so many rows; none in the rows behind them."""
        total = self.sizes.sum()
        return self.blocks(jnp.zeros_like(total)[None], total[None], size)[0]

    def slots(self, capacity: int) -> Int[Array, "experts capacity"]:
        """The assignments that are not dropped: the first `capacity` ones of each expert."""
        return self.blocks(self.starts, self.sizes, capacity)

    def dropped(self, capacity: int) -> Int[Array, ""]:
        """How many assignments have no room."""
        return jnp.sum(jnp.maximum(self.sizes - capacity, 0))


def spread(
    x: Float[Array, "tokens embed"], assignments: Int[Array, "*rows"], top_k: int
) -> Float[Array, "*rows embed"]:
    """The token of each row, and zeros in a row without one."""
    return x.at[assignments // top_k].get(mode="fill", fill_value=0)


def combine(
    rows: Float[Array, "*rows embed"],
    assignments: Int[Array, "*rows"],
    weights: Float[Array, "tokens top_k"],
) -> Float[Array, "tokens embed"]:
    """For each token the sum of its rows, times their weights, in float32 or wider.

    Args:
        rows: what the experts have computed.
        assignments: the assignment in each row.
        weights: the weights of the assignments.
    """
    tokens, top_k = weights.shape
    wide = accumulator(rows.dtype)
    weight = weights.reshape(-1).at[assignments].get(mode="fill", fill_value=0)
    weighted = rows.astype(wide) * weight[..., None].astype(wide)
    total = jnp.zeros_like(weighted, shape=(tokens, rows.shape[-1]))
    return total.at[assignments // top_k].add(weighted, mode="drop")


def group_of_row(sizes: Int[Array, "groups"], rows: int) -> Int[Array, "rows"]:
    """The group of each row, where groups of some sizes follow each other; behind the last one,
    their number.

    Examples:
        >>> from functree.nn.moe.assignment import group_of_row
        >>> group_of_row(jnp.array([2, 0, 1]), 5)
        Array([0, 0, 2, 3, 3], dtype=int32)
    """
    ends = jnp.cumsum(sizes)
    return jnp.sum(jnp.arange(rows)[:, None] >= ends[None], axis=1, dtype=jnp.int32)


def capacity_of(capacity: float, top_k: int, tokens: int, experts: int) -> int:
    """How many of some tokens an expert has room for: at least one, and at most all.

    Examples:
        >>> from functree.nn.moe.assignment import capacity_of
        >>> (
        ...     capacity_of(1.25, top_k=2, tokens=64, experts=8),
        ...     capacity_of(1.25, 1, 2, 8),
        ... )
        (20, 1)
    """
    # The product first, so that a factor such as 1.1 does not round up what is whole.
    wanted = round(capacity * top_k * tokens / experts, 6)
    return max(1, min(tokens, -int(-wanted // 1)))
