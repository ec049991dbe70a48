"""This module initializes weights, casts them for the computation, and multiplies by them.

All products with weights are computed here. On Auto mesh axes, the compiler chooses the sharding of
a product. On Explicit mesh axes, JAX requires `out_sharding=` if several shardings are possible, as
for FSDP, row-parallel layers and embeddings. The rule is always the same: dimensions of the
activation keep their sharding. Dimensions of the weight keep theirs, except for mesh axes that the
activation already uses.
"""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from functree.argument_checks import FUNCTION, Takes
from functree.devices.meshes import mesh_axes, without
from functree.errors import AxesError, count
from functree.nn.activations import (
    Entries,
    divided,
    entries_of,
    explicit_mesh,
    out_sharding,
    over_mesh,
)
from functree.tree.axes import Axes
from functree.tree.skeleton.static_value import is_hashable

# Initializers

# The key is `Any`: JAX types it as an array, but constant initializers also accept `None`.
Initializer = Annotated[Callable[[Any, tuple[int, ...], DTypeLike], Array], FUNCTION]
"""An initializer as in `jax.nn.initializers`: (key, shape, dtype) ─► array."""

fan_in: Initializer = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
"""The default for matrices: truncated normal with variance 1 / fan_in (the size summed over).

The variance of a product is then the variance of its input (LeCun et al., "Efficient BackProp",
1998).
"""

small_normal: Initializer = jax.nn.initializers.normal(0.02)
"""The default for embeddings, as in GPT-2 (Radford et al., 2019)."""

# Dtypes: weights may be kept in one dtype and multiplied in another


def dtype_or_none(dtype: DTypeLike | None) -> np.dtype | None:
    """Convert a dtype to `np.dtype`; `None` stays `None`.

    Examples:
        >>> from functree.nn.weights import dtype_or_none
        >>> dtype_or_none("float32") == dtype_or_none(jnp.float32)
        True
    """
    # Layers keep the dtype as a static field. With several spellings of one dtype, equal layers
    # would compare unequal, and each would be compiled separately.
    return None if dtype is None else jnp.dtype(dtype)


def cast(dtype: DTypeLike | None, x: Array, *weights: Array) -> tuple[Array, ...]:
    """Cast `x` and `weights` to `dtype`, or to the dtype of `x` if `dtype` is `None`.

    Examples:
        >>> from functree.nn.weights import cast
        >>> [
        ...     a.dtype.name
        ...     for a in cast(None, jnp.ones(2, jnp.bfloat16), jnp.ones(3))
        ... ]
        ['bfloat16', 'bfloat16']
    """
    # All arrays are cast before the product, and before any array is gathered for it. Collectives
    # then move the narrow dtype, and JAX accepts the product under strict promotion.
    dtype = x.dtype if dtype is None else dtype
    return tuple(array.astype(dtype) for array in (x, *weights))


def accumulator(dtype: DTypeLike) -> np.dtype:
    """Return the dtype for sums over many terms of `dtype`: float32 or wider.

    Examples:
        >>> from functree.nn.weights import accumulator
        >>> accumulator(jnp.bfloat16)
        dtype('float32')
    """
    # NumPy's function, since JAX's own raises an error under strict promotion.
    return np.promote_types(dtype, np.float32)


# Axes


def named_axes(layer: str, axes: str | Axes, number: int) -> Axes:
    """Return the names of the dimensions of a layer's weight.

    Raises:
        AxesError: if `axes` does not have `number` names.

    Examples:
        >>> from functree.nn.weights import named_axes
        >>> named_axes("Linear", "embed hidden", 2)
        Axes('embed', 'hidden')
    """
    given = Axes.of(axes)
    if len(given) != number:
        raise AxesError(f'{layer}(axes="{given}"): name {count(number, "dimension")}')
    return given


# Products

DotGeneral = Annotated[
    Callable[..., Array],
    Takes(
        "a hashable function that takes the arguments of `jax.lax.dot_general`",
        lambda value: FUNCTION.fits(value) and is_hashable(value),
    ),
]
"""A function that multiplies activations by weights. It takes the arguments of
`jax.lax.dot_general`: the two arrays, the dimension numbers, and on Explicit mesh axes
`out_sharding=`."""


def product(
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    summed: int = 1,
    dot_general: DotGeneral | None = None,
) -> Float[Array, "..."]:
    """Multiply an activation by a weight, in their dtype.

    Args:
        x: the activation, whose last `summed` dimensions are summed over.
        weight: the weight, whose first `summed` dimensions have the same sizes.
        summed: the number of dimensions that are summed over, such as 2 for "heads head_dim".
        dot_general: the function that multiplies them; None for `jax.lax.dot_general`.

    Examples:
        >>> from functree.nn.weights import product
        >>> product(jnp.ones((2, 3, 8)), jnp.ones((8, 4, 5))).shape
        (2, 3, 4, 5)
    """
    kept, columns = entries_of(x)[: x.ndim - summed], entries_of(weight)[summed:]
    entries = (*kept, *_without_axes_of(kept, columns))
    sharding = out_sharding(explicit_mesh(x, weight), entries)
    multiply = jax.lax.dot_general if dot_general is None else dot_general
    last, first = tuple(range(x.ndim - summed, x.ndim)), tuple(range(summed))
    # Other libraries' functions may lack `out_sharding`, which only Explicit axes need.
    options: dict[str, Any] = {} if sharding is None else {"out_sharding": sharding}
    return multiply(x, weight, ((last, first), ((), ())), **options).astype(x.dtype)


