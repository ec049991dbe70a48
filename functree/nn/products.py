"""An activation and a weight ─► what comes of both, laid out by their types where mesh axes are Explicit.

On Auto axes the compiler finds a layout. On Explicit axes JAX asks wherever there is more than one, as for FSDP, row
parallel layers and embeddings. The answer is always the same: a weight is gathered along the mesh axes that split the
activation already (all of FSDP); then the result lies as the activation in the dimensions that come from it, and as
the weight in the others.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from functree.transforms.ambient import without


def product(x: Float[Array, "..."], weight: Float[Array, "..."], summed: int = 1) -> Float[Array, "..."]:
    """The sum over the last `summed` dimensions of `x` and the first ones of `weight`.

    Example:
        >>> from functree.nn.products import product
        >>> product(jnp.ones((2, 3, 8)), jnp.ones((8, 4, 5))).shape
        (2, 3, 4, 5)
    """
    kept = x.ndim - summed
    weight = _gathered(weight, x, kept)
    return jnp.tensordot(x, weight, axes=summed, out_sharding=_beside(x, kept, weight, summed))


def rows(table: Float[Array, "vocab embed"], index: Int[Array, "*batch"]) -> Float[Array, "*batch embed"]:
    """The rows of a table at each index; NaN for an index at or above its size.

    Example:
        >>> from functree.nn.products import rows
        >>> rows(jnp.ones((7, 4)), jnp.array([[0, 6]])).shape
        (1, 2, 4)
    """
    table = _gathered(table, index, index.ndim)
    return table.at[index].get(mode="fill", out_sharding=_beside(index, index.ndim, table, 1))


def along(vector: Float[Array, "size"], x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
    """A vector repeated over all but the last dimension of `x`.

    Example:
        >>> from functree.nn.products import along
        >>> along(jnp.arange(3.0), jnp.ones((2, 3))).shape
        (2, 3)
    """
    if (mesh := _explicit_mesh(x, vector)) is not None:
        vector = jax.sharding.reshard(vector, NamedSharding(mesh, PartitionSpec(_entries(x)[-1])))
    return jnp.broadcast_to(vector, x.shape)


def _gathered(weight: Array, x: Array, kept: int) -> Array:
    """`weight`, whole along the mesh axes that split the first `kept` dimensions of `x`."""
    if (mesh := _explicit_mesh(x, weight)) is None:
        return weight
    used = {axis for axes in _entries(x)[:kept] for axis in ((axes,) if isinstance(axes, str) else axes or ())}
    spec = without(PartitionSpec(*_entries(weight)), used)
    return jax.sharding.reshard(weight, NamedSharding(mesh, spec))


def _beside(x: Array, kept: int, weight: Array, summed: int) -> NamedSharding | None:
    """The first `kept` dimensions as in `x`, the others as in `weight` after its first `summed`."""
    if (mesh := _explicit_mesh(x, weight)) is None:
        return None
    return NamedSharding(mesh, PartitionSpec(*_entries(x)[:kept], *_entries(weight)[summed:]))


def _explicit_mesh(*arrays: Array) -> AbstractMesh | None:
    """The mesh that stands in the arrays' types, if it has Explicit axes."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def _entries(x: Array) -> tuple[str | tuple[str, ...] | None, ...]:
    """The spec in the type of `x`, which names Explicit axes only; one entry for each dimension."""
    entries = tuple(jax.typeof(x).sharding.spec)
    return entries + (None,) * (x.ndim - len(entries))
