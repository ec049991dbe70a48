"""These functions apply experts on several devices to a device's tokens, and sum the results.

They all run inside a shard_map over the mesh axes of the tokens and of the experts, or on one
device, without mesh axes. Rows of tokens are sorted by expert, and each expert computes its own
rows.

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
from functree.nn.weights import DotGeneral, accumulator

# Rows by expert


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
        >>> from functree.nn.moe.dispatch import group_of_row
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
        >>> from functree.nn.moe.dispatch import product_of_groups
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


# Devices

_Axes = tuple[str, ...]


class Tokens(NamedTuple):
    """Some tokens, and the router's decisions about them.

    Attributes:
        x: the tokens.
        experts: the experts of each token.
        weights: the factor for the result of each of these experts.
    """

    x: Float[Array, "tokens embed"]
    experts: Int[Array, "tokens top_k"]
    weights: Float[Array, "tokens top_k"]

    @property
    def top_k(self) -> int:
        """The number of experts of a token."""
        return self.experts.shape[1]

    def sorted(self, number: int) -> Sorted:
        """Sort all assignments to `number` experts by expert."""
        return Sorted.of(self.experts.reshape(-1), number)

    def within(self, capacity: int, number: int) -> tuple["Tokens", Int[Array, ""]]:
        """Drop assignments to experts without room for them, and return the number of these.

        A dropped assignment gets the number after the last expert.

        Args:
            capacity: the number of tokens that an expert has room for.
            number: the number of experts.
        """
        assignments = self.sorted(number)
        rank = assignments.place.reshape(self.experts.shape) - assignments.starts[self.experts]
        has_room = rank < capacity
        kept = self._replace(experts=jnp.where(has_room, self.experts, number))
        return kept, jnp.sum(~has_room, dtype=jnp.int32)

    def spread(self, assignments: Int[Array, "*rows"]) -> Float[Array, "*rows embed"]:
        """Return the token of each row, and zeros for a row without an assignment."""
        return self.x.at[assignments // self.top_k].get(mode="fill", fill_value=0)

    def combine(
        self, rows: Float[Array, "*rows embed"], assignments: Int[Array, "*rows"]
    ) -> Float[Array, "tokens embed"]:
        """Sum each token's rows, multiplied by their weights, in float32 or wider.

        Args:
            rows: the results of the experts.
            assignments: the assignment in each row.
        """
        wide = accumulator(rows.dtype)
        weight = self.weights.reshape(-1).at[assignments].get(mode="fill", fill_value=0)
        weighted = rows.astype(wide) * weight[..., None].astype(wide)
        total = jnp.zeros_like(weighted, shape=(self.x.shape[0], rows.shape[-1]))
        return total.at[assignments // self.top_k].add(weighted, mode="drop")

    def rows_at(self, experts: int) -> int:
        """Return the maximum number of rows that these tokens can have at `experts` experts."""
        return self.x.shape[0] * min(self.top_k, experts)


def on_own_experts(
    tokens: Tokens, experts: Experts, capacity: int | None, axes: _Axes
) -> Float[Array, "tokens embed"]:
    """Compute this device's partial result for tokens that are replicated along `axes`.

    Args:
        tokens: the tokens.
        experts: the experts of this device.
        capacity: the maximum number of these tokens that an expert has; None if it is unknown.
        axes: the mesh axes of the experts.
    """
    own = experts.gate.shape[0]
    first = jax.lax.axis_index(axes) * own if axes else 0
    local = tokens.experts - first
    is_own = (local >= 0) & (local < own)
    assignments = tokens._replace(experts=jnp.where(is_own, local, own)).sorted(own)
    if capacity is None:
        rows = assignments.first(tokens.rows_at(own))
        return tokens.combine(experts.of_groups(tokens.spread(rows), assignments.sizes), rows)
    slots = assignments.slots(capacity)
    return tokens.combine(experts.of_slots(tokens.spread(slots)), slots)


def by_exchange(
    tokens: Tokens, experts: Experts, capacity: int | None, axes: _Axes
) -> Float[Array, "tokens embed"]:
    """Compute the result by exchanging rows, using all-to-alls of equal-sized parts.

    Each row is sent to the device of its expert and back. Arguments are as in `on_own_experts`,
    but only this device has the tokens.
    """
    own = experts.gate.shape[0]
    assignments = tokens.sorted(own * _size(axes))
    if capacity is not None:
        slots = assignments.slots(capacity)
        # (all experts, slots, embed) ─► (own experts, slots of all devices, embed), and back.
        rows = jax.lax.all_to_all(tokens.spread(slots), axes, 0, 1, tiled=True)
        computed = jax.lax.all_to_all(experts.of_slots(rows), axes, 1, 0, tiled=True)
        return tokens.combine(computed, slots)
    # Shapes are static, so each device receives the maximum number of rows that these tokens could
    # have there.
    sizes = assignments.sizes.reshape(-1, own)
    starts = assignments.starts[::own]
    blocks = assignments.blocks(starts, sizes.sum(1), tokens.rows_at(own))
    rows = jax.lax.all_to_all(tokens.spread(blocks), axes, 0, 0, tiled=True)
    sizes = jax.lax.all_to_all(sizes, axes, 0, 0, tiled=True)
    groups = jax.vmap(lambda group_sizes: group_of_row(group_sizes, rows.shape[1]))(sizes)
    computed = experts.of_rows(rows.reshape(-1, rows.shape[-1]), groups.reshape(-1))
    computed = jax.lax.all_to_all(computed.reshape(rows.shape), axes, 0, 0, tiled=True)
    return tokens.combine(computed, blocks)


def by_ragged_exchange(
    tokens: Tokens, experts: Experts, capacity: int | None, axes: _Axes
) -> Float[Array, "tokens embed"]:
    """Exchange rows as `by_exchange` does, using the TPU's all-to-alls for parts of unequal sizes.

    Unused rows are not sent, but take up memory.
    """
    own, parts = experts.gate.shape[0], _size(axes)
    size = tokens.rows_at(own)
    if capacity is not None:
        size = min(size, own * capacity)
    assignments = tokens.sorted(own * parts)
    order = assignments.first(tokens.experts.size)
    sizes = assignments.sizes.reshape(parts, own)
    theirs = jax.lax.all_to_all(sizes, axes, 0, 0, tiled=True)
    sent, received = sizes.sum(1), theirs.sum(1)
    starts, their_starts = _starts(sent), _starts(received)
    # These are the offsets of this device's rows on each device, and of the returned rows here.
    there = jax.lax.all_to_all(their_starts, axes, 0, 0, tiled=True)
    back = jax.lax.all_to_all(starts, axes, 0, 0, tiled=True)
    given = tokens.spread(order)
    room = jnp.zeros_like(given, shape=(parts * size, given.shape[1]))
    rows = ragged_all_to_all(given, room, starts, sent, there, received, axes=axes)
    # There is one group for each pair of a device and an expert of this device. Rows after the last
    # group are unused.
    groups = group_of_row(theirs.reshape(-1), parts * size)
    computed = experts.of_rows(rows, jnp.where(groups < own * parts, groups % own, own))
    returned = ragged_all_to_all(
        computed, jnp.zeros_like(given), their_starts, received, back, sent, axes=axes
    )
    return tokens.combine(returned, order)


def ragged_all_to_all(*operands: Array, axes: _Axes) -> Array:
    """Call `jax.lax.ragged_all_to_all` with operands made to vary along the same mesh axes."""
    return jax.lax.ragged_all_to_all(*equally_varying(*operands), axis_name=axes)


def _starts(sizes: Int[Array, "parts"]) -> Int[Array, "parts"]:
    return jnp.cumsum(sizes) - sizes


def _size(axes: _Axes) -> int:
    """Return the number of devices along mesh axes of the surrounding shard_map."""
    return jax.lax.axis_size(axes) if axes else 1


def capacity_of(capacity: float, top_k: int, tokens: int, experts: int) -> int:
    """Return the number of tokens that an expert has room for: at least one, at most `tokens`.

    Examples:
        >>> from functree.nn.moe.dispatch import capacity_of
        >>> (
        ...     capacity_of(1.25, top_k=2, tokens=64, experts=8),
        ...     capacity_of(1.25, 1, 2, 8),
        ... )
        (20, 1)
    """
    # `round` comes first, so that an inexact product, such as 1.1 * 10, is not rounded up to 12.
    wanted = round(capacity * top_k * tokens / experts, 6)
    return max(1, min(tokens, -int(-wanted // 1)))
