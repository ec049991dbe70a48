"""`batch_key` makes a hashable key of a tree of bare arrays in plain containers, and its layout.

A loop places a new batch in every step, and its batches usually have the same form. Planning each
batch would take several times as long as placing it, so `ft.shard` caches shardings by form.
"""

from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten

from functree.devices.meshes import MeshLike, MeshView, current_mesh
from functree.devices.placement import is_concrete
from functree.devices.specs import mesh_axes
from functree.errors import ShardingError
from functree.labels.leaves import AxesTree
from functree.layout.fsdp import FSDP
from functree.layout.layout import Composition, Layout, LayoutTree
from functree.layout.rules import AxisRules, spec_of_axes
from functree.placing.constrain import local_view
from functree.tree.axes import Axes


def batch_key(
    tree: Any, layout: LayoutTree, mesh: MeshLike, axes: AxesTree
) -> tuple[Any, ...] | None:
    """Return the structure, types, layout, axes and mesh of a batch: everything it is planned by.

    Return None if the tree must be planned, because it contains a module, a leaf that is not a
    concrete array, or one array at two paths. It must also be planned if its layout may depend on
    more than shapes and names, which is possible for a layout function.
    """
    if not _is_batch(tree):
        return None
    arrays, structure = tree_flatten(tree)
    layouts, layout_structure = tree_flatten(layout, is_leaf=_is_plain_layout)
    texts, axes_structure = tree_flatten(axes)
    if len(set(map(id, arrays))) != len(arrays) or not all(map(_is_plain_layout, layouts)):
        return None
    where = current_mesh() if mesh is None else mesh
    if not isinstance(where, Mesh | None) or not all(isinstance(x, str | Axes) for x in texts):
        return None  # planning raises an error
    types = tuple([(x.shape, x.dtype) for x in arrays])
    return structure, types, tuple(layouts), layout_structure, tuple(texts), axes_structure, where


def _is_batch(tree: Any) -> bool:
    """Return whether a tree has only concrete arrays, in plain containers."""
    kind = type(tree)
    if kind is dict:
        return all(map(_is_batch, tree.values()))
    if kind is list or kind is tuple:
        return all(map(_is_batch, tree))
    return kind is np.ndarray or (is_concrete(tree) and not tree.is_deleted())


def _is_plain_layout(layout: Any) -> bool:
    """Return whether a layout depends only on the names and shapes of arrays."""
    if isinstance(layout, Composition):
        return all(map(_is_plain_layout, layout.parts))
    return isinstance(layout, PartitionSpec | NamedSharding | AxisRules | FSDP)


def axes_of_name(name: str, rules: Layout, mesh: Mesh | AbstractMesh) -> tuple[str, ...] | None:
    """Return the mesh axes that shard a dimension of this name, or None if no rule covers it."""
    if rules.rules is None:
        return None
    try:
        spec = spec_of_axes(rules, Axes(name), None, local_view(MeshView(dict(mesh.shape), mesh)))
    except ShardingError:
        return None
    return mesh_axes(spec.partitions[0])
