"""Live arrays ─► how they lie now."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from functree.layout.row import Row
from functree.tree.leaf import Leaf


class Live(NamedTuple):
    """How an array lies: a spec where one says it, and the words for it."""

    spec: PartitionSpec | None
    reason: str
    local_shape: tuple[int, ...]
    copies: int = 1
    memory_kind: str | None = None
    mesh: Mesh | AbstractMesh | None = None


def live_rows(leaves: Sequence[Leaf]) -> tuple[list[Row], Mesh | AbstractMesh | None]:
    """A row for each array as it lies, and the first mesh on which one does."""
    live = [live_decision(leaf.value) for leaf in leaves]
    rows = []
    for leaf, x in zip(leaves, live, strict=True):
        shape, dtype = leaf.value.shape, leaf.value.dtype
        total, local = (math.prod(s) * dtype.itemsize for s in (shape, x.local_shape))
        lies = (x.spec, x.reason, x.local_shape, total, local, x.copies, x.memory_kind)
        rows.append(Row(leaf.path, shape, dtype, leaf.axes, *lies))
    return rows, next((x.mesh for x in live if x.mesh is not None), None)


def live_decision(value: Any) -> Live:
    """How an array lies. What is not in JAX's hands, or not yet, has no spec."""
    shape = tuple(value.shape)
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return Live(None, "a numpy array in the host's memory", shape)
    if isinstance(value, Tracer):
        return _traced(value)
    sharding = value.sharding
    if sharding is None:
        return Live(None, "abstract, with no sharding", shape)
    local = tuple(sharding.shard_shape(shape))
    kind = None if sharding.memory_kind in (None, "device") else sharding.memory_kind
    if isinstance(sharding, NamedSharding):
        split = _parts(sharding, shape, local)
        spec = _full(sharding.spec, len(shape))
        reason = "as it lies" if _committed(value) else "as it lies, uncommitted"
        return Live(spec, reason, local, sharding.mesh.size // split, kind, sharding.mesh)
    if isinstance(sharding, SingleDeviceSharding):
        device = next(iter(sharding.device_set))
        how = "committed to" if _committed(value) else "uncommitted, on"
        return Live(None, f"whole, {how} {device.platform}:{device.id} alone", local, 1, kind)
    copies = len(sharding.device_set) // _parts(sharding, shape, local)
    return Live(None, f"as it lies, by a {type(sharding).__name__}", local, copies, kind)


def _traced(value: Any) -> Live:
    sharding = jax.typeof(value).sharding
    shape = tuple(value.shape)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return Live(None, "traced, where no array lies anywhere yet", shape)
    spec = _full(sharding.spec, len(shape))
    if not sharding.mesh.are_all_axes_explicit:
        return Live(None, "traced under Auto axes, whose types do not say how it lies", shape, mesh=sharding.mesh)
    local = tuple(sharding.shard_shape(shape))
    return Live(spec, "by its type", local, sharding.mesh.size // _parts(sharding, shape, local), None, sharding.mesh)


def _full(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """With one entry for each dimension."""
    return PartitionSpec(*spec.partitions, *[None] * (ndim - len(spec.partitions)))


def _committed(value: Any) -> bool:
    return bool(getattr(value, "committed", True))


def _parts(sharding: Any, shape: tuple[int, ...], local: tuple[int, ...]) -> int:
    """Into how many different parts a sharding cuts a shape."""
    parts = 1
    for size, one in zip(shape, local, strict=True):
        parts *= -(-size // one) if one else 1
    return parts
