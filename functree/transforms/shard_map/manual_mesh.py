"""A mesh, and the mesh axes that a shard_map makes Manual ─► specs of global and local trees, and
their problems."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from functree.devices.meshes import MeshView, abstract_mesh, mesh_view
from functree.devices.placement import is_concrete, sharding_text
from functree.devices.specs import axes_text, mesh_axes, named_axes, of_rank, spec_text, without
from functree.errors import Problem, ShardingError
from functree.labels.leaf import Leaf
from functree.labels.leaves import Leaves
from functree.layout.decide import UNSPECIFIED
from functree.layout.decision import refuse
from functree.layout.layout import Part, SpecLayout
from functree.layout.plan.make_plan import plan_leaves


class PartialView(MeshView):
    """A mesh of which some axes count as one device in a plan. Messages show the real sizes."""

    def __str__(self) -> str:
        return str(mesh_view(self.mesh)) if self.mesh is not None else super().__str__()


class ManualSpecs(NamedTuple):
    """The specs of a tree in a shard_map.

    Attributes:
        leaves: its leaves.
        specs: the spec of each leaf, restricted to the Manual axes.
        problems: what is wrong.
    """

    leaves: tuple[Leaf, ...]
    specs: tuple[PartitionSpec, ...]
    problems: list[Problem]


class ManualMesh(NamedTuple):
    """The mesh of the body of a shard_map.

    Attributes:
        mesh: the mesh outside of the body. Axes that an outer shard_map has made Manual are Manual
            in it.
        manual: the mesh axes that this shard_map makes Manual.
    """

    mesh: Mesh | AbstractMesh
    manual: frozenset[str]

    @property
    def abstract(self) -> AbstractMesh:
        """The mesh without its devices."""
        return abstract_mesh(self.mesh)

    @property
    def explicit(self) -> bool:
        """Whether the mesh axes that become Manual are Explicit outside, so that the types of
        arrays have specs."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return all(types[axis] == AxisType.Explicit for axis in self.manual)

    def lay_global(self, leaves: Leaves, parts: Sequence[Part]) -> ManualSpecs:
        """Lay out a tree of global arrays. A Manual axis counts with its size, so sizes have to be
        divisible by it."""
        return self._lay(
            leaves, parts, {axis: self.mesh.shape[axis] for axis in self.manual}, self._typed
        )

    def lay_local(self, leaves: Leaves, parts: Sequence[Part]) -> ManualSpecs:
        """Lay out a tree of local arrays. Every axis counts as one device, so each size fits."""
        return self._lay(leaves, parts, {}, lambda leaf: None)

    def _lay(
        self,
        leaves: Leaves,
        parts: Sequence[Part],
        sizes: dict[str, int],
        otherwise: Callable[[Leaf], PartitionSpec | None],
    ) -> ManualSpecs:
        """Lay out a tree; `otherwise` is the spec of an array for which no layout was given, or
        None."""
        view = PartialView({axis: sizes.get(axis, 1) for axis in self.mesh.shape}, self.mesh)
        # `same`: one array at two places may have two specs here, since nothing is placed.
        same = range(len(leaves.leaves))
        plan = plan_leaves(leaves, parts, view, check=False, same=same, allow_unspecified=True)
        problems, specs = [*plan.problems, *self._outside(leaves, parts)], list[PartitionSpec]()
        for leaf, row in zip(leaves.leaves, plan.rows, strict=True):
            if row.memory_kind is not None:
                why = f"is laid out in {row.memory_kind}, "
                why += "but shard_map moves no array to another memory"
                problems.append(
                    leaf.problem(why, "move it before or after, by `ft.shard` or `ft.jit`")
                )
            spec = otherwise(leaf) if row.spec is None else row.spec
            if spec is None:
                problems.append(leaf.problem(*UNSPECIFIED))
            specs.append(self.project(spec or PartitionSpec()))
        return ManualSpecs(leaves.leaves, tuple(specs), problems)

    def _typed(self, leaf: Leaf) -> PartitionSpec | None:
        """The spec in the type of an array, for which no layout was given; None without a type on
        Explicit axes."""
        if not self.explicit or is_untyped(leaf.value):
            return None
        sharding = jax.typeof(leaf.value).sharding
        if AxisType.Explicit not in sharding.mesh.axis_types:
            return None
        return of_rank(sharding.spec, len(leaf.shape))

    def _outside(self, leaves: Leaves, parts: Sequence[Part]) -> list[Problem]:
        """Problems of `P`s that name a mesh axis which does not become Manual here.

        Rules may name other mesh axes: they are made for more than this function, and lose those
        axes here.
        """
        problems: list[Problem] = []
        others = set(self.mesh.axis_names) - self.manual
        for part in parts:
            if not isinstance(part.layout, SpecLayout):
                continue
            not_manual = sorted(named_axes(part.layout.spec) & others)
            if not not_manual:
                continue
            manual = axes_text(sorted(self.manual))
            spec = spec_text(part.layout.spec)
            why = f"{spec} names {axes_text(not_manual)}, but only {manual} is manual here"
            remedy = "leave it out of the spec, or add it to `axis_names`"
            for leaf in leaves.leaves:
                if leaf.path[: len(part.path)] == part.path:
                    problems.append(leaf.problem(why, remedy))
        return problems

    def project(self, spec: PartitionSpec) -> PartitionSpec:
        """The spec without the mesh axes that are not Manual here."""
        return without(spec, set(self.mesh.axis_names) - self.manual)

    def enlarge(self, leaf: Leaf, spec: PartitionSpec) -> Leaf:
        """A leaf with its local shape ─► the leaf with its global shape, by its spec."""
        parts = [math.prod(self.mesh.shape[axis] for axis in mesh_axes(entry)) for entry in spec]
        shape = tuple(size * n for size, n in zip(leaf.shape, parts, strict=True))
        return leaf._replace(value=jax.ShapeDtypeStruct(shape, leaf.value.dtype))

    def refuse(self, name: str, problems: Sequence[Problem]) -> ShardingError:
        """The error that lists all problems of a call."""
        error = refuse(problems, mesh_view(self.mesh))
        return ShardingError(f"{name}: {str(error).splitlines()[0]}", problems)

    # Problems that a plan does not find

    def misplaced(self, leaf: Leaf, spec: PartitionSpec) -> list[Problem]:
        """The problem of an array that JAX would not move: on other devices, or on Explicit axes
        with another spec."""
        value = leaf.value
        if not isinstance(value, jax.Array):
            return []  # JAX moves a NumPy array, and an abstract one is on no device
        if is_concrete(value) and value.committed and isinstance(self.mesh, Mesh):
            if value.sharding.device_set != set(self.mesh.devices.flat):
                why = f"is sharded {sharding_text(value.sharding)}, but the mesh has other devices"
                return [leaf.problem(why, "move it to the mesh with `ft.shard`")]
        return [] if is_untyped(value) else self._mistyped(leaf, spec)

    def _mistyped(self, leaf: Leaf, spec: PartitionSpec) -> list[Problem]:
        """The problem of an array whose type is on another mesh, or has another spec."""
        sharding = jax.typeof(leaf.value).sharding
        explicit = AxisType.Explicit in sharding.mesh.axis_types
        other_axes = explicit and sharding.mesh.axis_names != self.mesh.axis_names
        if other_axes or (self.explicit and not explicit):
            kind = "Explicit" if explicit else "Auto"
            why = f"its type is on a mesh of {kind} axes, {mesh_view(sharding.mesh)}"
            return [leaf.problem(why, "move it to the mesh with `ft.shard`")]
        have = self.project(of_rank(sharding.spec, len(leaf.shape)))
        if not self.explicit or have == spec:
            return []
        why = f"its type is sharded {spec_text(have)}, but its spec is {spec_text(spec)}"
        why += "; Explicit axes are not moved"
        return [
            leaf.problem(why, "apply `jax.sharding.reshard` before, or write the spec of its type")
        ]

    def varying(self, leaf: Leaf, spec: PartitionSpec) -> list[Problem]:
        """The problem of a result that may differ between devices although its spec says that it is
        replicated."""
        if not isinstance(leaf.value, jax.Array):
            return []
        unnamed = sorted(
            (jax.typeof(leaf.value).manual_axis_type.varying & self.manual) - named_axes(spec)
        )
        if not unnamed:
            return []
        axes = axes_text(unnamed)
        why = f"{spec_text(spec)} says that it is the same along {axes}, but it may differ there"
        remedy = f"reduce it (`jax.lax.psum`, `pmean`) over {axes}, or name {axes} in its spec; "
        return [
            leaf.problem(why, remedy + "or pass `check_vma=False` if you know that it is the same")
        ]

    def reshard(self, value: Any, spec: PartitionSpec) -> Any:
        """An argument for `jax.shard_map`: on Explicit axes, an array without a sharding in its
        type gets its spec."""
        if not self.explicit or not is_untyped(value):
            return value
        return jax.sharding.reshard(value, NamedSharding(self.mesh, spec))


def is_untyped(value: Any) -> bool:
    """Whether the type of an array has no sharding: the array is uncommitted, abstract, or
    NumPy's."""
    if not isinstance(value, jax.Array) or (is_concrete(value) and not value.committed):
        return True
    return jax.typeof(value).sharding.mesh.empty
