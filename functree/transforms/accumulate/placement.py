"""A call of a gradient function, and the layout of its gradients ─► `Placement`: the mesh axes over
which the batch is sharded, and how each parameter is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from functree.devices.constraint import with_constraint
from functree.devices.meshes import agreed_mesh, mesh_view
from functree.devices.placement import is_concrete
from functree.devices.specs import mesh_axes, named_axes, of_rank, without
from functree.layout.decide import decide_parts
from functree.layout.fsdp import fsdp_axes
from functree.layout.layout import Layout, LayoutTree, as_layout, as_partial, is_layout, own_meshes
from functree.layout.plan.make_plan import read_for
from functree.placing.ambient import ambient_rules
from functree.placing.batch import axes_of_name
from functree.placing.constrain import find_mesh, local_view
from functree.transforms.accumulate.roles import Call, Role
from functree.transforms.grad.known_gradient import KnownGradient


@dataclass(frozen=True)
class Placement:
    """Where the batch and the parameters of a call are.

    Attributes:
        mesh: the mesh.
        batch: the mesh axes over which the batch is sharded; None if they are not known.
        specs: the spec of each parameter, by its index among the arrays of the call; None if they
            are not known.
    """

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...] | None
    specs: dict[int, PartitionSpec] | None

    @classmethod
    def of(cls, call: Call, gradient: KnownGradient | None) -> "Placement | None":
        """The placement of a call; None without a mesh of several devices."""
        layout = _layout(call, gradient)
        mesh = find_mesh(_meshes(layout), call.leaves.values)
        if mesh is None or mesh.size == 1:
            return None
        return cls(mesh, _batch_axes(call, layout, mesh), _specs(call, layout, mesh))

    @property
    def sharded(self) -> list[int]:
        """The indices of the parameters that are sharded over the mesh axes of the batch."""
        batch = set(self.batch or ())
        return [i for i, spec in (self.specs or {}).items() if named_axes(spec) & batch]

    @property
    def replicates(self) -> bool:
        """Whether it is known that no parameter is sharded over the mesh axes of the batch."""
        return bool(self.batch) and self.specs is not None and not self.sharded

    def unknown(self, call: Call) -> str | None:
        """What is not known, and how it can be said; None if all is."""
        where = f"on mesh {mesh_view(self.mesh)}"
        if self.specs is None:
            return (
                f"how the parameters are sharded {where}: pass `layout=` to the gradient function, "
                "or use rules (`ft.jit(rules=...)`, `with ft.axis_rules(...):`)"
            )
        if self.batch is None:
            names = ", ".join(dict.fromkeys(str(leaf.path) for leaf in call.having(Role.BATCH)))
            return (
                f"over which mesh axes the batch ({names}) is sharded {where}: annotate its "
                'leading dimension (`x: Float[Array, "batch ..."]`) and write a rule for this axis '
                "(`None` where it is not sharded), or use `ft.FSDP` in the layout"
            )
        return None

    def gathered(self, operands: Sequence[Any]) -> list[Any]:
        """The operands of a piece, with the parameters whole along the mesh axes of the batch."""
        new = list(operands)
        specs, batch = self.specs or {}, self.batch or ()
        for i in self.sharded:
            new[i] = with_constraint(new[i], self.mesh, without(specs[i], batch))
        return new


def _layout(call: Call, gradient: KnownGradient | None) -> LayoutTree:
    """The layout of the model: that of its gradient, else the ambient one."""
    if gradient is not None:
        # The arguments that are bound by position come before the model.
        own = gradient.layout_of(len(call.arguments.partial.args))
        if own is not None:
            return own
    return ambient_rules()


def _meshes(layout: LayoutTree) -> list[Mesh | AbstractMesh | None]:
    """The mesh that a layout has of its own, if it is one layout."""
    return [as_layout(layout).own_mesh] if is_layout(layout) and layout is not None else []


def _specs(
    call: Call, layout: LayoutTree, mesh: Mesh | AbstractMesh
) -> dict[int, PartitionSpec] | None:
    """The spec of each array of the model; None if they are not known."""
    found: dict[int, PartitionSpec] = {}
    for i in call.of_model:
        spec = _spec(call.leaves.leaves[i].value, mesh)
        if spec is not None:
            found[i] = spec
    if len(found) == len(call.of_model):
        return found
    if layout is None:
        return None
    leaves, parts = read_for(call.model, layout)
    view = local_view(agreed_mesh(mesh, own_meshes(parts)))
    # What is wrong with it is said where the gradient is laid out.
    decided = decide_parts(leaves, as_partial(parts), view, allow_unspecified=True)
    for i, decision in zip(call.of_model, decided.decisions, strict=True):
        found.setdefault(i, decision.spec if decision.specified else PartitionSpec())
    return found


def _spec(value: Any, mesh: Mesh | AbstractMesh) -> PartitionSpec | None:
    """The spec of an array by its type or its devices; None if these do not tell."""
    if is_concrete(value):
        sharding = value.sharding
        return sharding.spec if isinstance(sharding, NamedSharding) else None
    if AxisType.Auto in mesh.axis_types:
        return None
    return jax.typeof(value).sharding.spec


def _batch_axes(
    call: Call, layout: LayoutTree, mesh: Mesh | AbstractMesh
) -> tuple[str, ...] | None:
    """The mesh axes over which the batch is sharded; None if they are not known."""
    manual = getattr(mesh, "manual_axes", ())
    for axes in _known_batch_axes(call, layout, mesh):
        return tuple(axis for axis in axes if axis not in manual)
    return None


def _known_batch_axes(
    call: Call, layout: LayoutTree, mesh: Mesh | AbstractMesh
) -> Iterator[tuple[str, ...]]:
    """What is known of the mesh axes of the batch, the best first."""
    batch = call.having(Role.BATCH)
    for leaf in batch:
        spec = _spec(leaf.value, mesh)
        if spec is not None:
            yield mesh_axes(of_rank(spec, len(leaf.shape)).partitions[0])
    rules = [one for one in (ambient_rules(), layout) if isinstance(one, Layout)]
    for one in rules:
        for leaf in batch:
            name = leaf.axes[0] if leaf.axes else None
            axes = None if name is None else axes_of_name(name, one, mesh)
            if axes is not None:
                yield axes
    for one in rules:
        fsdp = dict.fromkeys(fsdp_axes(one))
        if fsdp:
            yield tuple(fsdp)
