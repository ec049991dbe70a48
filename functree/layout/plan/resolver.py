"""A tree, a layout and a mesh ─► a `Plan`: one row for each leaf, with its spec and the reason."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.errors import Problem, RuleError, ShardingError
from functree.layout.decision import Decision
from functree.layout.layout import LayoutTree, merge_names
from functree.layout.meshes import MeshLike, MeshView, mesh_view
from functree.layout.plan.live import live_rows
from functree.layout.plan.plan import NAMES, Plan
from functree.layout.plan.row import Row
from functree.layout.prefix import Part, broadcast
from functree.layout.specs import spec_text
from functree.layout.validation import leaf_problems, local_shape, near_misses, refuse
from functree.parameters import FLAG, check_tree
from functree.parameters import check as check_values
from functree.tree.leaf import Leaf
from functree.tree.leaves import Leaves, read
from functree.tree.paths import Path


def plan(tree: Any, layout: LayoutTree = ..., mesh: MeshLike = None, *, check: bool = True) -> Plan:
    """Choose the spec of each array of a tree, and check it. No device is used.

    Args:
        tree: concrete or abstract arrays, in modules and containers.
        layout: a layout, or a prefix tree of layouts. If it is left out, the plan shows how the arrays are sharded now.
        mesh: a `Mesh`, an `AbstractMesh`, a dict of sizes, or None for the current mesh.
        check: whether to raise an error for problems. If it is False, they are in `plan.problems`.

    Raises:
        ShardingError: leaves cannot be laid out (the error lists all problems), or there is no mesh; without a layout,
            the arrays are on another mesh than `mesh`.
        FunctreeError: `tree` is a class, or a function that was not called.
        RuleError: the layout is None, or not a layout, or a prefix tree that does not have the structure of the tree.

    Examples:
        >>> class MLP(eqx.Module):
        ...     up: Float[Array, "embed hidden"]
        >>> abstract = MLP(jax.ShapeDtypeStruct((16, 64), "float32"))
        >>> row = ft.plan(abstract, ft.AxisRules({"hidden": "model", "embed": None}), {"data": 2, "model": 4})["up"]
        >>> row.spec, row.reason
        (P(None, 'model'), 'embed→None, hidden→model')
    """
    check_tree("plan", tree)
    check_values("plan cannot be made", check=(check, FLAG))
    if layout is ...:
        return _live_plan(tree, mesh)
    if layout is None:
        raise RuleError(
            "plan: the layout is None: leave it out to see how the arrays are sharded now, or write `P()` to replicate"
        )
    return plan_tree(tree, layout, mesh, check=check)


def plan_tree(
    tree: Any,
    layout: LayoutTree,
    mesh: MeshLike,
    *,
    check: bool = True,
    same: Sequence[int] | None = None,
    allow_unspecified: bool = False,
) -> Plan:
    """The plan of a tree; the options are those of `plan_leaves`."""
    leaves, parts = read_for(tree, layout)
    view = agreed_view(mesh, parts)
    return plan_leaves(leaves, parts, view, check=check, same=same, allow_unspecified=allow_unspecified)


def read_for(tree: Any, layout: LayoutTree) -> tuple[Leaves, list[Part]]:
    """The leaves of a tree, with the names that a layout gives them, and the parts of the layout."""
    parts = broadcast(layout, tree)
    return read(tree, merge_names(part.layout.given_names for part in parts)), parts


def plan_leaves(
    leaves: Leaves,
    parts: Sequence[Part],
    view: MeshView,
    *,
    check: bool = True,
    same: Sequence[int] | None = None,
    allow_unspecified: bool = False,
) -> Plan:
    """The plan of leaves that have been read.

    Args:
        leaves: the leaves of a tree.
        parts: the layouts of the tree, in the order of their leaves.
        view: the mesh.
        check: whether to raise an error for problems.
        same: for each abstract leaf, a number that is the same for leaves that are the same array.
        allow_unspecified: whether an array whose layout is `None` has a row without a spec, instead of an error.
    """
    decisions: list[Decision] = []
    problems, known = list(leaves.problems), list[Leaf]()
    parts_of: dict[Problem, list[Part]] = {}
    unused: list[str] = []
    for part, group in _grouped(leaves, parts):
        found = part.layout.resolve(group, view)
        known += found.leaves or group
        decisions += found.decisions
        for problem in found.problems:
            parts_of.setdefault(problem, []).append(part)
        unused += found.unused
    # Two parts of a tree may have the same layout, and report the same problem of it.
    problems += [_of_parts(problem, own) for problem, own in parts_of.items()]
    unused = _absent(unused, leaves.leaves)
    no_names = [f"{NAMES}{cls.__name__}" for cls in leaves.unused]
    problems += near_misses(known, decisions, unused)
    # Many leaves share one decision object, so each object is examined once. Most have no sharded dimension and no
    # fault, and then nothing can be wrong with the leaf.
    clean: dict[int, bool] = {}
    for leaf, decision in zip(known, decisions, strict=True):
        if not decision.specified and not allow_unspecified:
            problems.append(leaf.problem(*UNSPECIFIED))
        if id(decision) not in clean:
            clean[id(decision)] = _is_clean(decision)
        if not clean[id(decision)]:
            problems += leaf_problems(leaf, decision, view)
    rows = _rows(known, decisions, view)
    problems += _conflicting(known, rows, same)
    if problems and check:
        raise refuse(problems, view)
    return Plan(rows, leaves.skeleton, view, problems, [*unused, *no_names])


def _of_parts(problem: Problem, parts: Sequence[Part]) -> Problem:
    """A problem of a layout itself, with the path of the subtree that the layout is for if there is only one."""
    path = parts[0].path if len(parts) == 1 else None
    if problem.path is not None or not path:
        return problem
    return problem._replace(what=f"{problem.what}, for `{path}`")


UNSPECIFIED = ("no layout was given for this array (`None`)", "write `P()` to replicate it")


def _is_clean(decision: Decision) -> bool:
    """Whether nothing can be wrong with a leaf that has this decision: it is unsharded, and no layout found a fault."""
    whole = all(not dimension.mesh_axes and dimension.fault is None for dimension in decision.dimensions)
    return whole and not decision.faults


def _absent(names: Sequence[str], leaves: Sequence[Leaf]) -> list[str]:
    """The names that no leaf of the whole tree has. Each layout reports those that its own part does not have."""
    if not names:
        return []
    present = {name for axes in {leaf.axes for leaf in leaves} for name in axes}
    return [name for name in dict.fromkeys(names) if name not in present]


def _grouped(leaves: Leaves, parts: Sequence[Part]) -> Iterator[tuple[Part, Sequence[Leaf]]]:
    """The arrays that each layout is for, with the paths that its patterns are matched with."""
    if len(parts) == 1 and not parts[0].path:
        yield parts[0], leaves.leaves
        return
    # A part has a number of leaves of any kind, and `places` are the indices of the arrays among these.
    places = leaves.skeleton.places
    end_of_part, start = 0, 0
    for part in parts:
        end_of_part += part.leaves
        end = start
        while end < len(places) and places[end] < end_of_part:
            end += 1
        depth = len(part.path)
        group = leaves.leaves[start:end]
        yield part, [leaf._replace(aliases=tuple(Path(p[depth:]) for p in leaf.patterned)) for leaf in group]
        start = end


def _rows(leaves: Sequence[Leaf], decisions: Sequence[Decision], view: MeshView) -> list[Row]:
    """One row for each leaf. Leaves that are sharded alike, with one shape and dtype, share the computed values."""
    known: dict[tuple[Any, ...], _Sizes] = {}
    # Most leaves share one decision object, which is told faster than that two of them shard alike.
    by_decision: dict[tuple[Any, ...], _Sizes] = {}
    rows = []
    for leaf, decision in zip(leaves, decisions, strict=True):
        value = leaf.value
        shape, dtype = value.shape, value.dtype
        key = (id(decision), shape, dtype)  # leaves of different shapes may share one decision object
        sizes = by_decision.get(key)
        if sizes is None:
            alike = (decision.mesh_axes, decision.specified, shape, dtype)
            sizes = known.get(alike)
            if sizes is None:
                sizes = known[alike] = _sizes(shape, dtype, decision, view)
            by_decision[key] = sizes
        row = Row(
            leaf.path,
            shape,
            dtype,
            leaf.axes,
            spec=sizes.spec,
            reason=decision.reason,
            local_shape=sizes.local_shape,
            bytes_global=sizes.total,
            bytes_per_device=sizes.per_device,
            copies=sizes.copies,
            memory_kind=decision.memory_kind,
        )
        rows.append(row)
    return rows


class _Sizes(NamedTuple):
    """The attributes of a row that are computed from its shape, its dtype and the decision about it."""

    spec: PartitionSpec | None
    local_shape: tuple[int, ...]
    total: int
    per_device: int
    copies: int


def _sizes(shape: tuple[int, ...], dtype: Any, decision: Decision, view: MeshView) -> _Sizes:
    mesh_axes = decision.mesh_axes
    local = local_shape(shape, mesh_axes, view)
    split = math.prod(view.sizes.get(axis, 1) for axes in mesh_axes for axis in axes)
    spec = decision.spec if decision.specified else None
    total, per_device = math.prod(shape) * dtype.itemsize, math.prod(local) * dtype.itemsize
    return _Sizes(spec, local, total, per_device, max(1, view.devices // split))


def _conflicting(leaves: Sequence[Leaf], rows: Sequence[Row], same: Sequence[int] | None) -> list[Problem]:
    """The problems of arrays that are at two paths of the tree with two different specs, such as tied weights."""
    first: dict[int, tuple[Path, _Place]] = {}
    found = []
    for i, (leaf, row) in enumerate(zip(leaves, rows, strict=True)):
        # One `ShapeDtypeStruct` may describe several arrays, so its identity says nothing.
        if same is None and isinstance(leaf.value, jax.ShapeDtypeStruct | np.generic):
            continue
        # No layout was given for this path (`None`), so every sharding is right for it.
        if row.spec is None:
            continue
        array = id(leaf.value) if same is None else same[i]
        here: _Place = (row.spec, row.memory_kind)
        path, there = first.setdefault(array, (row.path, here))
        if here != there:
            why = f"is the same array as `{path}`, and is laid out {_where(*here)} here and {_where(*there)} there"
            found.append(leaf.problem(why, "give both paths one spec, or make two arrays"))
    return found


_Place = tuple[PartitionSpec, str | None]
"""The spec and the memory kind of a row."""


def _where(spec: PartitionSpec, memory_kind: str | None) -> str:
    """The spec and the memory kind of a row, for messages."""
    where = spec_text(spec)
    return where if memory_kind is None else f"{where} in {memory_kind}"


def agreed_view(mesh: MeshLike, parts: Sequence[Part]) -> MeshView:
    """The mesh that was given, or else the mesh of a `NamedSharding` or a plan among the layouts.

    Raises:
        ShardingError: there is no mesh, or two meshes are different.
    """
    own = [part.layout.own_mesh for part in parts if part.layout.own_mesh is not None]
    view = mesh_view(own[0] if mesh is None and own else mesh)
    for other in own:
        if not _agrees(view, other):
            its = _compared(other, view)
            raise ShardingError(f"the layout is for the mesh {its}, but the tree is laid out on {view}: use one mesh")
    return view


def _agrees(view: MeshView, other: Mesh | AbstractMesh) -> bool:
    """Whether a mesh may be the one of the view. An abstract mesh has no devices: only its shape is compared."""
    if dict(other.shape) != dict(view.sizes):
        return False
    if not isinstance(view.mesh, Mesh) or not isinstance(other, Mesh):
        return True
    return other == view.mesh


def _compared(other: Mesh | AbstractMesh, view: MeshView) -> str:
    """The text of a mesh that does not agree with a view."""
    its = mesh_view(other)
    return f"{its}, of other devices" if its.sizes == view.sizes else str(its)


def _live_plan(tree: Any, mesh: MeshLike) -> Plan:
    """A plan that shows how the arrays are sharded now."""
    leaves = read(tree)
    rows, found = live_rows(leaves.leaves)
    where = found if mesh is None else mesh
    # Arrays without a mesh, such as those on a single device, have a plan too.
    view = MeshView({}) if where is None else mesh_view(where)
    if found is not None and not _agrees(view, found):
        text = f"the arrays are on the mesh {_compared(found, view)}, but `mesh` is {view}: "
        raise ShardingError(text + "leave `mesh` out to see how the arrays are sharded now, or give a layout too")
    return Plan(rows, leaves.skeleton, view)
