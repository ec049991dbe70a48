"""Arrays ─► the same arrays where the layout says: `shard` outside of a trace, `constrain` inside."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from functree.errors import Problem, ShardingError, count
from functree.layout.layouts import merge_names
from functree.layout.meshes import NO_MESH, MeshView, current_mesh
from functree.layout.plan import agreed_view, plan_leaves, plan_tree
from functree.layout.prefix import Part, broadcast
from functree.transforms.ambient import ambient_rules, without
from functree.tree.axes import Axes
from functree.tree.leaves import Leaves, is_array, read


def shard(tree: Any, layout: Any, mesh: Any = None, *, axes: str | Axes | None = None) -> Any:
    """Put concrete arrays where a layout says.

    Args:
        tree: arrays in modules and containers; what is no array is not touched.
        layout: a layout, or a prefix tree of layouts.
        mesh: a mesh, or None for the current one.
        axes: the axes of a bare array, which has no annotation.

    Returns:
        The same tree. An array that lies so already is the same object, and one array at two places stays one.

    Raises:
        ShardingError: the tree cannot be laid out so; there is no mesh with devices; an array is traced or abstract.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> x = ft.shard(jnp.ones((4, 8)), ft.AxisRules({"batch": "data", "embed": None}), mesh, axes="batch embed")
        >>> x.sharding.spec
        P('data', None)
    """
    leaves = _named(tree, axes) if axes is not None else None
    _concrete(leaves or read(tree))
    planned = plan_tree(tree, layout, mesh, leaves=leaves)
    if not isinstance(planned.mesh, Mesh):
        raise ShardingError(f"arrays cannot be put on {planned.view}, which has no devices: {NO_MESH} with a `Mesh`")
    flat, _ = jax.tree_util.tree_flatten(tree)
    values = [flat[i] for i in planned.leaves.positions]
    targets = {id(x): planned.sharding(row) for x, row in zip(values, planned.rows, strict=True)}
    moving = {id(x): x for x in values if not lies_so(x, targets[id(x)])}
    moved = jax.device_put(list(moving.values()), [targets[i] for i in moving])
    placed = dict(zip(moving, moved, strict=True))
    return planned.leaves.fill(flat, [placed.get(id(x), x) for x in values])


def lies_so(value: Any, target: NamedSharding) -> bool:
    """Whether an array lies as a sharding says, so that nothing has to be done."""
    if not isinstance(value, jax.Array) or not value.committed or not isinstance(value.sharding, NamedSharding):
        return False
    here = value.sharding
    kinds = {here.memory_kind or "device", target.memory_kind or "device"}
    return here.mesh == target.mesh and len(kinds) == 1 and here.is_equivalent_to(target, value.ndim)


def _concrete(leaves: Leaves) -> None:
    problems = []
    for leaf in leaves.leaves:
        if isinstance(leaf.value, Tracer):
            why = "is traced, and `shard` moves concrete arrays"
            remedy = "inside jit and other transforms write `ft.constrain`"
        elif isinstance(leaf.value, jax.ShapeDtypeStruct):
            why = "is abstract, and `shard` moves concrete arrays"
            remedy = "give it a sharding with `ft.abstract`"
        else:
            continue
        problems.append(Problem(leaf.path, leaf.shape, leaf.text, why, remedy))
    if problems:
        raise ShardingError(f"{count(len(problems), 'leaf')} cannot be put on devices", problems)


def _named(tree: Any, axes: str | Axes) -> Leaves:
    """A bare array with axes given from outside."""
    if not is_array(tree):
        raise ShardingError(f'axes="{axes}" names a bare array\'s dimensions, and this is a {type(tree).__name__}')
    leaves, named = read(tree), Axes.of(axes)
    leaf = leaves.leaves[0]
    if len(named) != len(leaf.shape):
        why = f'"{named}" names {len(named)} dimensions, and it has {len(leaf.shape)}'
        problem = Problem(leaf.path, leaf.shape, leaf.text, why, "name each dimension")
        raise ShardingError("the axes do not fit", [problem])
    return Leaves((leaf._replace(axes=named, annotated=True, problem=None),), (), leaves.treedef, (0,), 1)


def constrain(tree: Any, layout: Any, rules: Any = None) -> Any:
    """Say, inside jit, how arrays lie from here on.

    On Auto axes a constraint for the compiler, on Explicit axes a reshard; axes that are Manual already are left out.
    Without a mesh it does nothing, so that a model runs unchanged on a laptop.

    Args:
        tree: an array, or a tree of them.
        layout: the axes of a bare array (`"batch seq embed"`), or a layout for a tree.
        rules: for axes; the ambient rules if not given.

    Raises:
        ShardingError: sizes that do not divide (JAX alone replicates those in silence); names that no rule places;
            a mesh and no rules; a mesh that was entered by `with mesh:`.

    Examples:
        >>> rules = ft.AxisRules({"batch": "data", "embed": None})
        >>> with jax.set_mesh(ft.make_mesh(data=8)), ft.axis_rules(rules):
        ...     jax.jit(lambda x: ft.constrain(x * 2, "batch embed"))(jnp.ones((8, 4))).sharding.spec
        P('data',)
    """
    if isinstance(layout, str | Axes):
        leaves = _named(tree, layout)
        layout = rules if rules is not None else ambient_rules()
        parts = [] if layout is None else broadcast(layout, tree)
    else:
        parts = broadcast(layout, tree)
        leaves = read(tree, merge_names(part.layout.given_names for part in parts))
    mesh = _mesh_here(leaves, parts)
    if mesh is None:
        return tree
    if not parts:
        raise ShardingError(
            f"there is a mesh {MeshView(dict(mesh.shape))} and no rules to place `{leaves.leaves[0].axes}`: enter "
            "`with ft.axis_rules(rules):`, or pass `rules=`"
        )
    # What is manual is not ours to split here: shapes are local along it.
    manual = set(getattr(mesh, "manual_axes", ()))
    sizes = {name: 1 if name in manual else size for name, size in agreed_view(mesh, parts).sizes.items()}
    planned = plan_leaves(leaves, parts, MeshView(sizes, mesh))
    flat = jax.tree_util.tree_leaves(tree)
    values = [flat[i] for i in planned.leaves.positions]
    return planned.leaves.fill(flat, [_constrained(x, row, mesh) for x, row in zip(values, planned.rows, strict=True)])


def _mesh_here(leaves: Leaves, parts: Sequence[Part]) -> Any:
    """The ambient mesh, else the one that the layout or the arrays' own types bring along."""
    mesh = current_mesh()
    if mesh is not None:
        return mesh
    own = [part.layout.own_mesh for part in parts if part.layout.own_mesh is not None]
    if own:
        return own[0]
    for leaf in leaves.leaves:
        if isinstance(leaf.value, jax.Array):
            typed = getattr(jax.typeof(leaf.value).sharding, "mesh", None)
            if typed is not None and not typed.empty:
                return typed
    return None


def _constrained(value: Any, row: Any, mesh: Any) -> Any:
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def of(*wanted: AxisType) -> PartitionSpec:
        return without(row.spec, {name for name, kind in kinds.items() if kind not in wanted})

    if AxisType.Explicit in kinds.values():
        value = jax.sharding.reshard(value, NamedSharding(mesh, of(AxisType.Explicit)))
    if AxisType.Auto in kinds.values():
        value = jax.lax.with_sharding_constraint(value, NamedSharding(mesh, of(AxisType.Auto)))
    if row.memory_kind == "pinned_host":
        value = jax.device_put(value, jax.memory.Space.Host)
    return value
