"""`ft.shard` places concrete arrays according to a layout."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.tree_util import tree_flatten

from functree.argument_checks import FLAG, check, check_tree
from functree.devices.meshes import NO_MESH, MeshLike, agreed_mesh, without_devices
from functree.devices.placement import is_placed, refuse_deleted
from functree.errors import Problem, ShardingError, count
from functree.labels.leaves import AxesTree, Leaves, named_arrays
from functree.layout.layout import LayoutTree, own_meshes
from functree.layout.plan.make_plan import plan_leaves, read_for
from functree.layout.plan.plan import Plan
from functree.placing.across_processes import Values, place_across
from functree.placing.batch import batch_key

T = TypeVar("T")


def shard(
    tree: T,
    layout: LayoutTree,
    mesh: MeshLike = None,
    *,
    axes: AxesTree = None,
    local: bool = False,
) -> T:
    """Place concrete arrays according to a layout.

    Args:
        tree: arrays in modules and containers. Values that are not arrays stay as they are.
        layout: a layout, or a prefix tree of layouts.
        mesh: a mesh; by default the layout's mesh, or otherwise the current mesh.
        axes: the axes of bare arrays, which have no annotations: a string for one array, or a
            prefix tree such as `{"tokens": "batch seq", "mask": "batch seq"}`.
        local: whether each of several processes passes only its own rows: the part of each array
            that the process's devices hold. Otherwise, each process passes whole arrays, which must
            be equal in all processes.

    Returns:
        The tree with placed arrays. An array that already has its sharding is returned as the same
            object. An array at two paths stays one array.

    Raises:
        ShardingError: if the layout or the axes do not fit the tree.
        ShardingError: if an array is traced or abstract.
        ShardingError: if there is no mesh.
        ShardingError: if the layout is for a different mesh.
        ShardingError: if the mesh has no devices.
        ShardingError: if the mesh's devices are compile-only.
        ShardingError: if a process has no device in the mesh.
        FunctreeError: if an array is deleted.
        FunctreeError: if arrays or layouts differ between processes.
        RuleError: if `layout` is not a layout.
        RuleError: if the structure of `layout` or `axes` is not a prefix of the tree's structure.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> rules = ft.AxisRules({"batch": "data", "seq": None, "embed": None})
        >>> x = ft.shard(jnp.ones((4, 8)), rules, mesh, axes="batch embed")
        >>> x.sharding.spec
        P('data', None)
        >>> batch = {"tokens": np.ones((4, 16), int), "weight": np.ones(4)}
        >>> axes = {"tokens": "batch seq", "weight": "batch"}
        >>> ft.shard(batch, rules, mesh, axes=axes)["weight"].sharding.spec
        P('data',)
    """
    check_tree("shard", tree)
    check("shard: invalid arguments", local=(local, FLAG))
    if jax.process_count() > 1:
        return place_across(partial(_planned, tree, layout, mesh, axes), local)
    key = batch_key(tree, layout, mesh, axes)
    shardings = None if key is None else _SHARDINGS.get(key)
    if shardings is not None:
        arrays, structure = tree_flatten(tree)
        return structure.unflatten(_moved(arrays, shardings))
    leaves, planned = _planned(tree, layout, mesh, axes)
    shardings = list(map(planned.sharding, planned.rows))
    if key is not None:
        if len(_SHARDINGS) >= _REMEMBERED:
            _SHARDINGS.clear()
        _SHARDINGS[key] = shardings
    return leaves.skeleton.fill(moved_once(leaves.values, shardings))


_SHARDINGS: dict[tuple[Any, ...], list[NamedSharding]] = {}
_REMEMBERED = 256  # batches


def _moved(arrays: Sequence[Any], targets: Sequence[NamedSharding]) -> list[Any]:
    """Move the arrays of a batch, which are different objects, to their shardings."""
    # Many loops place one NumPy array in each step, and `device_put` is faster for an array than
    # for a list.
    if len(arrays) == 1 and type(arrays[0]) is np.ndarray:
        return [jax.device_put(arrays[0], targets[0])]
    return moved_once(arrays, targets)


def _planned(
    tree: Any,
    layout: LayoutTree,
    mesh: MeshLike,
    axes: AxesTree,
    values: Values | None = None,
    check: bool = True,
) -> tuple[Leaves, Plan]:
    """Read the leaves of a tree, and plan them on a mesh with devices.

    If `values` are given, their shapes are planned instead of the leaves' shapes.
    """
    leaves, parts = read_for(tree, layout)
    if axes is not None:
        leaves = named_arrays(leaves, tree, axes)
    _check_concrete(leaves)
    shaped = leaves
    if values is not None:
        pairs = zip(leaves.leaves, values, strict=True)
        shaped = replace(leaves, leaves=tuple(leaf._replace(value=value) for leaf, value in pairs))
    view = agreed_mesh(mesh, own_meshes(parts))
    planned = plan_leaves(shaped, parts, view, check=check)
    if planned.mesh is None:
        raise ShardingError(
            f"shard: arrays cannot be placed on mesh {planned.view}, which has no devices: "
            f"{NO_MESH}, where `mesh` is a `Mesh`"
        )
    missing = without_devices(planned.mesh)
    if missing is not None:
        raise ShardingError(f"shard: arrays cannot be placed, since {missing}")
    return leaves, planned


def moved_once(values: Sequence[Any], targets: Sequence[NamedSharding]) -> list[Any]:
    """Move arrays to their shardings. An array that occurs twice stays one array."""
    # One call of `device_put` moves all arrays.
    wanted = dict(zip(map(id, values), targets, strict=True))
    moving = {id(x): x for x in values if not is_placed(x, wanted[id(x)])}
    moved = jax.device_put(list(moving.values()), list(map(wanted.__getitem__, moving)))
    placed = dict(zip(moving, moved, strict=True))
    return [placed.get(id(x), x) for x in values]


# A union written with `|` in the loop would be created for each leaf.
_OF_NUMPY = (np.ndarray, np.generic)


def _check_concrete(leaves: Leaves) -> None:
    problems: list[Problem] = []
    for leaf in leaves.leaves:
        if isinstance(leaf.value, Tracer):
            why = "is traced, but `ft.shard` moves only concrete arrays"
            problems.append(leaf.problem(why, "inside jit, use `ft.constrain`"))
        elif isinstance(leaf.value, jax.ShapeDtypeStruct):
            why = "is abstract, but `ft.shard` moves only concrete arrays"
            problems.append(leaf.problem(why, "give it a sharding with `ft.abstract`"))
        # These checks take most of the time of a call that moves nothing, so they share one loop.
        elif not isinstance(leaf.value, _OF_NUMPY) and leaf.value.is_deleted():
            raise refuse_deleted("shard", leaves.paths, leaves.values)
    if problems:
        raise ShardingError(
            f"shard: {count(len(problems), 'leaf')} cannot be placed on devices", problems
        )
