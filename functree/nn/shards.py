"""A computation over batches and heads ─► the same on each device's shards, so that nothing is left to the partitioner.

Kernels need it, and other implementations gain by it: no device computes with heads that are not its own.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from functree.layout.specs import Entry, mesh_axes, of_rank
from functree.placing.ambient import ambient_axis_rules, spec

HEADS = "batch _ heads _"
KV_HEADS = "batch _ kv_heads _"


def on_one_device() -> bool:
    """Whether what is traced runs on one device, or on the shards of one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return all(size == 1 or name in mesh.manual_axes for name, size in mesh.shape.items())


def specs_of(arrays: Sequence[Array], names: Sequence[str]) -> list[PartitionSpec] | None:
    """How arrays are sharded, but for the dimensions called `_`, which are taken whole; None if nobody can tell.

    On Explicit mesh axes their types tell, and else the ambient rules. These know one batch dimension: of several, and
    of the one that `jax.vmap` hides, they say nothing.

    Args:
        arrays: the arrays; they may have more dimensions in front.
        names: the names of the last dimensions of each.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    if AxisType.Auto not in mesh.axis_types:
        return _of_types(arrays, names)
    fits = all(x.ndim == len(text.split()) for x, text in zip(arrays, names, strict=True))
    return [spec(text) for text in names] if fits and ambient_axis_rules() is not None else None


def _of_types(arrays: Sequence[Array], names: Sequence[str]) -> list[PartitionSpec]:
    """The specs in the types of arrays. A dimension is sharded as the first one of its name that is sharded."""
    own = [list(of_rank(jax.typeof(x).sharding.spec, x.ndim)) for x in arrays]
    named = [text.split() for text in names]
    found: dict[str, Entry] = {"_": None}
    for entries, last in zip(own, named, strict=True):
        for name, one in zip(last, entries[len(entries) - len(last) :], strict=True):
            found[name] = found.get(name) or (None if name == "_" else one)
    return [
        PartitionSpec(*entries[: len(entries) - len(last)], *(found[name] for name in last))
        for entries, last in zip(own, named, strict=True)
    ]


def on_shards(
    fun: Callable[..., Array], arrays: Sequence[Array], names: Sequence[str], check_vma: bool = True
) -> Array:
    """`fun` of arrays, computed on each device with its shards. Its result is sharded as the first array.

    If each device has all key and value heads, `fun` gets those of its query heads.

    Args:
        fun: a function of the arrays, of which the first has heads.
        arrays: the arrays.
        names: the names of their dimensions, as in `specs_of`.
        check_vma: as in `jax.shard_map`: kernels do not tell along which mesh axes their results vary.
    """
    specs = None if on_one_device() else specs_of(arrays, names)
    if specs is None:
        return fun(*arrays)
    heads = specs[0][-2]
    # Shards of key and value heads that are not those of the query heads would not fit together.
    apart = ["kv_heads" in text and one[-2] != heads for text, one in zip(names, specs, strict=True)]
    whole = [PartitionSpec(*one[:-2], None, None) for one in specs]
    specs = [all_heads if is_apart else one for all_heads, one, is_apart in zip(whole, specs, apart, strict=True)]
    total = arrays[0].shape[-2]

    def of_shards(*shards: Array) -> Array:
        own = [
            _of_own_heads(x, shards[0].shape[-2], total, heads) if is_apart else x
            for x, is_apart in zip(shards, apart, strict=True)
        ]
        return fun(*own)

    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    mapped = jax.shard_map(of_shards, in_specs=tuple(specs), out_specs=specs[0], axis_names=free, check_vma=check_vma)
    return mapped(*(resharded(x, one) for x, one in zip(arrays, specs, strict=True)))


def resharded(x: Array, wanted: PartitionSpec) -> Array:
    """An array as `jax.shard_map` wants it on Explicit mesh axes, where its type has to have the spec."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types or of_rank(jax.typeof(x).sharding.spec, x.ndim) == wanted:
        return x
    return jax.sharding.reshard(x, wanted)


def _of_own_heads(x: Array, own: int, total: int, axes: Entry) -> Array:
    """Of all key and value heads, those of the query heads on this device.

    Args:
        x: keys or values with all heads.
        own: the number of query heads on this device.
        total: the number of all query heads.
        axes: the mesh axes over which these are sharded.
    """
    if own == total:
        return x
    group = total // x.shape[-2]
    first = jax.lax.axis_index(mesh_axes(axes)) * own
    if own % group and group % own:  # a device has parts of several groups
        return jnp.take(x, (first + jnp.arange(own)) // group, axis=-2)
    return jax.lax.dynamic_slice_in_dim(x, first // group, max(1, own // group), x.ndim - 2)
