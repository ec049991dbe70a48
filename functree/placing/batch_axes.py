"""Layouts ─► the mesh axes that they put the batch on."""

from jax.sharding import AbstractMesh, Mesh

from functree.devices.meshes import MeshView
from functree.devices.specs import mesh_axes
from functree.errors import ShardingError
from functree.layout.layout import Layout
from functree.layout.rules import spec_of_axes
from functree.placing.constrain import local_view
from functree.tree.axes import Axes


def axes_of_name(name: str, rules: Layout, mesh: Mesh | AbstractMesh) -> tuple[str, ...] | None:
    """The mesh axes of a dimension of this name, in an activation that has no other; None if the
    rules do not know it."""
    if rules.rules is None:
        return None
    try:
        spec = spec_of_axes(rules, Axes(name), None, local_view(MeshView(dict(mesh.shape), mesh)))
    except ShardingError:
        return None
    return mesh_axes(spec.partitions[0])
