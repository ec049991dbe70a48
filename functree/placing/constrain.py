"""Traced arrays and a layout ─► the same arrays, constrained to the shardings of the layout."""

from collections.abc import Sequence
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.errors import ShardingError
from functree.layout.constraint import constrained
from functree.layout.layout import LayoutLike, LayoutTree, as_layout
from functree.layout.meshes import MeshView, current_mesh, mesh_view
from functree.layout.placement import first_mesh
from functree.layout.plan.resolver import agreed_view, plan_leaves, read_for
from functree.layout.prefix import Part, broadcast
from functree.parameters import check_tree
from functree.placing.ambient import ambient_axis_rules
from functree.placing.named_arrays import named_arrays
from functree.tree.arrays import is_array
from functree.tree.axes import Axes
from functree.tree.leaves import Leaves, read

T = TypeVar("T")


def constrain(tree: T, layout: str | Axes | LayoutTree, rules: LayoutLike = None) -> T:
    """Constrain the sharding of arrays inside jit.

    On Auto mesh axes this is a constraint for the compiler, on Explicit mesh axes a reshard. Manual mesh axes are left
    out of the specs. Without a mesh it does nothing, so the same model also runs on one device.

    Args:
        tree: an array, or a tree of arrays.
        layout: the axes of a bare array (`"batch seq embed"`), or a layout for a tree.
        rules: the rules for these axes; the ambient rules if not given. Only the `AxisRules` of a layout are used:
            `FSDP` and specs are written for parameters.

    Raises:
        ShardingError: a size that its mesh axes do not divide (JAX alone replicates such an array silently); an axis
            that no rule lays out; a mesh but no rules; a mesh that was entered by `with mesh:`.

    Examples:
        >>> rules = ft.AxisRules({"batch": "data", "embed": None})
        >>> with jax.set_mesh(ft.make_mesh(data=8)), ft.axis_rules(rules):
        ...     jax.jit(lambda x: ft.constrain(x * 2, "batch embed"))(jnp.ones((8, 4))).sharding.spec
        P('data',)
    """
    check_tree("constrain", tree)
    if rules is not None:
        as_layout(rules)
    if isinstance(layout, str | Axes):
        if not is_array(tree):
            kind = type(tree).__name__
            raise ShardingError(f'"{layout}" names the dimensions of a bare array, but this is a {kind}: give a layout')
        leaves = named_arrays(read(tree), tree, layout)
        by_axes = ambient_axis_rules() if rules is None else as_layout(rules).by_axes
        parts = [] if by_axes is None else broadcast(by_axes, tree)
    else:
        leaves, parts = read_for(tree, layout)
    mesh = _find_mesh(leaves, parts)
    if mesh is None:
        return tree
    if not parts:
        raise ShardingError(
            f"there is a mesh {mesh_view(mesh)} but no rules to lay out `{leaves.leaves[0].axes}`: enter "
            "`with ft.axis_rules(rules):` with `AxisRules`, or pass them as `rules=`"
        )
    # Shapes are local along Manual axes: for the check of divisibility these axes count as one device.
    manual = set(getattr(mesh, "manual_axes", ()))
    sizes = dict(agreed_view(mesh, parts).sizes)
    sizes.update((name, 1) for name in manual & sizes.keys())
    planned = plan_leaves(leaves, parts, MeshView(sizes, mesh))
    pairs = zip(leaves.leaves, planned.rows, strict=True)
    values = [constrained(leaf.value, mesh, row.spec or PartitionSpec(), row.memory_kind) for leaf, row in pairs]
    return leaves.skeleton.fill(values)


def _find_mesh(leaves: Leaves, parts: Sequence[Part]) -> Mesh | AbstractMesh | None:
    """The ambient mesh, else the mesh of the layout, else that of the arrays."""
    mesh = current_mesh()
    own = next((part.layout.own_mesh for part in parts if part.layout.own_mesh is not None), None)
    if mesh is not None:
        # The ambient mesh of a trace may be abstract, and the same mesh in the layout have its devices.
        return own if isinstance(own, Mesh) and own.abstract_mesh == mesh else mesh
    if own is not None:
        return own
    values = [leaf.value for leaf in leaves.leaves if isinstance(leaf.value, jax.Array)]
    return first_mesh(values)
