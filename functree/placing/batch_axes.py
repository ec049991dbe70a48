"""Layouts ─► the mesh axes that they put the batch on."""

from collections.abc import Iterator

from jax.sharding import AbstractMesh, Mesh

from functree.devices.meshes import MeshView
from functree.devices.specs import mesh_axes
from functree.errors import ShardingError
from functree.layout.bare_array_spec import spec_of_axes
from functree.layout.fsdp import FSDP
from functree.layout.layout import Composition, Layout, as_layout
from functree.layout.state_sharding import StateSharding
from functree.placing.constrain import local_view
from functree.tree.axes import Axes


def axes_of_name(name: str, rules: Layout, mesh: Mesh | AbstractMesh) -> tuple[str, ...] | None:
    """The mesh axes of a dimension of this name, in an activation that has no other; None if the
    rules do not know it."""
    if not rules.for_activations:
        return None
    try:
        spec = spec_of_axes(rules, Axes(name), None, local_view(MeshView(dict(mesh.shape), mesh)))
    except ShardingError:
        return None
    return mesh_axes(spec.partitions[0])


def fsdp_axes(layout: Layout) -> Iterator[str]:
    """The mesh axes of the `FSDP` in a layout, which are those of the batch."""
    match layout:
        case FSDP():
            yield from layout.mesh_axes
        case Composition():
            for part in layout.parts:
                yield from fsdp_axes(part)
        case StateSharding():
            for one in layout.layouts:
                yield from fsdp_axes(as_layout(one))
