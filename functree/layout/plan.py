"""(tree, layout, mesh) ─► `Plan`: one row for each leaf with its spec and the reason. The one resolver."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from functree.errors import Problem, ShardingError, count, did_you_mean
from functree.layout.checks import decided_spec, leaf_problems, local_shape, near_misses, refuse
from functree.layout.layouts import Decision, Layout, Resolution, apply_spec, merge_names, whole
from functree.layout.live import live_rows
from functree.layout.meshes import MeshView, mesh_view
from functree.layout.prefix import Part, broadcast
from functree.layout.row import Row
from functree.layout.specs import spec_text
from functree.layout.table import bytes_text, plan_html, plan_text
from functree.tree.leaf import Leaf
from functree.tree.leaves import Leaves, read
from functree.tree.paths import Path


class Plan(Layout):
    """Where each array of a tree goes, and why. Immutable; itself a layout, so that it can be handed on.

    Attributes:
        rows: one for each array.
        problems: what is wrong; empty unless made with `check=False`.
        unused: names of rules that no leaf has.
        mesh: the mesh, or None where only sizes were given.
        sizes: of the mesh's axes.

    Examples:
        >>> plan = ft.plan({"w": jnp.ones((4, 8))}, ft.P("data"), {"data": 2})
        >>> plan["w"].spec, plan.bytes_per_device
        (P('data', None), 64)
        >>> ft.plan({"w": jnp.zeros((4, 8))}, plan, {"data": 2}) == plan
        True
    """

    __slots__ = ("_by_path", "leaves", "mesh", "problems", "rows", "sizes", "unused")
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]
    unused: tuple[str, ...]
    mesh: Mesh | AbstractMesh | None
    sizes: Mapping[str, int]
    leaves: Leaves
    _by_path: dict[Path, Row]

    def __init__(
        self,
        rows: Sequence[Row],
        leaves: Leaves,
        view: MeshView,
        problems: Sequence[Problem] = (),
        unused: Sequence[str] = (),
    ):
        values = {
            "rows": tuple(rows),
            "leaves": replace(leaves, leaves=()),  # the arrays themselves are let go
            "mesh": view.mesh,
            "sizes": dict(view.sizes),
            "problems": tuple(problems),
            "unused": tuple(unused),
            "_by_path": {row.path: row for row in rows},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Plan is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.rows, self.leaves, self.view, self.problems, self.unused)

    @property
    def view(self) -> MeshView:
        """The mesh as plans see it."""
        return MeshView(self.sizes, self.mesh)

    @property
    def specs(self) -> Any:
        """A tree of `PartitionSpec`s with the structure of the tree's arrays; None where other leaves stand."""
        return self.leaves.tree(row.spec for row in self.rows)

    @property
    def shardings(self) -> Any:
        """A tree of `NamedSharding`s, memory kinds included.

        Raises:
            ShardingError: the plan was made for sizes only, without a mesh; it has problems; no spec says where one
                array lies.
        """
        if self.problems:
            raise refuse(self.problems, self.view)
        return self.leaves.tree(self.sharding(row) for row in self.rows)

    def sharding(self, row: Row) -> NamedSharding:
        """The sharding of one row."""
        if self.mesh is None:
            what = f"this plan knows the sizes {self.view} and no devices"
            raise ShardingError(f"{what}: plan with a `Mesh` for shardings")
        if row.spec is None:
            raise ShardingError(f"{row.path}: {row.reason}; no PartitionSpec says so")
        return NamedSharding(self.mesh, row.spec, memory_kind=row.memory_kind)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole tree, each array once."""
        return sum(row.bytes_global for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device keeps, host memory included."""
        return sum(row.bytes_per_device for row in self.rows)

    def __getitem__(self, path: Any) -> Row:
        """The row at a path: an `ft.Path`, a tuple, or its text."""
        key = Path.parse(path) if isinstance(path, str) else Path(path)
        if key not in self._by_path:
            raise KeyError(f"no array at `{key}`{did_you_mean(key, self._by_path)}")
        return self._by_path[key]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return self.mesh

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        """As a layout: what was decided for the same path."""
        found = [self._decided(leaf, before[i] if before else whole(leaf)) for i, leaf in enumerate(leaves)]
        return Resolution(found)

    def _decided(self, leaf: Leaf, before: Decision) -> Decision:
        row = next((self._by_path[path] for path in leaf.patterned if path in self._by_path), None)
        if row is None or row.spec is None:
            why = "the plan has no row for it" if row is None else f"the plan says: {row.reason}"
            return before._replace(problems=(*before.problems, (why, "plan the tree that it lies in")))
        return apply_spec(leaf, row.spec, before, row.reason)._replace(
            memory_kind=row.memory_kind or before.memory_kind
        )

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self.rows, tuple(self.sizes.items()), self.mesh, self.leaves.treedef)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._key == other._key

    def __hash__(self) -> int:
        return hash((self.rows, tuple(self.sizes.items())))

    def __str__(self) -> str:
        return plan_text(self.rows, self._notes())

    def __repr__(self) -> str:
        return f"<Plan of {len(self.rows)} arrays on mesh {self.view}>"

    def html(self) -> str:
        """A page of its own: the rows with their bytes, to be searched and sorted by eye."""
        return plan_html(self.rows, self._notes(), self.view.devices, page=True)

    def _notes(self) -> list[str]:
        """What stands below the table."""
        sizes = f"{bytes_text(self.total_bytes)} in all, {bytes_text(self.bytes_per_device)} on each device"
        notes = [f"mesh {self.view}: {count(len(self.rows), 'array')}, {sizes}"]
        notes += [f"rules that no leaf needed: {', '.join(self.unused)}"] if self.unused else []
        return notes + [f"PROBLEM {problem.path or problem.what}: {problem.why}" for problem in self.problems]

    def _repr_html_(self) -> str:
        return plan_html(self.rows, self._notes(), self.view.devices, page=False)