def rows(
    table: Float[Array, "vocab embed"], index: Int[Array, "*batch"]
) -> Float[Array, "*batch embed"]:
    """Look up a table's row at each index, on Auto and on Explicit mesh axes.

    An index that is negative, or not less than the number of rows, gets a row of NaN.

    Examples:
        >>> from functree.nn.weights import rows
        >>> rows(jnp.ones((7, 4)), jnp.array([[0, 6]])).shape
        (1, 2, 4)
    """
    kept, mesh = entries_of(index), explicit_mesh(index, table)
    of_table = _without_axes_of(kept, entries_of(table))
    if mesh is not None:
        # The table's spec omits the mesh axes of the tokens. Under FSDP, the table is gathered, and
        # its gradient is scattered in the backward pass. The partitioner alone would move the
        # gradients of all rows that are looked up.
        table = jax.sharding.reshard(table, out_sharding(mesh, of_table))
        if mesh.manual_axes:
            # Inside a shard_map, JAX cannot differentiate a lookup with `out_sharding=`.
            return rows_on_shards(table, index, of_table, kept)
    sharding = out_sharding(mesh, (*kept, of_table[-1]))
    # "fill" is NaN for floating-point numbers. By default, JAX clips an index, and counts a
    # negative index from the end, so a token outside the vocabulary would silently get another
    # token's row.
    return table.at[as_int32(index)].get(
        mode="fill", wrap_negative_indices=False, out_sharding=sharding
    )


def rows_on_shards(
    table: Float[Array, "vocab embed"],
    index: Int[Array, "*batch"],
    of_table: Entries,
    of_index: Entries,
) -> Float[Array, "*batch embed"]:
    """Look up each device's indices in the device's own rows, and sum the results; see `rows`.

    Use this function in the body of a shard_map that leaves some mesh axes to the compiler.

    Args:
        table: the table.
        index: the indices.
        of_table: the spec of the table.
        of_index: the spec of the indices, over different mesh axes.
    """
    vocab, axes = table.shape[0], mesh_axes(divided(of_table[0]))

    def of_shard(table: Array, index: Array) -> Array:
        index = as_int32(index)
        is_token, own = (index >= 0) & (index < vocab), index
        if axes:
            own = index - jax.lax.axis_index(axes) * table.shape[0]
        is_own = (own >= 0) & (own < table.shape[0])
        own_rows = jnp.where(is_own[..., None], rows(table, own), 0)
        if axes:
            own_rows = jax.lax.psum(own_rows, axes)  # only one of the terms is not 0
        return jnp.where(is_token[..., None], own_rows, jnp.nan)

    specs = PartitionSpec(*of_table), PartitionSpec(*of_index)
    return over_mesh(of_shard, (table, index), specs, PartitionSpec(*of_index, of_table[1]))


def as_int32(index: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Cast indices of any integer dtype to int32, and clip those that int32 cannot hold.

    Examples:
        >>> from functree.nn.weights import as_int32
        >>> as_int32(jnp.array([200, 3], jnp.uint8)) + 100
        Array([300, 103], dtype=int32)
    """
    # A narrow dtype may overflow in sums, and may be unable to represent the number of rows, with
    # which JAX compares indices. A cast from a wide dtype would overflow: 2**32 + 5 would be row 5.
    own, wanted = jnp.iinfo(index.dtype), jnp.iinfo(jnp.int32)
    if own.max > wanted.max:
        # Not `jnp.clip`, which would cast a NumPy array first.
        index = index.clip(max(own.min, wanted.min), wanted.max)
    return index.astype(jnp.int32)


def broadcast_like(weight: Float[Array, "*size"], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Broadcast a weight over the leading dimensions of `x`, and shard the result like `x`.

    Examples:
        >>> from functree.nn.weights import broadcast_like
        >>> broadcast_like(jnp.arange(3.0), jnp.ones((2, 3))).shape
        (2, 3)
    """
    # The broadcast is explicit, since JAX adds no dimensions with
    # `jax.numpy_rank_promotion="raise"`.
    entries, mesh, first = entries_of(x), explicit_mesh(x, weight), x.ndim - weight.ndim
    if mesh is not None:
        # The weight's type may have a mesh axis that shards the batch of `x`, as under FSDP.
        weight = jax.sharding.reshard(weight, out_sharding(mesh, entries[first:]))
    return jax.lax.broadcast_in_dim(
        weight, x.shape, range(first, x.ndim), out_sharding=out_sharding(mesh, entries)
    )


def affine(
    x: Float[Array, "..."], weight: Float[Array, "*size"] | None, bias: Float[Array, "*size"] | None
) -> Float[Array, "..."]:
    """Compute `x · weight + bias` over the last dimensions; None skips the weight or the bias."""
    if weight is not None:
        x = x * broadcast_like(weight.astype(x.dtype), x)
    if bias is not None:
        x = x + broadcast_like(bias.astype(x.dtype), x)
    return x


def _without_axes_of(kept: Entries, entries: Entries) -> Entries:
    """Remove the mesh axes in `kept` from `entries`: an axis shards only one dimension."""
    used = {axis for entry in kept for axis in mesh_axes(entry)}
    return tuple(without(PartitionSpec(*entries), used))
