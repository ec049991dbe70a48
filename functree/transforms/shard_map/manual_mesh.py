"""A mesh, and the axes that a shard_map makes manual ─► plans of global and of local trees, and what is wrong there."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from functree.errors import Problem, ShardingError
from functree.layout.layout import Fixed, LayoutTree
from functree.layout.meshes import MeshView, abstract_mesh
from functree.layout.placement import is_concrete
from functree.layout.plan.live import live_sharding
from functree.layout.plan.resolver import plan_leaves, read_for
from functree.layout.prefix import Part
from functree.layout.specs import axes_text, mesh_axes, named_axes, of_rank, spec_text, without
from functree.layout.validation import refuse
from functree.tree.leaf import Leaf
from functree.tree.leaves import Leaves


class PartialView(MeshView):
    """A mesh of which some axes count as one device, and which messages name as the whole mesh."""

    def __str__(self) -> str:
        return str(MeshView(dict(self.mesh.shape))) if self.mesh is not None else super().__str__()


class Laid(NamedTuple):
    """A tree that has been laid out.

    Attributes:
        leaves: its arrays.
        specs: for each of them, what its spec says of the manual axes.
        problems: what is wrong.
    """

    leaves: tuple[Leaf, ...]
    specs: tuple[PartitionSpec, ...]
    problems: list[Problem]


class ManualMesh(NamedTuple):
    """Where the body of a shard_map runs.

    Attributes:
        mesh: of the body; what an outer shard_map has made manual is so in it.
        manual: the axes that this shard_map makes manual.
    """

    mesh: Mesh | AbstractMesh
    manual: frozenset[str]

    @property
    def abstract(self) -> AbstractMesh:
        """The mesh without its devices."""
        return abstract_mesh(self.mesh)

    @property
    def explicit(self) -> bool:
        """Whether shardings along the axes that become manual are part of types."""
        kinds = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return all(kinds[axis] == AxisType.Explicit for axis in self.manual)

    def lay_global(self, tree: Any, layouts: LayoutTree) -> Laid:
        """A tree of global arrays: a manual axis has its size."""
        return self._lay(tree, layouts, {axis: self.mesh.shape[axis] for axis in self.manual})

    def lay_local(self, tree: Any, layouts: LayoutTree) -> Laid:
        """A tree of local arrays: every axis counts as one device."""
        return self._lay(tree, layouts, {})

    def _lay(self, tree: Any, layouts: LayoutTree, sizes: dict[str, int]) -> Laid:
        leaves, parts = read_for(tree, layouts)
        view = PartialView({axis: sizes.get(axis, 1) for axis in self.mesh.shape}, self.mesh)
        plan = plan_leaves(leaves, parts, view, check=False, same=range(len(leaves.leaves)))
        problems = [*plan.problems, *self._outside(leaves, parts)]
        for leaf, row in zip(leaves.leaves, plan.rows, strict=True):
            if row.memory_kind is not None:
                why = f"is laid out in {row.memory_kind}, and shard_map moves nothing there"
                problems.append(leaf.problem(why, "move it before or after, by `ft.shard` or `ft.jit`"))
        return Laid(leaves.leaves, tuple(self.project(row.spec or PartitionSpec()) for row in plan.rows), problems)

    def _outside(self, leaves: Leaves, parts: Sequence[Part]) -> list[Problem]:
        """Specs, written out, that name a mesh axis which does not become manual here."""
        found: list[Problem] = []
        others, end = set(self.mesh.axis_names) - self.manual, 0
        for part in parts:
            start, end = end, end + part.leaves
            lost = sorted(named_axes(part.layout.spec) & others) if isinstance(part.layout, Fixed) else []
            if not lost or not isinstance(part.layout, Fixed):
                continue
            manual = axes_text(sorted(self.manual))
            why = f"{spec_text(part.layout.spec)} names {axes_text(lost)}, and only {manual} is manual here"
            remedy = "leave it out of the spec, or add it to `axis_names`"
            for place, leaf in zip(leaves.skeleton.places, leaves.leaves, strict=True):
                if start <= place < end:
                    found.append(leaf.problem(why, remedy))
        return found

    def project(self, spec: PartitionSpec) -> PartitionSpec:
        """What a spec says of the manual axes."""
        return without(spec, set(self.mesh.axis_names) - self.manual)

    def enlarge(self, leaf: Leaf, spec: PartitionSpec) -> Leaf:
        """A local leaf as it is globally."""
        parts = [math.prod(self.mesh.shape[axis] for axis in mesh_axes(entry)) for entry in spec]
        shape = tuple(size * n for size, n in zip(leaf.shape, parts, strict=True))
        return leaf._replace(value=jax.ShapeDtypeStruct(shape, leaf.value.dtype))

    def refuse(self, name: str, problems: Sequence[Problem]) -> ShardingError:
        """The error for all that is wrong with a call."""
        error = refuse(problems, MeshView(dict(self.mesh.shape)))
        return ShardingError(f"{name}: {str(error).splitlines()[0]}", problems)

    # What can be wrong, besides what a plan finds

    def misplaced(self, leaf: Leaf, spec: PartitionSpec) -> list[Problem]:
        """An array on other devices, or under Explicit axes of another type: JAX would move neither."""
        value = leaf.value
        if not isinstance(value, jax.Array):
            return []  # numpy's are moved, and abstract ones are nowhere
        if is_concrete(value) and value.committed and isinstance(self.mesh, Mesh):
            if value.sharding.device_set != set(self.mesh.devices.flat):
                why = f"{live_sharding(value).reason}, and the mesh is of other devices"
                return [leaf.problem(why, "move it to the mesh with `ft.shard`")]
        return [] if is_untyped(value) else self._mistyped(leaf, spec)

    def _mistyped(self, leaf: Leaf, spec: PartitionSpec) -> list[Problem]:
        here = jax.typeof(leaf.value).sharding
        explicit = AxisType.Explicit in here.mesh.axis_types
        if (explicit and here.mesh.axis_names != self.mesh.axis_names) or (self.explicit and not explicit):
            kind = "Explicit" if explicit else "Auto"
            why = f"its type is on a mesh of {kind} axes, {MeshView(dict(here.mesh.shape))}"
            return [leaf.problem(why, "move it to the mesh with `ft.shard`")]
        typed = self.project(of_rank(here.spec, len(leaf.shape)))
        if not self.explicit or typed == spec:
            return []
        why = f"its type is sharded {spec_text(typed)}, and its spec is {spec_text(spec)}; Explicit axes are not moved"
        return [leaf.problem(why, "`jax.sharding.reshard` it before, or write the spec of its type")]

    def varying(self, leaf: Leaf, spec: PartitionSpec) -> list[Problem]:
        """A part of the result that differs between devices on which its spec calls it equal."""
        if not isinstance(leaf.value, jax.Array):
            return []
        lost = sorted((jax.typeof(leaf.value).manual_axis_type.varying & self.manual) - named_axes(spec))
        if not lost:
            return []
        over = axes_text(lost)
        why = f"{spec_text(spec)} says that it is the same along {over}, and it may differ there"
        remedy = f"reduce it (`jax.lax.psum`, `pmean`) over {over}, or name that in its spec; "
        return [leaf.problem(why, remedy + "or pass `check_vma=False` where it is known to be the same")]

    def reshard(self, value: Any, spec: PartitionSpec) -> Any:
        """An argument of the body: on Explicit axes one whose type tells no sharding is given its spec."""
        if not self.explicit or not is_untyped(value):
            return value
        return jax.sharding.reshard(value, NamedSharding(self.mesh, spec))


def is_untyped(value: Any) -> bool:
    """Whether an array's type does not tell how it is sharded: it is uncommitted, abstract, or numpy's."""
    if not isinstance(value, jax.Array) or (is_concrete(value) and not value.committed):
        return True
    return jax.typeof(value).sharding.mesh.empty
