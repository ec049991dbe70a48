"""`plan` decides how each leaf of a tree is sharded, collects the problems, and makes a `Plan`.

A tree, layouts and a mesh ─► labeled leaves ─► a `Decision` for each leaf ─► a `Plan`, with one row
for each leaf. A layout applies to leaves that follow no other leaf. A leaf that follows a
parameter, such as an optimizer's moment, gets the parameter's decision unless the layout claims the
leaf. Without a layout, the plan shows how the arrays are sharded now, as in notebooks.
"""

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, starmap
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from functree.argument_checks import FLAG, check_tree
from functree.argument_checks import check as check_values
from functree.devices.meshes import (
    Device,
    MeshLike,
    MeshView,
    agrees,
    compared_text,
    mesh_view,
    of_rank,
    spec_of,
    spec_text,
)
from functree.devices.placement import other_memory
from functree.errors import Problem, RuleError, ShardingError, count, listed, warn
from functree.labels.filters import Filter, first_name
from functree.labels.leaves import FollowedLeaf, Leaf, Leaves, is_bare, is_in_module, read
from functree.labels.training_state import Scope, label_paths, names_field
from functree.layout.decision import (
    WHOLE,
    Decision,
    Dimension,
    absent,
    leaf_problems,
    near_misses,
    refuse,
)
from functree.layout.layout import (
    Layout,
    LayoutTree,
    Part,
    asks_more,
    read_on_mesh,
    walk,
)
from functree.layout.plan.plan import Plan
from functree.layout.plan.text import Row, row_of
from functree.layout.rules import mentioned_axes, own_problems
from functree.layout.state_sharding import StateSharding, two_readings, unused_filters, used_filters
from functree.report.table import bytes_text
from functree.tree.arrays import Tree, is_array
from functree.tree.interfaces import TrainingState
from functree.tree.paths import Path


class Decisions(NamedTuple):
    """The decisions about the leaves of a tree.

    Attributes:
        leaves: the labeled leaves.
        decisions: one for each leaf.
        problems: the problems of the tree and its layouts.
        unused: the axes that rules name but no leaf has.
    """

    leaves: Sequence[Leaf]
    decisions: Sequence[Decision]
    problems: Sequence[Problem]
    unused: Sequence[str]


@dataclass(frozen=True)
class Group:
    """The leaves to which one layout applies.

    Attributes:
        part: the layout and its subtree.
        leaves: the leaves.
        has_training_state: whether the layout's subtree contains a training state.
        decisions: one for each leaf.
    """

    part: Part
    leaves: Sequence[Leaf]
    has_training_state: bool
    decisions: Sequence[Decision]

    @cached_property
    def reached(self) -> Sequence[Layout]:
        """The layout, and the layouts in it that made decisions."""
        return list(self.part.layout.reached(self.decisions))

    @cached_property
    def mentioned(self) -> Collection[str]:
        """The axes that the layout's rules name."""
        return mentioned_axes(self.reached)


UNSPECIFIED = ("no layout was given for this array (`None`)", "write `P()` to replicate this array")


def decide_parts(
    leaves: Leaves,
    parts: Sequence[Part],
    view: MeshView,
    *,
    same: Sequence[int] | None = None,
    allow_unspecified: bool = False,
) -> Decisions:
    """Decide how the leaves of a tree are sharded.

    Args:
        leaves: the leaves.
        parts: the layouts of the tree, in the order of their leaves.
        view: the mesh.
        same: one number for each leaf. Leaves that are the same array have the same number. Pass
            the numbers for abstract leaves, because object identity does not show whether two of
            them stand for the same array.
        allow_unspecified: whether an array may have no layout (`None`).
    """
    groups = list(grouped(leaves, parts, view))
    known = [leaf for group in groups for leaf in group.leaves]
    decisions = [decision for group in groups for decision in group.decisions]
    problems = [*leaves.problems, *_layout_problems(groups, view)]
    # A rule that one part does not use may be used in another part.
    mentioned: dict[str, None] = {}
    for group in groups:
        mentioned |= dict.fromkeys(group.mentioned)
    unused = absent(mentioned, leaves.leaves)
    near, warnings = near_misses(known, decisions, unused)
    problems += near
    for text in warnings:
        warn(text)
    # Leaves that share a decision object have equal sizes in the sharded dimensions. If one of them
    # has no problem, the others have none either.
    fine: set[int] = set()
    for group in groups:
        for leaf, decision in zip(group.leaves, group.decisions, strict=True):
            if not decision.specified and not allow_unspecified:
                problems.append(leaf.problem(*UNSPECIFIED))
            if id(decision) not in fine:
                faulty = leaf_problems(leaf, decision, view, group.mentioned)
                problems += faulty
                if not faulty:
                    fine.add(id(decision))
    problems += _conflicting(known, decisions, same)
    return Decisions(known, decisions, problems, unused)


