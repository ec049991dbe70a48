"""Rows of tokens and the weights of experts ─► what each expert computes of its rows."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from functree.nn.moe.assignment import Sorted
from functree.nn.moe.ragged import product_of_groups
from functree.nn.weights import DotGeneral, product_of_each


class Experts(NamedTuple):
    """The weights of some experts, in the dtype of the computation.

    Attributes:
        gate: as in `ft.nn.MLP`, for each expert.
        up: likewise.
        down: likewise.
        dot_general: what multiplies by them, where each expert has equally many rows.
    """

    gate: Float[Array, "experts embed hidden"]
    up: Float[Array, "experts embed hidden"]
    down: Float[Array, "experts hidden embed"]
    dot_general: DotGeneral | None = None

    def of_slots(self, rows: Float[Array, "experts rows embed"]) -> Array:
        """The result of each row, where all experts have equally many."""
        return self._of_rows(rows, lambda x, w: product_of_each(x, w, self.dot_general))

    def of_groups(
        self, rows: Float[Array, "rows embed"], sizes: Int[Array, "experts"]
    ) -> Float[Array, "rows embed"]:
        """The result of each row, where the rows of the experts follow each other.

        Args:
            rows: the rows.
            sizes: how many of them each expert has. The result of those behind the last is 0.
        """
        # JAX says nothing of the rows behind the last group: they hold whatever was in memory,
        # which may be NaN, and 0 times NaN is NaN.
        is_used = (jnp.arange(rows.shape[0]) < sizes.sum())[:, None]

        def multiply(x: Array, weight: Array) -> Array:
            return jnp.where(is_used, product_of_groups(x, weight, sizes), 0)

        return self._of_rows(rows, multiply)

    def of_rows(self, rows: Float[Array, "rows embed"], experts: Int[Array, "rows"]) -> Array:
        """The result of each row, in any order.

        Args:
            rows: the rows.
            experts: the expert of each; that of a row that is not used is their number.
        """
        found = Sorted.of(experts, self.gate.shape[0])
        # A permutation in both directions, which is said, so that neither's transpose is a sum.
        ordered = rows.at[found.order].get(unique_indices=True, mode="promise_in_bounds")
        computed = self.of_groups(ordered, found.sizes)
        return computed.at[found.place].get(unique_indices=True, mode="promise_in_bounds")

    def _of_rows(self, rows: Array, multiply: Callable[[Array, Array], Array]) -> Array:
        # The names are for policies of `remat`: what is expensive to compute again.
        gated = checkpoint_name(multiply(rows, self.gate), "moe_gate")
        raised = checkpoint_name(multiply(rows, self.up), "moe_up")
        return multiply(jax.nn.silu(gated) * raised, self.down)
