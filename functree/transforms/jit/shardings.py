"""`in_shardings` and `out_shardings` ─► a sharding for each array, checked before JAX runs, with paths in errors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from functree.calls.program import Shardings
from functree.calls.signature import Signature
from functree.errors import Problem, ShardingError
from functree.layout.decision import optimizer_remedy
from functree.layout.layout import LayoutTree
from functree.layout.meshes import without_devices
from functree.layout.placement import is_sharded_as, memory_of, mesh_of, sharding_text
from functree.layout.plan.plan import Plan
from functree.layout.plan.resolver import plan_tree
from functree.layout.prefix import DerivesLayout
from functree.layout.specs import spec_text
from functree.layout.validation import leaves_at_fault
from functree.tree.leaf import Leaf, array_problem
from functree.tree.leaves import read
from functree.tree.paths import Path


class Inputs(NamedTuple):
    """The shardings that `in_shardings` asks for.

    Attributes:
        mesh: the mesh of the layouts.
        shardings: the sharding of each array; None if `in_shardings` was not given.
        moved: the indices of the uncommitted arrays, which JAX moves on every call.
    """

    mesh: Mesh | AbstractMesh | None
    shardings: Shardings | None
    moved: tuple[int, ...]

    def sharding(self, i: int) -> NamedSharding | None:
        """The sharding of an array; None if it may have any."""
        return None if self.shardings is None else self.shardings[i]


def inputs(
    name: str, call: Any, arrays: Sequence[Any], layouts: LayoutTree, mesh: Mesh | AbstractMesh | None
) -> Inputs:
    """Resolve `in_shardings`, and check that the arguments are sharded so.

    Raises:
        ShardingError: a layout does not fit, or an array is sharded otherwise.
    """
    planned = plan_tree(call, layouts, _planning(mesh), check=False, allow_unspecified=True)
    problems, moved = list(planned.problems), list[int]()
    shardings: Shardings = [None] * len(arrays) if problems else _shardings(planned)
    for i, (row, array, wanted) in enumerate(zip(planned.rows, arrays, shardings, strict=True)):
        if wanted is None or isinstance(wanted.mesh, AbstractMesh):
            continue
        if isinstance(array, Tracer | jax.ShapeDtypeStruct):
            continue  # it is on no device yet
        if isinstance(array, jax.Array) and array.committed:
            if not _is_taken(array, wanted):
                problems.append(_other_sharding(row.path, array, wanted))
        elif AxisType.Explicit in wanted.mesh.axis_types and without_devices(wanted.mesh) is None:
            problems.append(_untyped(row.path, array))
        else:
            moved.append(i)
    if problems:
        at_fault = leaves_at_fault(problems) or "the call"
        headline = f"{name}: in_shardings does not fit {at_fault} on mesh {planned.view}"
        raise ShardingError(headline, _with_remedy(problems, read(call).leaves))
    return Inputs(planned.mesh, shardings, tuple(moved))


def _with_remedy(problems: Sequence[Problem], leaves: Sequence[Leaf]) -> list[Problem]:
    """The problems; those of an optimizer's state say how it is laid out."""
    # In a training state, such as `ft.TrainState`, it is laid out like the model.
    remedies = {leaf.path: optimizer_remedy(leaf) for leaf in leaves if not any(map(_derives, leaf.within))}
    new: list[Problem] = []
    for problem in problems:
        more = "" if problem.path is None else remedies.get(Path(problem.path), "")
        new.append(problem._replace(remedy=problem.remedy.removesuffix(more) + more))
    return new


def _derives(cls: type) -> bool:
    return issubclass(cls, DerivesLayout)


def _shardings(planned: Plan) -> list[NamedSharding | None]:
    return [None if row.spec is None else planned.sharding(row) for row in planned.rows]


def _is_taken(array: jax.Array, wanted: NamedSharding) -> bool:
    """Whether JAX accepts an array without moving it."""
    # On Explicit axes the mesh is part of the array's type: an equivalent sharding on another mesh is another type.
    if AxisType.Explicit in wanted.mesh.axis_types and mesh_of(array) != wanted.mesh:
        return False
    return is_sharded_as(array, wanted)


def _other_sharding(path: Path, array: jax.Array, wanted: NamedSharding) -> Problem:
    """The problem of an array that would have to be moved. It costs time, so the user has to write it."""
    current = array.sharding
    have, want = sharding_text(current), sharding_text(wanted)
    # If only the specs differ, the message is short.
    if isinstance(current, NamedSharding) and current.mesh == wanted.mesh and memory_of(current) == memory_of(wanted):
        have, want = spec_text(current.spec), spec_text(wanted.spec)
    why = f"is sharded {have} but `in_shardings` asks for {want}; `ft.jit` does not move arrays implicitly"
    return array_problem(path, array, why, "move it once: `ft.shard(x, layout, mesh)`")


def _untyped(path: Path, array: Any) -> Problem:
    """The problem of an array whose type has no mesh, on Explicit axes: JAX would move it, but not change its type."""
    what = "is a NumPy array" if isinstance(array, np.ndarray | np.generic) else "is uncommitted, on no mesh"
    why = f"{what}: on Explicit axes its type in the body would be unsharded, whatever `in_shardings` asks for"
    return array_problem(path, array, why, "move it first: `ft.shard(x, layout, mesh)`")


def outputs(signature: Signature, result: Any, layouts: LayoutTree, mesh: Mesh | AbstractMesh | None) -> Shardings:
    """Resolve `out_shardings`, a prefix of the result. Rules read the annotation of the result.

    Raises:
        ShardingError: a layout does not fit.
        RuleError: the prefix has another structure than the result.
    """
    record = signature.result
    planned = plan_tree(record(result), record(layouts), _planning(mesh), check=False, allow_unspecified=True)
    if planned.problems:
        at_fault = leaves_at_fault(planned.problems) or "the result"
        headline = f"{signature.name}: out_shardings does not fit {at_fault} on mesh {planned.view}"
        raise ShardingError(headline, planned.problems)
    return _shardings(planned)


def _planning(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """The mesh for a plan. Inside shard_map it is None, so that the plan raises its error for Manual axes."""
    return None if jax.sharding.get_abstract_mesh().manual_axes else mesh
