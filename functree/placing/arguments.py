"""Arguments that nobody has placed ─► the same arguments, placed where the rules lay them out."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.signature import Signature
from functree.errors import Problem, ShardingError, listed, warn
from functree.layout.constraint import constrained
from functree.layout.decision import Decision, optimizer_remedy, whole
from functree.layout.layout import Layout, Modified, Resolution
from functree.layout.meshes import MeshView, without_devices
from functree.layout.plan.resolver import plan_tree
from functree.layout.plan.row import Row
from functree.layout.validation import leaves_at_fault
from functree.placing.shard import moved_once
from functree.tree.arrays import array_text
from functree.tree.leaf import Leaf, is_in_module


@dataclass(frozen=True, eq=False)
class Targets:
    """Where the arguments of some calls are placed.

    Attributes:
        mesh: the mesh.
        rows: for the index of each array that nobody has placed, its row of the plan.
        donated: the indices of the donated arrays: their placed copies share no buffer with the given arrays.
    """

    mesh: Mesh | AbstractMesh
    rows: Mapping[int, Row]
    donated: Collection[int]

    def place(self, arrays: Sequence[Any]) -> list[Any]:
        """All arrays of a call, with those that nobody has placed where they belong."""
        new, traced, moving = list(arrays), dict[int, Any](), dict[int, Any]()
        for i in self.rows:
            array = arrays[i]
            if isinstance(array, jax.ShapeDtypeStruct):
                new[i] = array.update(sharding=self._sharding(i))
            elif isinstance(array, Tracer):
                traced[i] = array
            elif without_devices(self.mesh) is None:
                moving[i] = array
            elif isinstance(self.mesh, Mesh):  # such a program can be compiled, and not run
                kind = jax.typeof(array)
                weak = {"sharding": self._sharding(i), "weak_type": kind.weak_type}
                new[i] = jax.ShapeDtypeStruct(kind.shape, kind.dtype, **weak)
        for i, array in (self._constrain(traced) if traced else {}).items():
            new[i] = array
        # `device_put` may share a buffer with the given array, even with `may_alias=False`: that on the device where
        # the given array is, if the array is replicated.
        copies = {id(array): jnp.array(array, copy=True) for i, array in moving.items() if i in self.donated}
        own = [copies.get(id(array), array) for array in moving.values()]
        for i, array in zip(moving, moved_once(own, list(map(self._sharding, moving))), strict=True):
            new[i] = array
        return new

    def _sharding(self, i: int) -> NamedSharding:
        row = self.rows[i]
        return NamedSharding(self.mesh, row.spec or PartitionSpec(), memory_kind=row.memory_kind)

    # A jitted function, because outside of one JAX has no devices for a constraint on an abstract mesh. It is made
    # once, so that an eager `grad` or `vmap` compiles it once.
    @cached_property
    def _constrain(self) -> Callable[[dict[int, Any]], dict[int, Any]]:
        def constrain(traced: dict[int, Any]) -> dict[int, Any]:
            return {i: self._constrained(i, array) for i, array in traced.items()}

        return jax.jit(constrain)

    def _constrained(self, i: int, array: Any) -> Any:
        row = self.rows[i]
        # The layout of a traced array without names is left to the compiler.
        if row.spec is None or is_anonymous(row):
            return array
        return constrained(array, self.mesh, row.spec, row.memory_kind)


def is_unplaced(array: Any) -> bool:
    """Whether nobody has said where an array is: it is uncommitted, abstract, traced or of numpy."""
    if isinstance(array, Tracer):
        return jax.typeof(array).sharding.mesh.empty
    if isinstance(array, jax.Array):
        return not array.committed
    return getattr(array, "sharding", None) is None


def find_targets(
    call: Any,
    arrays: Mapping[int, Any],
    layouts: ParameterLayouts,
    mesh: Mesh | AbstractMesh,
    donated: Collection[int] = (),
) -> Targets:
    """Where the rules lay out the arguments that nobody has placed.

    Args:
        call: the call.
        arrays: the arrays that nobody has placed, by their indices.
        layouts: the rules as the layout of each parameter, by `rules_for_parameters`.
        mesh: the mesh of the function.
        donated: the indices of the donated arrays.

    Raises:
        ShardingError: the rules do not fit an array, as in `ft.plan`.
    """
    planned = plan_tree(call, layouts.prefix(call), mesh, check=False, allow_unspecified=True)
    rows = {i: planned.rows[i] for i in arrays}
    name, view = layouts.signature.name, planned.view
    # What somebody has placed stays, whatever the rules say about it.
    placed = {row.path for row in planned.rows} - {row.path for row in rows.values()}
    problems = [problem for problem in planned.problems if problem.path not in placed]
    if problems:
        at_fault = leaves_at_fault(problems) or "the call"
        raise ShardingError(f"{name}: the rules do not fit {at_fault} that nobody has placed, on mesh {view}", problems)
    anonymous = [row for i, row in rows.items() if is_anonymous(row) and not isinstance(arrays[i], Tracer)]
    if anonymous and view.devices > 1:
        _warn_replicated(name, anonymous, view)
    return Targets(mesh, {i: row for i, row in rows.items() if row.spec is not None}, frozenset(donated))


def rules_for_parameters(rules: Layout, signature: Signature) -> ParameterLayouts:
    """Rules as the layout of each parameter, so that the patterns of filters begin in the argument."""
    return ParameterLayouts("rules", {}, signature, otherwise=_ForArguments(rules.tolerant))


@dataclass(frozen=True)
class _ForArguments(Modified):
    """The layout of a function's arguments by its rules.

    Leaves of modules, and of a training state, are laid out by the whole of the rules, as by `ft.shard`. Bare arrays
    are laid out by the function's annotations and the `AxisRules` alone, as activations are.
    """

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        inside = [i for i, leaf in enumerate(leaves) if is_in_module(leaf)]
        bare = [i for i, leaf in enumerate(leaves) if not is_in_module(leaf)]
        decisions: list[Decision] = [whole(leaf, NO_NAMES + optimizer_remedy(leaf)).settle() for leaf in leaves]
        problems: list[Problem] = []
        unused: list[str] = []
        for layout, own in ((self.layout, inside), (self.layout.by_axes, bare)):
            if layout is None or not own:
                continue
            found = layout.resolve([leaves[i] for i in own], mesh)
            problems += found.problems
            unused += found.unused
            for i, decision in zip(own, found.decisions, strict=True):
                if not _no_names(leaves[i], decision):
                    decisions[i] = decision
        for i in bare:
            if not leaves[i].shape:  # JAX replicates a scalar at no cost
                decisions[i] = decisions[i]._replace(specified=False)
        return Resolution(decisions, tuple(problems), tuple(unused))


NO_NAMES = "has no axis names"


def is_anonymous(row: Row) -> bool:
    """Whether the rules could not lay out an array because it has no annotation."""
    return row.reason.startswith(NO_NAMES)


def _no_names(leaf: Leaf, decision: Decision) -> bool:
    """Whether rules cannot lay out a leaf because it has no annotation."""
    return not leaf.annotated and leaf.spec is None and leaf.misfit is None and bool(decision.faults)


def _warn_replicated(name: str, rows: Sequence[Row], view: MeshView) -> None:
    arrays = listed([f"`{row.path}` {array_text(row)}" for row in rows])
    optimizer = next(filter(None, (row.reason.removeprefix(NO_NAMES) for row in rows)), "")
    what, verb = ("it", "has") if len(rows) == 1 else ("them", "have")
    warn(
        f"{name}: {arrays} {verb} no axis names and nobody has placed {what}, so this is replicated on the mesh "
        f"{view}: annotate {what}, place {what} with `ft.shard`, or write `in_shardings=`{optimizer}",
    )