def decide(part: Part, leaves: Sequence[Leaf], view: MeshView) -> list[Decision]:
    """Return the decisions about the leaves of one layout.

    The layout applies to leaves that follow no other leaf, and to leaves that it claims. Every
    other leaf gets the decision of the leaf that it follows.
    """
    layout = part.layout
    # If an argument is one array, its only leaf is bare.
    if part.for_arrays is not None and all(map(is_bare, leaves)):
        layout = part.for_arrays
    asking = asks_more(layout)
    known: dict[Hashable, Decision] = {}
    decided: dict[int, Decision] = {}
    followers: list[int] = []
    for i, leaf in enumerate(leaves):
        if leaf.follows is not None and not layout.claims(leaf):
            followers.append(i)
            continue
        # Identical layers share one decision.
        key = leaf.kind, layout.asks(leaf) if asking else None
        if key not in known:
            known[key] = layout.decide(leaf, None, view)
        decided[i] = known[key]
    # Only a training state has followers.
    if followers:
        parameters = {leaves[i].path: decision for i, decision in decided.items()}
        followed = follow([leaves[i] for i in followers], parameters)
        decided |= dict(zip(followers, followed, strict=True))
    return [decided[i] for i in range(len(leaves))]


def _layout_problems(groups: Sequence[Group], view: MeshView) -> list[Problem]:
    """Return the problems of layouts, as opposed to problems of single leaves."""
    problems: dict[Problem, list[Part]] = {}
    for same in _by_layout(groups):
        leaves = [leaf for group in same for leaf in group.leaves]
        # Arguments that share a layout share the layout object.
        layouts = {id(layout): layout for group in same for layout in group.reached}.values()
        for problem in chain(own_problems(layouts, leaves, view), _filter_problems(same)):
            problems.setdefault(problem, []).extend(group.part for group in same)
    # Two parts of a tree may have equal layouts, which report the same problem.
    return list(starmap(_of_parts, problems.items()))


def _by_layout(groups: Iterable[Group]) -> Iterable[list[Group]]:
    """Return the groups of each layout.

    Arguments that share a layout are grouped, since a filter in the layout may match leaves of any
    of these arguments.
    """
    joined: dict[tuple[int, bool], list[Group]] = {}
    for i, group in enumerate(groups):
        shared = group.part.scope.shared
        joined.setdefault((id(group.part.layout) if shared else i, shared), []).append(group)
    return joined.values()


def filter_problems(leaves: Leaves, parts: Sequence[Part]) -> list[Problem]:
    """Return the problems with some layouts' filters.

    These problems do not depend on the mesh.
    """
    groups = grouped(leaves, parts, MeshView({}))
    return list(chain.from_iterable(map(_filter_problems, _by_layout(groups))))


