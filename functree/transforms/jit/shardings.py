"""`in_shardings` and `out_shardings` ─► a sharding for each array, checked before JAX runs."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import Shardings
from functree.calls.signature import Record, Signature
from functree.devices.meshes import agreed_mesh, without_devices
from functree.devices.placement import is_sharded_as, memory_of, mesh_of, sharding_text
from functree.devices.specs import spec_text
from functree.errors import ShardingError
from functree.layout.decision import Fault, layout_problem, leaves_at_fault, without_repeats
from functree.layout.layout import LayoutTree, own_meshes
from functree.layout.plan.make_plan import plan_leaves, plan_tree
from functree.layout.plan.plan import Plan
from functree.transforms.jit.arguments import is_worth_telling
from functree.tree.arrays import AnyArray, Tree


class InShardings(NamedTuple):
    """The shardings that `in_shardings` asks for.

    Attributes:
        mesh: the mesh of the layouts.
        shardings: the sharding of each array; None if `in_shardings` was not given.
        moved: the indices of the uncommitted arrays that JAX moves on every call, and that a
            warning tells of.
    """

    mesh: Mesh | AbstractMesh | None
    shardings: Shardings | None
    moved: tuple[int, ...]

    def sharding(self, i: int) -> NamedSharding | None:
        """The sharding of an array; None if it may have any."""
        return None if self.shardings is None else self.shardings[i]


def resolve_in_shardings(
    call: Record,
    arrays: Sequence[AnyArray],
    layouts: ParameterLayouts,
    mesh: Mesh | AbstractMesh | None,
) -> InShardings:
    """Resolve `in_shardings`, and check that the arguments are sharded so.

    Raises:
        ShardingError: a layout does not fit, or an array is sharded otherwise.
    """
    leaves, parts = layouts.read(call)
    view = agreed_mesh(_planning(mesh), own_meshes(parts))
    # Its problems are raised together with those of arrays that are sharded otherwise.
    planned = plan_leaves(leaves, parts, view, check=False, allow_unspecified=True)
    problems, moved = list(planned.problems), list[int]()
    shardings: Shardings = [None] * len(arrays)
    # A spec that does not fit its array cannot be made a sharding.
    if not problems:
        shardings = _shardings(planned)
    for i, (leaf, array, wanted) in enumerate(zip(leaves.leaves, arrays, shardings, strict=True)):
        # On an abstract mesh the layout becomes a constraint in the body.
        if wanted is None or isinstance(wanted.mesh, AbstractMesh):
            continue
        if isinstance(array, Tracer | jax.ShapeDtypeStruct):
            continue  # it is on no device yet
        if isinstance(array, jax.Array) and array.committed:
            if not _is_taken(array, wanted):
                problems.append(layout_problem(leaf, _other_sharding(array, wanted)))
        elif AxisType.Explicit in wanted.mesh.axis_types and without_devices(wanted.mesh) is None:
            problems.append(layout_problem(leaf, _untyped(array)))
        elif is_worth_telling(array):
            moved.append(i)
    if problems:
        problems = without_repeats(problems, {row.path: row.follows for row in planned.rows})
        at_fault = leaves_at_fault(problems) or "the call"
        headline = (
            f"{layouts.signature.name}: in_shardings does not fit {at_fault} on mesh {planned.view}"
        )
        raise ShardingError(headline, problems)
    return InShardings(planned.mesh, shardings, tuple(moved))


def _shardings(planned: Plan) -> list[NamedSharding | None]:
    return [None if row.spec is None else planned.sharding(row) for row in planned.rows]


def _is_taken(array: jax.Array, wanted: NamedSharding) -> bool:
    """Whether JAX accepts an array without moving it."""
    # On Explicit axes the mesh is part of the array's type: an equivalent sharding on another mesh
    # is another type.
    if AxisType.Explicit in wanted.mesh.axis_types and mesh_of(array) != wanted.mesh:
        return False
    return is_sharded_as(array, wanted)


def _other_sharding(array: jax.Array, wanted: NamedSharding) -> Fault:
    """The fault of an array that would have to be moved. It costs time, so the user has to write
    it."""
    current = array.sharding
    have, want = sharding_text(current), sharding_text(wanted)
    # If only the specs differ, the message is short.
    if (
        isinstance(current, NamedSharding)
        and current.mesh == wanted.mesh
        and memory_of(current) == memory_of(wanted)
    ):
        have, want = spec_text(current.spec), spec_text(wanted.spec)
    why = (
        f"is sharded {have} but `in_shardings` asks for {want}; `ft.jit` does not move arrays "
        "implicitly"
    )
    return why, "move it once: `ft.shard(x, layout, mesh)`"


def _untyped(array: AnyArray) -> Fault:
    """The fault of an array whose type has no mesh, on Explicit axes: JAX would move it, but not
    change its type."""
    what = "is uncommitted, on no mesh"
    if isinstance(array, np.ndarray | np.generic):
        what = "is a NumPy array"
    why = (
        f"{what}: on Explicit axes its type in the body would be unsharded, whatever "
        "`in_shardings` asks for"
    )
    return why, "move it first: `ft.shard(x, layout, mesh)`"


def resolve_out_shardings(
    signature: Signature, result: Tree, layouts: LayoutTree, mesh: Mesh | AbstractMesh | None
) -> Shardings:
    """Resolve `out_shardings`, a prefix of the result. Rules read the annotation of the result.

    Raises:
        ShardingError: a layout does not fit.
        RuleError: the prefix has another structure than the result.
    """
    # As a record with one field, whose annotation is that of the result.
    record = signature.result
    planned = plan_tree(
        record(result), record(layouts), _planning(mesh), check=False, allow_unspecified=True
    )
    if planned.problems:
        at_fault = leaves_at_fault(planned.problems) or "the result"
        headline = f"{signature.name}: out_shardings does not fit {at_fault} on mesh {planned.view}"
        raise ShardingError(headline, planned.problems)
    return _shardings(planned)


def _planning(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """The mesh for a plan. Inside shard_map it is None, so that the plan raises its error for
    Manual axes."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        return None
    return mesh
