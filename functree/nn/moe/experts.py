"""Rows of tokens and the weights of experts ─► what each expert computes of its rows.

A token has `top_k` assignments, which are numbered token by token. A row holds one of them. Static
shapes mean that there are more rows than assignments: a row without one has the number behind the
last, `nothing`, which reads zeros and is added to no token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from functree.devices.varying import equally_varying
from functree.nn.weights import DotGeneral, product_of_each


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


def group_of_row(sizes: Int[Array, "groups"], rows: int) -> Int[Array, "rows"]:
    """The group of each row, where groups of some sizes follow each other; behind the last one,
    their number.

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


# Rows in groups, and a matrix for each group ─► their products, by `jax.lax.ragged_dot`.
#
# JAX cannot batch `ragged_dot` where only some of its arrays are batched, as under a `jax.vmap`
# over tokens. So its parts, forward and backward, are batched by a loop (`sequential_vmap`); and
# since JAX cannot differentiate what says how it is batched, the derivative is said here.

_Rows = Float[Array, "rows size"]
_Weights = Float[Array, "groups size out"]
_Sizes = Int[Array, "groups"]


def product_of_groups(x: _Rows, weights: _Weights, sizes: _Sizes) -> Float[Array, "rows out"]:
    """The product of each row with the matrix of its group; behind the last group it is anything.

    Args:
        x: the rows, group by group.
        weights: the matrices.
        sizes: how many rows each group has.

    Examples:
        >>> from functree.nn.moe.experts import product_of_groups
        >>> x, weights = (
        ...     jnp.ones((3, 2)),
        ...     jnp.array([[[1.0], [1.0]], [[2.0], [2.0]]]),
        ... )
        >>> product_of_groups(x, weights, jnp.array([1, 2]))[:, 0]
        Array([2., 4., 4.], dtype=float32)
    """
    # In a shard_map the gradient of weights that are equal on all devices is a sum over them: here,
    # by the derivative of the cast.
    x, weights, sizes = equally_varying(x, weights, sizes)
    return _product(x, weights, sizes)


@jax.custom_vjp
def _product(x: _Rows, weights: _Weights, sizes: _Sizes) -> Float[Array, "rows out"]:
    return _forward(x, weights, sizes)


@sequential_vmap
def _forward(x: _Rows, weights: _Weights, sizes: _Sizes) -> Float[Array, "rows out"]:
    return jax.lax.ragged_dot(x, weights, sizes)


@sequential_vmap
def _of_rows(x: _Rows, weights: _Weights, sizes: _Sizes, d: Array) -> _Rows:
    """The gradient by the rows."""
    return jax.vjp(lambda x: jax.lax.ragged_dot(x, weights, sizes), x)[1](d)[0]


@sequential_vmap
def _of_weights(x: _Rows, weights: _Weights, sizes: _Sizes, d: Array) -> _Weights:
    """The gradient by the matrices."""
    return jax.vjp(lambda weights: jax.lax.ragged_dot(x, weights, sizes), weights)[1](d)[0]


def _with_residuals(x: _Rows, weights: _Weights, sizes: _Sizes) -> tuple[Array, Any]:
    return _forward(x, weights, sizes), (x, weights, sizes)


def _backward(residuals: Any, d: Array) -> tuple[Array, Array, None]:
    return _of_rows(*residuals, d), _of_weights(*residuals, d), None


_product.defvjp(_with_residuals, _backward)
