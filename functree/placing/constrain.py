"""Traced arrays ─► the same arrays, with a sharding from here on."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from functree.errors import ShardingError
from functree.layout.layout import LayoutLike, LayoutTree
from functree.layout.meshes import MeshView, current_mesh
from functree.layout.placement import first_mesh
from functree.layout.plan.resolver import agreed_view, plan_leaves, read_for
from functree.layout.plan.row import Row
from functree.layout.prefix import Part, broadcast
from functree.layout.specs import without
from functree.placing.ambient import ambient_rules
from functree.placing.shard import named_array
from functree.tree.axes import Axes
from functree.tree.leaves import Leaves

T = TypeVar("T")


def constrain(tree: T, layout: str | Axes | LayoutTree, rules: LayoutLike = None) -> T:
    """Say, inside jit, how arrays are sharded from here on.

    On Auto axes a constraint for the compiler, on Explicit axes a reshard; axes that are Manual already are left out.
    Without a mesh it does nothing, so that a model runs unchanged on a laptop.

    Args:
        tree: an array, or a tree of them.
        layout: the axes of a bare array (`"batch seq embed"`), or a layout for a tree.
        rules: for axes; the ambient rules if not given.

    Raises:
        ShardingError: sizes that do not divide (JAX alone replicates those silently); names that no rule places;
            a mesh and no rules; a mesh that was entered by `with mesh:`.

    Examples:
        >>> rules = ft.AxisRules({"batch": "data", "embed": None})
        >>> with jax.set_mesh(ft.make_mesh(data=8)), ft.axis_rules(rules):
        ...     jax.jit(lambda x: ft.constrain(x * 2, "batch embed"))(jnp.ones((8, 4))).sharding.spec
        P('data',)
    """
    if isinstance(layout, str | Axes):
        leaves = named_array(tree, layout)
        by_name = rules if rules is not None else ambient_rules()
        parts = [] if by_name is None else broadcast(by_name, tree)
    else:
        leaves, parts = read_for(tree, layout)
    mesh = _mesh_here(leaves, parts)
    if mesh is None:
        return tree
    if not parts:
        raise ShardingError(
            f"there is a mesh {MeshView(dict(mesh.shape))} and no rules to place `{leaves.leaves[0].axes}`: enter "
            "`with ft.axis_rules(rules):`, or pass `rules=`"
        )
    # What is manual cannot be split here: shapes are local along it.
    manual = set(getattr(mesh, "manual_axes", ()))
    sizes = {name: 1 if name in manual else size for name, size in agreed_view(mesh, parts).sizes.items()}
    planned = plan_leaves(leaves, parts, MeshView(sizes, mesh))
    pairs = zip(leaves.leaves, planned.rows, strict=True)
    return leaves.skeleton.fill([_constrained(leaf.value, row, mesh) for leaf, row in pairs])


def _mesh_here(leaves: Leaves, parts: Sequence[Part]) -> Mesh | AbstractMesh | None:
    """The ambient mesh, else the one that the layout or the arrays' own types bring along."""
    mesh = current_mesh()
    if mesh is not None:
        return mesh
    own = [part.layout.own_mesh for part in parts if part.layout.own_mesh is not None]
    if own:
        return own[0]
    values = [leaf.value for leaf in leaves.leaves if isinstance(leaf.value, jax.Array)]
    return first_mesh(values)


def _constrained(value: Any, row: Row, mesh: Mesh | AbstractMesh) -> Any:
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    spec = row.spec if row.spec is not None else PartitionSpec()

    def along(wanted: AxisType) -> NamedSharding:
        others = {name for name, kind in kinds.items() if kind != wanted}
        return NamedSharding(mesh, without(spec, others))

    if AxisType.Explicit in kinds.values():
        value = jax.sharding.reshard(value, along(AxisType.Explicit))
    if AxisType.Auto in kinds.values():
        value = jax.lax.with_sharding_constraint(value, along(AxisType.Auto))
    if row.memory_kind == "pinned_host":
        value = jax.device_put(value, jax.memory.Space.Host)
    return value