def _filter_problems(groups: Sequence[Group]) -> Iterator[Problem]:
    """Yield the problems of the filters in one layout, and issue the layout's warnings."""
    part = groups[0].part
    filtered = [layout for layout in walk(part.layout) if isinstance(layout, StateSharding)]
    if not filtered:
        return
    leaves = [leaf for group in groups for leaf in group.leaves]
    decisions = [decision for group in groups for decision in group.decisions]
    # A function's rules are for models, so a call with only bare arrays does not test the filters.
    is_said = not part.partial and (not part.scope.by_rules or any(map(is_in_module, leaves)))
    here = {root.path[:1] for leaf in leaves for root in leaf.roots}
    here.update(leaf.seen[:1] for leaf in leaves if leaf.seen)
    has_state = any(group.has_training_state for group in groups)

    def elsewhere(pattern: Filter) -> bool:
        name = first_name(pattern)
        if name in here:
            return False
        is_argument = bool(name) and name[0] in part.scope.arguments
        return is_argument or (not has_state and names_field(pattern))

    for layout in filtered:
        yield from two_readings(layout, leaves)
        if not is_said:
            continue
        used = used_filters(layout, decisions)
        for problem in unused_filters(layout, used, leaves, elsewhere):
            if layout.unused == "error":
                yield problem
            else:
                warn(f"{problem.what} {problem.why}")


def follow(leaves: Sequence[Leaf], decided: Mapping[Path, Decision]) -> list[Decision]:
    """Return the decisions about leaves that follow other leaves.

    Args:
        leaves: the leaves.
        decided: the decisions about the followed leaves, by path.
    """
    # Several leaves, such as Adam's two moments, may follow one parameter. They share one decision.
    known: dict[tuple[FollowedLeaf | None, int], Decision] = {}
    decisions: list[Decision] = []
    for leaf in leaves:
        key = leaf.follows, len(leaf.shape)
        decision = known.get(key)
        if decision is None:
            decision = known[key] = _followed(leaf, decided)
        decisions.append(decision)
    return decisions


def _followed(leaf: Leaf, decided: Mapping[Path, Decision]) -> Decision:
    """Return the decision about a leaf that follows another leaf."""
    start, follows = Decision((WHOLE,) * len(leaf.shape)), leaf.follows
    if follows is not None and not follows.known:
        return start.wrong(UNKNOWN)
    if follows is None or follows.path is None:
        return start.because(INDEPENDENT)
    parameter, name = decided[follows.path], str(follows.path)
    if not leaf.shape:
        return start.because(f"one number for {name}")
    if all(dim is None for dim in follows.dims):
        return start.because(INDEPENDENT)
    dimensions: list[Dimension] = []
    for dim in follows.dims:
        dimension = WHOLE if dim is None else parameter.dimensions[dim]
        # Without a source, the dimension is not checked. Its size is the parameter's, so it would
        # have the same problems.
        dimensions.append(Dimension(dimension.mesh_axes))
    reason, same = f"follows {name}", follows.path
    # Unless the leaf has all the parameter's dimensions in order, the reason lists the dimensions
    # that it has.
    if not follows.has_all_of(len(parameter.dimensions)):
        kept = ["unsharded" if dim is None else str(dim) for dim in follows.dims]
        reason += f", with dimension{'' if len(kept) == 1 else 's'} {', '.join(kept)}"
        same = None
    return Decision(
        tuple(dimensions),
        memory_kind=parameter.memory_kind,
        # If the parameter has no layout, its statistics have none either.
        specified=parameter.specified,
        follows=same,
    ).because(reason)


INDEPENDENT = "does not depend on the parameters' shapes"
UNKNOWN = (
    "depends on the shapes of the parameters in a way that cannot be determined, so it cannot get "
    "a parameter's spec",
    "pass `otherwise=P()` to replicate such leaves; in a TrainState, add a pattern for them: "
    "`StateSharding({'opt_state.**': P(), ...: layout})`",
)


