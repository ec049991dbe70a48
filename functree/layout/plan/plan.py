"""A `Plan` holds the spec of each array of a tree, with the reason and the bytes.

`diff` compares two plans.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from functree.argument_checks import shown
from functree.devices.meshes import MeshView, spec_text
from functree.errors import (
    FunctreeTypeError,
    FunctreeValueError,
    Problem,
    ShardingError,
    count,
    did_you_mean,
    path_text,
    problem_groups,
)
from functree.labels.leaves import Leaf
from functree.layout.decision import Decision, apply_spec, refuse, whole
from functree.layout.layout import Layout
from functree.layout.plan.text import (
    AxisSizes,
    PlanPage,
    Row,
    axis_sizes,
    per_device,
    plan_text,
    replicated,
    several_sizes,
)
from functree.report.diff import Change, Diff, changes
from functree.report.json_text import json_of, read_json
from functree.report.page import Report
from functree.report.table import Bytes, bytes_text
from functree.tree.arrays import array_text
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton


@dataclass(frozen=True, init=False, repr=False)
class Plan(Layout, Report):
    """The spec of each array of a tree, and the reason for it.

    A plan is immutable, and is itself a layout. Its page shows a tree, a picture of each array's
    shards, and the bytes on each device.

    Attributes:
        rows: one for each array.
        problems: the problems; empty unless the plan was made with `check=False`.
        unused: the axes that rules name but no leaf has.
        unused_names: the names of the classes in `names=` that apply to no leaf.
        mesh: the mesh, or None if only sizes were given.
        sizes: the sizes of the mesh axes.

    Examples:
        >>> plan = ft.plan({"w": jnp.ones((4, 8))}, ft.P("data"), {"data": 2})
        >>> plan["w"].spec, plan.bytes_per_device
        (P('data', None), 64)
        >>> ft.plan({"w": jnp.zeros((4, 8))}, plan, {"data": 2}) == plan
        True
    """

    rows: tuple[Row, ...]
    sizes: Mapping[str, int] = field(hash=False)  # a dict has no hash
    mesh: Mesh | AbstractMesh | None
    problems: tuple[Problem, ...] = field(compare=False)
    unused: tuple[str, ...] = field(compare=False)
    unused_names: tuple[str, ...] = field(compare=False)
    # A plan from JSON or a pickle has no tree, only the paths in its rows.
    _skeleton: Skeleton | None = field(compare=False)
    _by_path: dict[Path, Row] = field(compare=False)

    def __init__(
        self,
        rows: Sequence[Row],
        skeleton: Skeleton | None,
        view: MeshView,
        problems: Sequence[Problem] = (),
        unused: Sequence[str] = (),
        unused_names: Sequence[str] = (),
    ):
        vars(self).update(
            rows=tuple(rows),
            _skeleton=skeleton,
            mesh=view.mesh,
            sizes=dict(view.sizes),
            problems=tuple(problems),
            unused=tuple(unused),
            unused_names=tuple(unused_names),
            _by_path={row.path: row for row in rows},
        )

    def __copy__(self) -> "Plan":
        return self  # it is immutable

    def __deepcopy__(self, memo: dict[int, object]) -> "Plan":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_skeleton": None}  # a skeleton cannot be pickled

    @property
    def view(self) -> MeshView:
        """The mesh or its sizes, as a `MeshView`."""
        return MeshView(self.sizes, self.mesh)

    @property
    def specs(self) -> Any:
        """The `PartitionSpec`s in the structure of the planned tree, with None for other leaves.

        Raises:
            ShardingError: if the plan was read from JSON or a pickle, which have no tree.
        """
        return self._tree().spread(row.spec for row in self.rows)

    @property
    def shardings(self) -> Any:
        """The `NamedSharding`s, with memory kinds, in the structure of the planned tree.

        Raises:
            ShardingError: if the plan was made for sizes instead of a mesh.
            ShardingError: if the plan has problems.
            ShardingError: if an array has no spec.
            ShardingError: if the plan was read from JSON or a pickle, which have no tree.
        """
        if self.problems:
            raise refuse(self.problems, self.view)
        return self._tree().spread(map(self.sharding, self.rows))

    def _tree(self) -> Skeleton:
        """Return the tree without its arrays."""
        if self._skeleton is None:
            why = "this plan was read from JSON or a pickle, so it contains only the tree's paths"
            raise ShardingError(f"{why}: use it as a layout, `ft.plan(tree, plan, mesh)`")
        return self._skeleton

    def sharding(self, row: Row) -> NamedSharding:
        """Return the sharding of a row."""
        if self.mesh is None:
            what = f"this plan was made for the sizes {self.view} only, without devices"
            raise ShardingError(f"{what}: make a plan with a `Mesh` to get shardings")
        if row.spec is None:
            raise ShardingError(f"{path_text(row.path)} has no PartitionSpec: {row.reason}")
        return NamedSharding(row.mesh or self.mesh, row.spec, memory_kind=row.memory_kind)

    @property
    def total_bytes(self) -> int:
        """The bytes of the tree, with each array counted once."""
        return sum(row.bytes_global for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """The bytes on one device, including host memory."""
        return per_device(self.rows)

    @property
    def axis_sizes(self) -> AxisSizes:
        """The sizes of each axis, with the paths of the arrays that have each size.

        Examples:
            >>> plan = ft.plan(ft.nn.MLP(8, 32, key=jax.random.key(0)), ft.P(), {})
            >>> {name: list(sizes) for name, sizes in plan.axis_sizes.items()}
            {'embed': [8], 'hidden': [32]}
        """
        return axis_sizes(self.rows)

    def __getitem__(self, path: Any) -> Row:
        """Return the row at a path: an `ft.Path`, a tuple, or a string."""
        key = Path(path)
        if key not in self._by_path:
            raise KeyError(f"there is no array at `{key}`{did_you_mean(key, self._by_path)}")
        return self._by_path[key]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return self.mesh

    def asks(self, leaf: Leaf) -> Hashable:
        return leaf.path

    def claims(self, leaf: Leaf) -> bool:
        row = self._row(leaf)
        return row is not None and row.spec is not None and row.mesh is None

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        """Give a leaf the plan's spec for the array at the same path."""
        before, row = so_far or whole(leaf), self._row(leaf)
        if row is None:
            return before.wrong(("the plan has no row for this leaf", _OWN_TREE))
        if row.spec is None:
            why = f"the plan has no spec for this leaf: {row.reason}"
            return before.wrong((why, "make the plan with a layout for this leaf"))
        if row.mesh is not None:
            why = f"the plan places this leaf on a different mesh: {row.reason}"
            return before.wrong((why, "make a plan for each mesh"))
        decision = apply_spec(leaf, row.spec, before, row.reason)
        kind = row.memory_kind or before.memory_kind
        return decision._replace(memory_kind=kind, follows=row.follows)

    def _row(self, leaf: Leaf) -> Row | None:
        """Return the row of the array at the same path.

        The path begins at the root of the plan's tree, which may be the model in a training state.
        """
        paths = [leaf.path, *[root.path for root in leaf.roots]]
        if leaf.follows is None and leaf.seen is not None:
            paths.append(leaf.seen)
        for path in paths:
            if path in self._by_path:
                return self._by_path[path]
        return None

    def __str__(self) -> str:
        return self.table()

    def table(self, sort: str | None = None) -> str:
        """Return the plan as text: one line for each array. Identical layers share a line.

        A size is followed by the mesh axes that divide it: `f32[32000/model, 512/data]`.

        Args:
            sort: `"bytes"` for the largest first; None for the order of the tree, as in
                `str(plan)`.

        Raises:
            FunctreeError: if `sort` has any other value.

        Examples:
            >>> plan = ft.plan(
            ...     {"a": jnp.ones(8), "b": jnp.ones(64)}, ft.P("data"), {"data": 2}
            ... )
            >>> [
            ...     line.split()[:2]
            ...     for line in plan.table(sort="bytes").splitlines()[1:3]
            ... ]
            [['b', 'f32[64/data]'], ['a', 'f32[8/data]']]
        """
        if sort not in (None, "bytes"):
            raise FunctreeValueError(f'table: sort={sort!r} is invalid: write "bytes" or None')
        notes = [*self._notes(), *self._problem_texts()]
        return plan_text(self.rows, notes, by_bytes=sort == "bytes")

    def summary(self) -> str:
        """Return the lines below the table.

        These lines list the bytes of the tree, the replicated arrays with their cost, the unused
        parts of the layout, and axes with several sizes in one module.
        """
        return "\n".join(self._notes())

    def __repr__(self) -> str:
        return f"<Plan of {len(self.rows)} arrays on mesh {self.view}>"

    def diff(self, other: "Plan") -> Diff:
        """Compare two plans: meshes, arrays, axes, specs, memory and bytes, but not reasons.

        Raises:
            FunctreeError: if `other` is not a plan.
        """
        if not isinstance(other, Plan):
            raise FunctreeTypeError(f"diff: `other` must be a plan, not {shown(other)}")
        changed: list[Change] = []
        if self.sizes != other.sizes:
            changed.append(Change(Path(), "mesh", dict(self.sizes), dict(other.sizes)))
        changed += changes(self._by_path, other._by_path, lambda path: path, _properties, _whole)
        each, its = Bytes(self.bytes_per_device), Bytes(other.bytes_per_device)
        return Diff(tuple(changed), (Change(Path(), "on each device", each, its),))

    def to_json(self) -> str:
        """Return the plan as JSON: its rows, mesh sizes and problems.

        The JSON contains neither the devices nor the tree.
        """
        parts = PlanParts(self.rows, self.sizes, self.problems, self.unused, self.unused_names)
        return json_of("plan", parts)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan from JSON, to use it as a layout, print it or compare it.

        The result equals the original plan if that plan was made for mesh sizes alone. It differs
        from a plan made for a mesh with devices, since the JSON contains no devices.

        Raises:
            FunctreeError: if the text is not a plan's JSON.

        Examples:
            >>> plan = ft.plan({"w": jnp.ones((4, 8))}, ft.P("data"), {"data": 2})
            >>> ft.Plan.from_json(plan.to_json()) == plan
            True
        """
        parts = read_json(text, "plan", PlanParts)
        view = MeshView(parts.sizes)
        return cls(parts.rows, None, view, parts.problems, parts.unused, parts.unused_names)

    def _html(self, page: bool) -> str:
        return self._page().html(page)

    def _page(self) -> PlanPage:
        # The cards replace the first note.
        return PlanPage(self.rows, self.sizes, self._problem_texts(), self._notes()[1:])

    def _notes(self) -> list[str]:
        """Return the lines below the table."""
        total, each = bytes_text(self.total_bytes), bytes_text(self.bytes_per_device)
        arrays = count(len(self.rows), "array")
        notes = [f"mesh {self.view}: {arrays}, {total} in all, {each} on each device"]
        notes += replicated(self.rows, self.sizes)
        unused = [*self.unused, *map("names= of {}".format, self.unused_names)]
        if unused:
            notes.append(f"not used by any leaf: {', '.join(unused)}")
        return notes + several_sizes(self.rows)

    def _problem_texts(self) -> list[str]:
        """Return one line for each problem, with all leaves that have it."""
        lines: list[str] = []
        for group in problem_groups(self.problems):
            subject = group.named or group.what
            lines += [f"PROBLEM {subject}: {why}" for why in group.whys]
        return lines


class PlanParts(NamedTuple):
    """The parts of a plan in JSON, which has neither the tree's structure nor devices."""

    rows: tuple[Row, ...]
    sizes: Mapping[str, int]
    problems: tuple[Problem, ...]
    unused: tuple[str, ...]
    unused_names: tuple[str, ...]


_OWN_TREE = "use a plan of the tree that contains this leaf"


def _whole(path: Path, row: Row) -> tuple[str, str]:
    return "array", f"{array_text(row)} {_spec(row)}"


def _spec(row: Row) -> str:
    return "-" if row.spec is None else spec_text(row.spec)


def _properties(path: Path, row: Row) -> dict[str, Any]:
    return {
        "array": array_text(row),
        "axes": str(row.axes),
        "spec": _spec(row),
        "memory": row.memory_kind or "device",
        "bytes on each device": Bytes(row.bytes_per_device),
    }
