"""An activation and a weight ─► their product, sharded by their types if mesh axes are Explicit.

On Auto axes the compiler chooses the sharding of a product. On Explicit axes JAX requires `out_sharding=` if there is
more than one possibility, as for FSDP, row-parallel layers and embeddings. Here the rule is always the same: dimensions
of the activation keep their sharding. Dimensions of the weight keep theirs, except for mesh axes that the activation
uses already.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from functree.layout.specs import Entry, mesh_axes, of_rank, without

Entries = tuple[Entry, ...]


def product(x: Float[Array, "..."], weight: Float[Array, "..."], summed: int = 1) -> Float[Array, "..."]:
    """The product of `x` and `weight`, summed over the last `summed` dimensions of `x` and the first ones of `weight`.

    Examples:
        >>> from functree.nn.products import product
        >>> product(jnp.ones((2, 3, 8)), jnp.ones((8, 4, 5))).shape
        (2, 3, 4, 5)
    """
    outer, inner = _entries(x)[: x.ndim - summed], _entries(weight)[summed:]
    layout = _layout(_explicit_mesh(x, weight), (*outer, *_left(inner, outer)))
    return jnp.tensordot(x, weight, axes=summed, out_sharding=layout)


def rows(table: Float[Array, "vocab embed"], index: Int[Array, "*batch"]) -> Float[Array, "*batch embed"]:
    """The rows of a table at each index; a row of NaN for an index that is not less than the number of rows.

    Examples:
        >>> from functree.nn.products import rows
        >>> rows(jnp.ones((7, 4)), jnp.array([[0, 6]])).shape
        (1, 2, 4)
    """
    outer, mesh = _entries(index), _explicit_mesh(index, table)
    inner = _left(_entries(table), outer)
    if mesh is not None:
        # Otherwise the partitioner moves the gradients of all looked-up rows, instead of that of the table.
        table = jax.sharding.reshard(table, _layout(mesh, inner))
    return table.at[index].get(mode="fill", out_sharding=_layout(mesh, (*outer, inner[-1])))


def along(weight: Float[Array, "*size"], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """A weight broadcast to the shape of `x`, along its last dimensions, and sharded like `x`.

    Examples:
        >>> from functree.nn.products import along
        >>> along(jnp.arange(3.0), jnp.ones((2, 3))).shape
        (2, 3)
    """
    entries, mesh, first = _entries(x), _explicit_mesh(x, weight), x.ndim - weight.ndim
    if mesh is not None:
        weight = jax.sharding.reshard(weight, _layout(mesh, entries[first:]))
    return jax.lax.broadcast_in_dim(weight, x.shape, range(first, x.ndim), out_sharding=_layout(mesh, entries))


def indices_along(x: Shaped[Array, "*batch size"]) -> Int[Array, "*batch size"]:
    """0, 1, 2, … along the last dimension of `x`, for every place in it, and sharded like it.

    Examples:
        >>> from functree.nn.products import indices_along
        >>> indices_along(jnp.ones((2, 3)))[0]
        Array([0, 1, 2], dtype=int32)
    """
    layout = _layout(_explicit_mesh(x), _entries(x))
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1, out_sharding=layout)


def whole(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x`, on Explicit mesh axes with its last dimension unsharded: some operations need it so.

    Examples:
        >>> from functree.nn.products import whole
        >>> whole(jnp.ones((2, 3))).shape
        (2, 3)
    """
    mesh = _explicit_mesh(x)
    return x if mesh is None else jax.sharding.reshard(x, _layout(mesh, (*_entries(x)[:-1], None)))


def _explicit_mesh(*arrays: Array) -> AbstractMesh | None:
    """The first mesh with Explicit axes in the types of the arrays; None if there is none."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def _layout(mesh: AbstractMesh | None, entries: Entries) -> NamedSharding | None:
    """The value for `out_sharding=`, which has to be None without Explicit axes."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(*entries))


def _entries(x: Array) -> Entries:
    """The spec in the type of `x`, with one entry for each dimension. It names Explicit axes only."""
    return tuple(of_rank(jax.typeof(x).sharding.spec, x.ndim))


def _left(inner: Entries, outer: Entries) -> Entries:
    """`inner` without the mesh axes that `outer` uses: a mesh axis can shard only one dimension of an array."""
    used = {axis for entry in outer for axis in mesh_axes(entry)}
    return tuple(without(PartitionSpec(*inner), used))
