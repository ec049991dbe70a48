"""`live_rows` shows how arrays are sharded now, as rows of a plan."""

import math
from collections.abc import Sequence

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from functree.devices.meshes import Device, mesh_view
from functree.devices.placement import other_memory
from functree.devices.specs import of_rank
from functree.errors import listed
from functree.labels.leaf import Leaf
from functree.layout.plan.text import Row, row_of

AnyMesh = Mesh | AbstractMesh


def live_rows(leaves: Sequence[Leaf]) -> tuple[list[Row], AnyMesh | None]:
    """Return a row for each array's current sharding, and the mesh of the first array on a mesh."""
    by_path = {leaf.path: leaf for leaf in leaves}
    first: AnyMesh | None = None
    rows: list[Row] = []
    for leaf in leaves:
        row, mesh = _live_row(leaf)
        if first is None:
            first = mesh
        if mesh is not None and mesh != first:
            row = row._replace(reason=f"{row.reason}, on {_mesh_text(mesh)}", mesh=mesh)
        follows = leaf.follows
        if follows is not None and follows.path is not None:
            if follows.has_all_of(len(by_path[follows.path].shape)):
                row = row._replace(follows=follows.path)
        rows.append(row)
    return rows, first


def _mesh_text(mesh: AnyMesh) -> str:
    """Format a mesh with its first devices, to distinguish it from a mesh of the same sizes."""
    text = f"the mesh {mesh_view(mesh)}"
    if isinstance(mesh, Mesh):
        text += f" of {listed(list(map(_device_text, mesh.devices.flat)))}"
    return text


def _device_text(device: Device) -> str:
    return f"{device.platform}:{device.id}"


def _live_row(leaf: Leaf) -> tuple[Row, AnyMesh | None]:
    """Return the row of an array, and its mesh.

    An array without a `NamedSharding`, such as a NumPy array, has no spec. A traced array
    with a mesh axis that is not Explicit has no spec either.
    """
    value, shape = leaf.value, leaf.shape
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return row_of(leaf, None, "a NumPy array in host memory", shape), None
    if isinstance(value, Tracer):
        sharding, reason = jax.typeof(value).sharding, "from its type"
        if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
            return row_of(leaf, None, "traced, without a mesh in its type", shape), None
        if not sharding.mesh.are_all_axes_explicit:
            return row_of(leaf, None, _NOT_EXPLICIT, shape), sharding.mesh
    else:
        sharding, reason = value.sharding, "as it is sharded now"
    if sharding is None:
        return row_of(leaf, None, "abstract, with no sharding", shape), None
    local = tuple(sharding.shard_shape(shape))
    kind = other_memory(sharding)
    # A `ShapeDtypeStruct` and a traced array have no attribute `committed`, and have a sharding
    # only if the user chose it.
    committed = isinstance(value, Tracer) or bool(getattr(value, "committed", True))
    if isinstance(sharding, SingleDeviceSharding):
        device = _device_text(next(iter(sharding.device_set)))
        how = "committed to" if committed else "uncommitted, on"
        return row_of(leaf, None, f"{how} the device {device}", local, 1, kind), None
    if not isinstance(sharding, NamedSharding):
        reason += f", with a {type(sharding).__name__}"
        copies = _copies(len(sharding.device_set), shape, local)
        return row_of(leaf, None, reason, local, copies, kind), None
    if not committed:
        reason += ", uncommitted"
    spec, mesh = of_rank(sharding.spec, len(shape)), sharding.mesh
    return row_of(leaf, spec, reason, local, _copies(mesh.size, shape, local), kind), mesh


# In the type's spec, `None` may mean "unsharded" or "unknown": a type does not contain Auto axes,
# and in a `shard_map`, shapes are local along Manual axes.
_NOT_EXPLICIT = (
    "traced, and not all mesh axes are Explicit, so its type does not contain its whole sharding"
)


def _copies(devices: int, shape: tuple[int, ...], local: tuple[int, ...]) -> int:
    """Return the number of devices that hold each byte of an array."""
    # An array without elements counts as replicated.
    return devices * max(math.prod(local), 1) // max(math.prod(shape), 1)