def plan(tree: Any, layout: Any = None, mesh: Any = None, *, check: bool = True) -> Plan:
    """Decide where each array of a tree goes, and check it. Touches no device.

    Args:
        tree: concrete or abstract arrays, in modules and containers.
        layout: a layout, or a prefix tree of layouts. Without one, the plan says how the live arrays lie.
        mesh: a `Mesh`, an `AbstractMesh`, a dict of sizes, or None for the current mesh.
        check: raise what is wrong; else it is in `plan.problems`.

    Raises:
        ShardingError: everything that is wrong, leaf by leaf; or there is no mesh.
        RuleError: the prefix tree does not have the tree's structure.

    Examples:
        >>> class MLP(eqx.Module):
        ...     up: Float[Array, "embed hidden"]
        >>> abstract = MLP(jax.ShapeDtypeStruct((16, 64), "float32"))
        >>> row = ft.plan(abstract, ft.AxisRules({"hidden": "model", "embed": None}), {"data": 2, "model": 4})["up"]
        >>> row.spec, row.reason
        (P(None, 'model'), 'embed→None, hidden→model')
    """
    return _live_plan(tree, mesh) if layout is None else plan_tree(tree, layout, mesh, check=check)


def plan_tree(
    tree: Any,
    layout: Any,
    mesh: Any,
    *,
    check: bool = True,
    leaves: Leaves | None = None,
    same: Sequence[int] | None = None,
    leave: bool = False,
) -> Plan:
    """The plan of a tree, whose leaves may have been read already.

    `same` tells which abstract leaves are one array; `leave`, that `None` as a layout leaves an array to who runs it,
    in a row without a spec. Else it is nobody's word, and a problem.
    """
    parts = broadcast(layout, tree)
    if leaves is None:
        leaves = read(tree, merge_names(part.layout.given_names for part in parts))
    return plan_leaves(leaves, parts, agreed_view(mesh, parts), check=check, same=same, leave=leave)


def plan_leaves(
    leaves: Leaves,
    parts: Sequence[Part],
    view: MeshView,
    *,
    check: bool = True,
    same: Sequence[int] | None = None,
    leave: bool = False,
) -> Plan:
    """The plan of leaves that have been read; the rest as for `plan_tree`."""
    decisions: list[Decision] = []
    problems, known = list(leaves.problems), list[Leaf]()
    unused: list[str] = []
    for part, group in _grouped(leaves, parts):
        found = part.layout.resolve(group, view)
        known += found.leaves or group
        decisions += found.decisions
        problems += found.problems
        unused += found.unused
    problems = list(dict.fromkeys(problems))
    unused = _absent(unused, leaves.leaves)
    problems += near_misses(known, decisions, unused)
    for leaf, decision in zip(known, decisions, strict=True):
        unsaid = not decision.said and not leave
        if decision.problems or decision.pending or unsaid or any(decision.entries):
            problems += leaf_problems(leaf, decision, view)
    rows = _rows(known, decisions, view)
    problems += _shared(known, rows, same)
    if problems and check:
        raise refuse(problems, view)
    return Plan(rows, leaves, view, problems, unused)


