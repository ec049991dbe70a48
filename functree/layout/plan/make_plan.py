"""`plan` chooses and checks the spec of each array of a tree.

A tree, a layout and a mesh ─► a `Plan`, which has one row for each leaf.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from functree.argument_checks import FLAG, check_tree
from functree.argument_checks import check as check_values
from functree.devices.meshes import (
    MeshLike,
    MeshView,
    agreed_mesh,
    agrees,
    compared_text,
    mesh_view,
)
from functree.errors import RuleError, ShardingError
from functree.labels.leaf import Leaf
from functree.labels.leaves import Leaves, read
from functree.labels.training_state import Scope, label_paths
from functree.layout.decide import Decisions, decide_parts
from functree.layout.decision import Decision, local_shape, parts_over, refuse
from functree.layout.layout import LayoutTree, Part, broadcast, merge_names, own_meshes
from functree.layout.plan.live_arrays import live_rows
from functree.layout.plan.plan import Plan
from functree.layout.plan.row import Row, row_of


def plan(tree: Any, layout: LayoutTree = ..., mesh: MeshLike = None, *, check: bool = True) -> Plan:
    """Choose and check the spec of each array of a tree, without using devices.

    Args:
        tree: concrete or abstract arrays, in modules and containers.
        layout: a layout, or a prefix tree of layouts. Without it, the plan shows how the arrays are
            sharded now.
        mesh: a `Mesh`, an `AbstractMesh` or a dict of sizes. By default, the mesh in the layout if
            there is one, and otherwise the current mesh.
        check: whether problems raise an error. If False, they are in `plan.problems`.

    Raises:
        ShardingError: if leaves cannot be laid out; the error lists all problems.
        ShardingError: if there is no mesh.
        ShardingError: if the layout is for a different mesh.
        ShardingError: if `layout` is left out and the arrays are on a different mesh.
        FunctreeError: if `tree` is a class, or a function that was not called.
        RuleError: if `layout` is None.
        RuleError: if `layout` is not a layout.
        RuleError: if the layout is a prefix tree that does not fit the tree's structure.

    Examples:
        >>> class MLP(eqx.Module):
        ...     up: Float[Array, "embed hidden"]
        >>> abstract = MLP(jax.ShapeDtypeStruct((16, 64), "float32"))
        >>> rules = ft.AxisRules({"hidden": "model", "embed": None})
        >>> row = ft.plan(abstract, rules, {"data": 2, "model": 4})["up"]
        >>> row.spec, row.reason
        (P(None, 'model'), 'embed→None, hidden→model')
    """
    check_tree("plan", tree)
    check_values("plan: invalid arguments", check=(check, FLAG))
    if layout is ...:
        return _live_plan(tree, mesh)
    if layout is None:
        raise RuleError(
            "plan: the layout is None: leave it out to see how the arrays are sharded now, or "
            "write `P()` to replicate them"
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
    """Plan a tree, with the options of `plan_leaves`."""
    leaves, parts = read_for(tree, layout)
    view = agreed_mesh(mesh, own_meshes(parts))
    return plan_leaves(
        leaves, parts, view, check=check, same=same, allow_unspecified=allow_unspecified
    )


def read_for(tree: Any, layout: LayoutTree) -> tuple[Leaves, list[Part]]:
    """Return the leaves of a tree, with the names that a layout gives, and the layout's parts."""
    parts = broadcast(layout, tree)
    hints = {part.path: part.layout.hint for part in parts if part.layout.hint is not None}
    return read(tree, merge_names(part.layout for part in parts), hints), parts


def plan_leaves(
    leaves: Leaves,
    parts: Sequence[Part],
    view: MeshView,
    *,
    check: bool = True,
    same: Sequence[int] | None = None,
    allow_unspecified: bool = False,
) -> Plan:
    """Plan the leaves of a tree.

    Args:
        leaves: the leaves of a tree.
        parts: the layouts of the tree, in the order of their leaves.
        view: the mesh.
        check: whether problems raise an error.
        same: one number for each leaf, as in `decide_parts`.
        allow_unspecified: whether an array may have no layout, as in `decide_parts`.
    """
    decisions = decide_parts(leaves, parts, view, same=same, allow_unspecified=allow_unspecified)
    return plan_decisions(leaves, decisions, view, check=check)


def plan_decisions(
    leaves: Leaves, decided: Decisions, view: MeshView, *, check: bool = True
) -> Plan:
    """Make a plan from decisions; problems raise an error if `check` is True."""
    if decided.problems and check:
        raise refuse(decided.problems, view)
    rows = _rows(decided.leaves, decided.decisions, view)
    unused_names = [cls.__name__ for cls in leaves.unused]
    return Plan(rows, leaves.skeleton, view, decided.problems, decided.unused, unused_names)


def _rows(leaves: Sequence[Leaf], decisions: Sequence[Decision], view: MeshView) -> list[Row]:
    """Return one row for each leaf."""
    # Most leaves have equal decisions, and share the computed values. The key includes the shape
    # and dtype, which may differ between such leaves.
    known: dict[tuple[Any, ...], Row] = {}
    rows: list[Row] = []
    for leaf, decision in zip(leaves, decisions, strict=True):
        shape, dtype = leaf.value.shape, leaf.value.dtype
        key = decision, shape, dtype
        if key not in known:
            known[key] = _row(leaf, decision, view)
        rows.append(Row(leaf.path, shape, dtype, leaf.axes, *known[key][4:]))
    return rows


def _row(leaf: Leaf, decision: Decision, view: MeshView) -> Row:
    """Return the row of a leaf that is sharded according to a decision."""
    local = local_shape(leaf.shape, decision.mesh_axes, view)
    parts = parts_over(chain.from_iterable(decision.mesh_axes), view)
    spec = decision.spec if decision.specified else None
    copies = max(1, view.devices // parts)
    row = row_of(leaf, spec, decision.reason, local, copies, decision.memory_kind)
    return row._replace(follows=decision.follows)


def _live_plan(tree: Any, mesh: MeshLike) -> Plan:
    """Make a plan that shows how the arrays are sharded now."""
    leaves = read(tree)
    labeled = label_paths(leaves.leaves, leaves.training, Scope())
    rows, live_mesh = live_rows(labeled)
    where = live_mesh if mesh is None else mesh
    # If no array is on a mesh, as on a single device, the plan's mesh has no axes.
    view = MeshView({}) if where is None else mesh_view(where)
    if live_mesh is not None and not agrees(view, live_mesh):
        text = f"the arrays are on the mesh {compared_text(live_mesh, view)}, but `mesh` is {view}"
        raise ShardingError(
            text + ": leave `mesh` out to see how the arrays are sharded now, or pass a layout, too"
        )
    return Plan(rows, leaves.skeleton, view)
