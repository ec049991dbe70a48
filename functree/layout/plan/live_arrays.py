"""Arrays ─► rows that show how they are sharded now."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from functree.devices.meshes import Device, mesh_view
from functree.devices.placement import other_memory
from functree.devices.specs import of_rank
from functree.labels.leaf import Leaf
from functree.labels.training_state import MODEL, OPTIMIZER
from functree.layout.plan.row import Row, rows_by_path
from functree.tree.paths import Path


class Live(NamedTuple):
    """How an array is sharded: its spec, or None if it has none, and a reason for the plan."""

    spec: PartitionSpec | None
    reason: str
    local_shape: tuple[int, ...]
    copies: int = 1
    memory_kind: str | None = None
    mesh: Mesh | AbstractMesh | None = None


def live_rows(
    leaves: Sequence[Leaf], states: Iterable[Path] = ()
) -> tuple[list[Row], Mesh | AbstractMesh | None]:
    """A row for each array with its current sharding, and the mesh of the first array that is on a
    mesh.

    Args:
        leaves: the arrays.
        states: the paths of the training states that they are in.
    """
    first: Mesh | AbstractMesh | None = None
    rows: list[Row] = []
    for leaf in leaves:
        live = live_sharding(leaf.value)
        if first is None:
            first = live.mesh
        shape, dtype = leaf.value.shape, leaf.value.dtype
        row = Row(
            leaf.path,
            shape,
            dtype,
            leaf.axes,
            spec=live.spec,
            reason=live.reason,
            local_shape=live.local_shape,
            bytes_global=math.prod(shape) * dtype.itemsize,
            bytes_per_device=math.prod(live.local_shape) * dtype.itemsize,
            copies=live.copies,
            memory_kind=live.memory_kind,
        )
        if live.mesh is not None and live.mesh != first:
            reason = f"{live.reason}, on {_mesh_text(live.mesh)}"
            row = row._replace(reason=reason, mesh=live.mesh)
        rows.append(row)
    for path in states:
        rows = _with_parameters(path, rows)
    return rows, first


def _with_parameters(state: Path, rows: Sequence[Row]) -> list[Row]:
    """The rows, in which moments have the paths of their parameters: of what is in a model and an
    optimizer's state under one path and has one shape."""
    parameters = rows_by_path(rows)
    found: list[Row] = []
    for row in rows:
        below = row.path[len(state) :]
        if row.path[: len(state)] == state and below[:1] == (OPTIMIZER,):
            # The longest first: nearer to the root, the optimizer's own keys are in the path.
            for start in range(1, len(below) + 1):
                path = Path((*state, MODEL, *below[start:]))
                if path in parameters and parameters[path].shape == row.shape:
                    row = row._replace(follows=path)
                    break
        found.append(row)
    return found


def _mesh_text(mesh: Mesh | AbstractMesh) -> str:
    """A mesh that is not the plan's, with its devices: two meshes may have the same sizes."""
    text = f"the mesh {mesh_view(mesh)}"
    if not isinstance(mesh, Mesh):
        return text
    text += " of " + ", ".join(map(_device_text, mesh.devices.flat[:4]))
    if mesh.devices.size > 4:
        text += ", …"
    return text


def _device_text(device: Device) -> str:
    return f"{device.platform}:{device.id}"


def live_sharding(value: Any) -> Live:
    """How an array is sharded. An array that is abstract, of numpy, or on a single device has no
    spec."""
    shape = tuple(value.shape)
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return Live(None, "a numpy array in the host's memory", shape)
    if isinstance(value, Tracer):
        return _traced(value)
    sharding = value.sharding
    if sharding is None:
        return Live(None, "abstract, with no sharding", shape)
    local = tuple(sharding.shard_shape(shape))
    kind = other_memory(sharding)
    # A `ShapeDtypeStruct` has no `committed`; a sharding that it has was given on purpose.
    committed = bool(getattr(value, "committed", True))
    if isinstance(sharding, NamedSharding):
        spec = of_rank(sharding.spec, len(shape))
        reason = "as it is sharded now" if committed else "as it is sharded now, uncommitted"
        return Live(
            spec, reason, local, sharding.mesh.size // _parts(shape, local), kind, sharding.mesh
        )
    if isinstance(sharding, SingleDeviceSharding):
        device = next(iter(sharding.device_set))
        how = "committed to" if committed else "uncommitted, on"
        return Live(None, f"{how} the device {_device_text(device)}", local, 1, kind)
    copies = len(sharding.device_set) // _parts(shape, local)
    return Live(None, f"as it is sharded now, by a {type(sharding).__name__}", local, copies, kind)


def _traced(value: Any) -> Live:
    """How a traced array is sharded, by its type."""
    sharding = jax.typeof(value).sharding
    shape = tuple(value.shape)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return Live(None, "traced, without a mesh in its type", shape)
    spec, mesh = of_rank(sharding.spec, len(shape)), sharding.mesh
    if not mesh.are_all_axes_explicit:
        # The type has a spec, but its `None` may be "unsharded" or "not known": a type says nothing
        # about Auto axes, and inside `shard_map` shapes are local along Manual ones.
        why = (
            "traced, and not all mesh axes are Explicit: its type does not have its whole sharding"
        )
        return Live(None, why, shape, mesh=mesh)
    local = tuple(sharding.shard_shape(shape))
    return Live(spec, "by its type", local, mesh.size // _parts(shape, local), None, mesh)


def _parts(shape: tuple[int, ...], local: tuple[int, ...]) -> int:
    """The number of different shards of an array."""
    parts = 1
    for size, one in zip(shape, local, strict=True):
        # A dimension of size 0 has shards of size 0.
        if one:
            parts *= -(-size // one)
    return parts