def _absent(names: Sequence[str], leaves: Sequence[Leaf]) -> list[str]:
    """Those names that no leaf has: what one part of a tree lacks, another may have."""
    if not names:
        return []
    present = {name for axes in {leaf.axes for leaf in leaves} for name in axes}
    return [name for name in dict.fromkeys(names) if name not in present]


def _grouped(leaves: Leaves, parts: Sequence[Part]) -> Iterator[tuple[Part, Sequence[Leaf]]]:
    """The arrays below each layout, with the paths that its patterns see."""
    if len(parts) == 1 and not parts[0].path:
        yield parts[0], leaves.leaves
        return
    start, at = 0, 0
    for part in parts:
        start += part.leaves
        end = at
        while end < len(leaves.positions) and leaves.positions[end] < start:
            end += 1
        depth = len(part.path)
        group = leaves.leaves[at:end]
        yield part, [leaf._replace(names=tuple(Path(p[depth:]) for p in leaf.patterned)) for leaf in group]
        at = end


def _rows(leaves: Sequence[Leaf], decisions: Sequence[Decision], view: MeshView) -> list[Row]:
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    rows = []
    for leaf, decision in zip(leaves, decisions, strict=True):
        value = leaf.value
        key = (decision.entries, decision.said, value.shape, value.dtype)
        if key not in known:
            known[key] = _sizes(value, decision, view)
        spec, local, total, per_device, copies = known[key]
        rows.append(
            Row(
                leaf.path, value.shape, value.dtype, leaf.axes, spec, decision.reason, local, total, per_device, copies,
                decision.memory_kind,
            )
        )  # fmt: skip
    return rows


def _sizes(value: Any, decision: Decision, view: MeshView) -> tuple[Any, ...]:
    itemsize = value.dtype.itemsize
    local = local_shape(value.shape, decision.entries, view)
    split = math.prod(view.sizes.get(axis, 1) for entry in decision.entries for axis in entry)
    total = math.prod(value.shape) * itemsize
    spec = decided_spec(decision) if decision.said else None
    return spec, local, total, math.prod(local) * itemsize, max(1, view.devices // split)


def _shared(leaves: Sequence[Leaf], rows: Sequence[Row], same: Sequence[int] | None) -> list[Problem]:
    """One array that stands at two paths with two specs."""
    first: dict[int, Row] = {}
    found = []
    for i, (leaf, row) in enumerate(zip(leaves, rows, strict=True)):
        if same is None and isinstance(leaf.value, jax.ShapeDtypeStruct | np.generic):
            continue  # equal descriptions may be one object without being one array
        other = first.setdefault(same[i] if same is not None else id(leaf.value), row)
        if (other.spec, other.memory_kind) != (row.spec, row.memory_kind):
            why = f"is the same array as `{other.path}`, and is laid out {_where(row)} here and {_where(other)} there"
            remedy = "give both paths one spec, or make two arrays"
            found.append(Problem(leaf.path, leaf.shape, leaf.text, why, remedy))
    return found


def _where(row: Row) -> str:
    where = "unknown" if row.spec is None else spec_text(row.spec)
    return f"{where} in {row.memory_kind}" if row.memory_kind else where


def agreed_view(mesh: Any, parts: Sequence[Part]) -> MeshView:
    """The mesh that was given, or the one that the layouts bring along; they must agree."""
    own = [part.layout.own_mesh for part in parts if part.layout.own_mesh is not None]
    view = mesh_view(own[0] if mesh is None and own else mesh)
    for other in own:
        both = isinstance(view.mesh, Mesh) and isinstance(other, Mesh)
        if dict(other.shape) != dict(view.sizes) or (both and other != view.mesh):
            its = MeshView(dict(other.shape))
            devices = ", of other devices" if its.sizes == view.sizes else ""
            raise ShardingError(f"the layout is for the mesh {its}, and the tree goes on {view}{devices}: use one mesh")
    return view


def _live_plan(tree: Any, mesh: Any) -> Plan:
    """How the arrays lie now."""
    leaves = read(tree)
    rows, found = live_rows(leaves.leaves)
    where = found if mesh is None else mesh
    return Plan(rows, leaves, MeshView({}) if where is None else mesh_view(where))
