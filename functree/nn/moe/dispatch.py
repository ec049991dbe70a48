"""These functions apply experts on several devices to a device's tokens, and sum the results.

They all run inside a shard_map over the mesh axes of the tokens and of the experts, or on one
device, without mesh axes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from functree.devices.varying import equally_varying
from functree.nn.moe.experts import Experts, Sorted, group_of_row
from functree.nn.weights import accumulator

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
