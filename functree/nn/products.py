"""An activation and a weight ─► what comes of both, laid out by their types where mesh axes are Explicit.

On Auto axes the compiler finds a layout. On Explicit axes JAX asks wherever there is more than one, as for FSDP, row
parallel layers and embeddings. The answer is always the same: the dimensions that come from the activation stay as
they are, and those that the weight brings lie as in the weight, as far as mesh axes are left.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from functree.layout.specs import mesh_axes, without

Entries = tuple[str | tuple[str, ...] | None, ...]


def product(x: Float[Array, "..."], weight: Float[Array, "..."], summed: int = 1) -> Float[Array, "..."]:
    """The sum over the last `summed` dimensions of `x` and the first ones of `weight`.

    Examples:
        >>> from functree.nn.products import product
        >>> product(jnp.ones((2, 3, 8)), jnp.ones((8, 4, 5))).shape
        (2, 3, 4, 5)
    """
    outer, inner = _entries(x)[: x.ndim - summed], _entries(weight)[summed:]
    layout = _layout(_explicit_mesh(x, weight), (*outer, *_left(inner, outer)))
    return jnp.tensordot(x, weight, axes=summed, out_sharding=layout)


def rows(table: Float[Array, "vocab embed"], index: Int[Array, "*batch"]) -> Float[Array, "*batch embed"]:
    """The rows of a table at each index; NaN for an index at or above its size.

    Examples:
        >>> from functree.nn.products import rows
        >>> rows(jnp.ones((7, 4)), jnp.array([[0, 6]])).shape
        (1, 2, 4)
    """
    outer, mesh = _entries(index), _explicit_mesh(index, table)
    inner = _left(_entries(table), outer)
    if mesh is not None:
        # Else the partitioner moves the gradient of all rows, where that of the table would do.
        table = jax.sharding.reshard(table, _layout(mesh, inner))
    return table.at[index].get(mode="fill", out_sharding=_layout(mesh, (*outer, inner[-1])))


def along(vector: Float[Array, "size"], x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
    """A vector repeated over all but the last dimension of `x`.

    Examples:
        >>> from functree.nn.products import along
        >>> along(jnp.arange(3.0), jnp.ones((2, 3))).shape
        (2, 3)
    """
    entries, mesh = _entries(x), _explicit_mesh(x, vector)
    if mesh is not None:
        vector = jax.sharding.reshard(vector, _layout(mesh, entries[-1:]))
    return jax.lax.broadcast_in_dim(vector, x.shape, (x.ndim - 1,), out_sharding=_layout(mesh, entries))


def _explicit_mesh(*arrays: Array) -> AbstractMesh | None:
    """The mesh that stands in the arrays' types, if it has Explicit axes."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def _layout(mesh: AbstractMesh | None, entries: Entries) -> NamedSharding | None:
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(*entries))


def _entries(x: Array) -> Entries:
    """The spec in the type of `x`, which names Explicit axes only; one entry for each dimension."""
    entries = tuple(jax.typeof(x).sharding.spec)
    return entries + (None,) * (x.ndim - len(entries))


def _left(inner: Entries, outer: Entries) -> Entries:
    """`inner` without the mesh axes that `outer` has."""
    used = {axis for entry in outer for axis in mesh_axes(entry)}
    return tuple(without(PartitionSpec(*inner), used))
