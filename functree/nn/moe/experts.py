"""Rows of tokens are sorted by expert, and each expert computes its own rows.

A token has `top_k` assignments, which are numbered token by token. A row holds at most one
assignment. Because shapes are static, there may be more rows than assignments. A row without an
assignment holds the number after the last assignment, which the code calls `nothing`. Its input is
zero, and its result is added to no token.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from functree.devices.varying import equally_varying
from functree.nn.weights import DotGeneral


class Sorted(NamedTuple):
    """Assignments sorted by expert, and within each expert by token.

    Attributes:
        order: the assignments in sorted order.
        place: the place of each assignment in this order.
        sizes: the number of assignments of each expert.
        starts: the place of each expert's first assignment.
    """

    order: Int[Array, "assignments"]
    place: Int[Array, "assignments"]
    sizes: Int[Array, "experts"]
    starts: Int[Array, "experts"]

    @classmethod
    def of(cls, experts: Int[Array, "assignments"], number: int) -> "Sorted":
        """Sort the assignments to `number` experts; assignments to other experts come last."""
        # Computed with two sorts and comparisons: on TPUs, scatters are slow and sorts are not.
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.sum(experts[:, None] == jnp.arange(number)[None], axis=0, dtype=jnp.int32)
        return cls(order, jnp.argsort(order), sizes, jnp.cumsum(sizes) - sizes)

    def blocks(self, first: Int[Array, "blocks"], used: Int[Array, "blocks"], size: int) -> Array:
        """Arrange assignments in blocks of rows, each with consecutive places of the sorted order.

        Args:
            first: the first place of each block.
            used: the number of places that each block uses.
            size: the number of rows in a block.

        Returns:
            The assignment in each row, of shape (blocks, size).
        """
        row = jnp.arange(size)[None]
        place = first[:, None] + row
        nothing = self.order.shape[0]
        assignments = self.order.at[place].get(mode="fill", fill_value=nothing)
        return jnp.where(row < used[:, None], assignments, nothing)

    def first(self, size: int) -> Int[Array, "rows"]:
        """Return `size` rows with all assignments to the experts; the rows after them are empty."""
        total = self.sizes.sum()
        return self.blocks(jnp.zeros_like(total)[None], total[None], size)[0]

    def slots(self, capacity: int) -> Int[Array, "experts capacity"]:
        """Return each expert's assignments, of which there are at most `capacity`."""
        return self.blocks(self.starts, self.sizes, capacity)


def group_of_row(sizes: Int[Array, "groups"], rows: int) -> Int[Array, "rows"]:
    """Return the group of each row, for consecutive groups of the given sizes.

    For a row after the last group, return the number of groups.

    Examples:
        >>> from functree.nn.moe.experts import group_of_row
        >>> group_of_row(jnp.array([2, 0, 1]), 5)
        Array([0, 0, 2, 3, 3], dtype=int32)
    """
    ends = jnp.cumsum(sizes)
    return jnp.sum(jnp.arange(rows)[:, None] >= ends[None], axis=1, dtype=jnp.int32)


class Experts(NamedTuple):
    """The weights of some experts, in the dtype of the computation.

    Attributes:
        gate: as in `ft.nn.MLP`, for each expert.
        up: as in `ft.nn.MLP`, for each expert.
        down: as in `ft.nn.MLP`, for each expert.
        dot_general: the function that multiplies by the weights, if all experts have the same
            number of rows.
    """

    gate: Float[Array, "experts embed hidden"]
    up: Float[Array, "experts embed hidden"]
    down: Float[Array, "experts hidden embed"]
    dot_general: DotGeneral | None = None

    def of_slots(self, rows: Float[Array, "experts rows embed"]) -> Array:
        """Compute the result of each row, if all experts have the same number of rows."""
        multiply = jax.lax.dot_general if self.dot_general is None else self.dot_general
        dims = ((2,), (1,)), ((0,), (0,))
        return self._of_rows(rows, lambda x, weight: multiply(x, weight, dims).astype(x.dtype))

    def of_groups(
        self, rows: Float[Array, "rows embed"], sizes: Int[Array, "experts"]
    ) -> Float[Array, "rows embed"]:
        """Compute the result of each row, if the rows are grouped by expert, in the experts' order.

        Args:
            rows: the rows.
            sizes: the number of rows of each expert. Rows after the last group give 0.
        """
        # JAX does not define the results in rows after the last group. They may be NaN, and 0 times
        # NaN is NaN.
        is_used = (jnp.arange(rows.shape[0]) < sizes.sum())[:, None]

        def multiply(x: Array, weight: Array) -> Array:
            return jnp.where(is_used, product_of_groups(x, weight, sizes), 0)

        return self._of_rows(rows, multiply)

    def of_rows(self, rows: Float[Array, "rows embed"], experts: Int[Array, "rows"]) -> Array:
        """Compute the result of each row, for rows in any order.

        Args:
            rows: the rows.
            experts: the expert of each row; for an unused row, the number of experts.
        """
        assignments = Sorted.of(experts, self.gate.shape[0])
        # Both indices are permutations. Marking them as unique tells the compiler that the scatters
        # in the transposes do not collide.
        ordered = rows.at[assignments.order].get(unique_indices=True, mode="promise_in_bounds")
        computed = self.of_groups(ordered, assignments.sizes)
        return computed.at[assignments.place].get(unique_indices=True, mode="promise_in_bounds")

    def _of_rows(self, rows: Array, multiply: Callable[[Array, Array], Array]) -> Array:
        # Named for checkpoint policies: these products are expensive to recompute.
        gated = checkpoint_name(multiply(rows, self.gate), "moe_gate")
        raised = checkpoint_name(multiply(rows, self.up), "moe_up")
        return multiply(jax.nn.silu(gated) * raised, self.down)


def product_of_groups(
    x: Float[Array, "rows size"],
    weights: Float[Array, "groups size out"],
    sizes: Int[Array, "groups"],
) -> Float[Array, "rows out"]:
    """Multiply each row by the matrix of its group; rows after the last group are undefined.

    Args:
        x: the rows, group by group.
        weights: the matrices.
        sizes: the number of rows in each group.

    Examples:
        >>> from functree.nn.moe.experts import product_of_groups
        >>> x, weights = (
        ...     jnp.ones((3, 2)),
        ...     jnp.array([[[1.0], [1.0]], [[2.0], [2.0]]]),
        ... )
        >>> product_of_groups(x, weights, jnp.array([1, 2]))[:, 0]
        Array([2., 4., 4.], dtype=float32)
    """
    # In a shard_map, the gradient of replicated weights is a sum over devices. The transpose of the
    # cast in `equally_varying` computes this sum.
    x, weights, sizes = equally_varying(x, weights, sizes)
    return jax.lax.ragged_dot(x, weights, sizes)