def grouped(leaves: Leaves, parts: Sequence[Part], view: MeshView) -> Iterator[Group]:
    """Label the leaves of each layout, and yield the labeled leaves with their decisions.

    A label holds the path that filters match, and the leaf that the labeled leaf follows.
    """
    start = 0
    for part in parts:
        # The leaves of a part are contiguous, and parts are in the order of their leaves.
        depth, end = len(part.path), start
        while end < len(leaves.leaves) and leaves.leaves[end].path[:depth] == part.path:
            end += 1
        # If each field of a training state has its own layout, no leaf follows another leaf.
        states: dict[Path, TrainingState] = {}
        for path, state in leaves.training.items():
            if path[:depth] == part.path:
                states[path] = state
        labeled: Sequence[Leaf] = leaves.leaves[start:end]
        if states or part.scope != Scope():
            labeled = label_paths(labeled, states, part.scope)
        yield Group(part, labeled, bool(states), decide(part, labeled, view))
        start = end


def _of_parts(problem: Problem, parts: Sequence[Part]) -> Problem:
    """Add the path of the layout's subtree to a problem, if the layout has only one subtree."""
    # A problem with a path needs no second path, and the path of the whole tree is empty.
    shared = len(parts) > 1 or parts[0].scope.shared
    if shared or problem.path is not None or not parts[0].path:
        return problem
    return problem._replace(what=f"{problem.what}, for `{parts[0].path}`")


def _conflicting(
    leaves: Sequence[Leaf], decisions: Sequence[Decision], same: Sequence[int] | None
) -> list[Problem]:
    """Return the problems of arrays, such as tied weights, that have two paths and two specs."""
    first: dict[int, tuple[Leaf, Decision]] = {}
    problems: list[Problem] = []
    for i, (leaf, decision) in enumerate(zip(leaves, decisions, strict=True)):
        # One `ShapeDtypeStruct` may describe several arrays.
        if same is None and isinstance(leaf.value, jax.ShapeDtypeStruct | np.generic):
            continue
        # This path has no layout (`None`), so any sharding fits.
        if not decision.specified:
            continue
        array = id(leaf.value) if same is None else same[i]
        other, there = first.setdefault(array, (leaf, decision))
        # Specs need no comparison if both paths share one decision object.
        if other is leaf or there is decision:
            continue
        here, its = _sharded_text(decision), _sharded_text(there)
        if here != its:
            why = f"is the same array as `{other.path}`, which is laid out as {its}, not as {here}"
            remedy = "give both paths the same spec, or put a separate array at each path"
            problems.append(leaf.problem(why, remedy))
    return problems


def _sharded_text(decision: Decision) -> str:
    """Return the text of a spec and its memory kind."""
    text = spec_text(decision.spec)
    if decision.memory_kind is not None:
        text += f" in {decision.memory_kind}"
    return text


# Plans


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
    return plan_leaves(*read_on_mesh(tree, layout, mesh), check=check)


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
    unused_names = [cls.__name__ for cls in leaves.unused]
    rows = _rows(decided.leaves, decided.decisions, view)
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
    mesh_axes = decision.mesh_axes
    spec = spec_of(mesh_axes) if decision.specified else None
    local, copies = view.divided(leaf.value.shape, mesh_axes)
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


# The current sharding

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


class ShownByPlan:
    """Base class of modules that a notebook shows as a plan of their current sharding."""

    def _repr_html_(self) -> str | None:
        """Render the module as HTML, or return None if it has no arrays, or contains specs."""
        shown = current_plan(self)
        return None if shown is None else shown._repr_html_()


def current_plan(tree: Tree) -> Plan | None:
    """Return the plan of a tree's current sharding.

    It reads only shapes and shardings, so the arrays may be donated or traced. Return None if the
    tree contains no arrays, or contains specs.
    """
    leaves = jax.tree.leaves(tree)
    if not any(map(is_array, leaves)) or any(isinstance(x, Sharding | P) for x in leaves):
        return None
    return plan(tree)


def short_text(tree: Tree) -> str | None:
    """Return a line with a tree's class, the number of its arrays, their bytes, and the mesh.

    Return None if the tree contains no arrays, or contains specs.
    """
    shown = current_plan(tree)
    if shown is None:
        return None
    size = bytes_text(shown.total_bytes)
    text = f"{type(tree).__name__} of {count(len(shown), 'array')}, {size}"
    if shown.sizes:
        text += f", on the mesh {shown.view}"
    return text
