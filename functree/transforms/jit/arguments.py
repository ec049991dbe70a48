"""Arguments that nobody has placed ─► the same arguments, placed where the rules lay them out."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.signature import Signature
from functree.devices.meshes import MeshView, agreed_mesh, without_devices
from functree.errors import ShardingError, listed, warn
from functree.labels.leaf import Leaf, is_bare, is_in_module
from functree.labels.leaves import Leaves
from functree.layout.decide import UNSPECIFIED, Decisions, decide_parts, filter_problems
from functree.layout.decision import (
    USE_PLAN_OPTIMIZER,
    Decision,
    followed_paths,
    is_optimizer_state,
    leaves_at_fault,
    whole,
    without_repeats,
)
from functree.layout.layout import Layout, Part, as_layout, as_partial, own_meshes
from functree.layout.rules import forgotten_axes, forgotten_text
from functree.layout.state_sharding import for_arrays
from functree.placing.constrain import with_decision
from functree.placing.shard import moved_once
from functree.tree.arrays import AnyArray, array_text
from functree.tree.paths import Path


@dataclass(frozen=True, eq=False)
class Targets:
    """Where the arguments of some calls are placed.

    Attributes:
        mesh: the mesh.
        decisions: for the index of each array that nobody has placed, what is decided about it.
        nameless: the indices of the arrays that are replicated because they have no axis names.
        donated: the indices of the donated arrays: their placed copies share no buffer with the
            given arrays.
    """

    mesh: Mesh | AbstractMesh
    decisions: Mapping[int, Decision]
    nameless: Collection[int]
    donated: Collection[int]

    def place(self, arrays: Sequence[Any]) -> list[Any]:
        """All arrays of a call, with those that nobody has placed where they belong."""
        new, traced, moving = list(arrays), dict[int, Any](), dict[int, Any]()
        for i in self.decisions:
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
        # `device_put` may share a buffer with the given array, even with `may_alias=False`: that on
        # the device where the given array is, if the array is replicated.
        copies = {
            id(array): jnp.array(array, copy=True)
            for i, array in moving.items()
            if i in self.donated
        }
        own = [copies.get(id(array), array) for array in moving.values()]
        for i, array in zip(
            moving, moved_once(own, list(map(self._sharding, moving))), strict=True
        ):
            new[i] = array
        return new

    def _sharding(self, i: int) -> NamedSharding:
        decision = self.decisions[i]
        return NamedSharding(self.mesh, decision.spec, memory_kind=decision.memory_kind)

    # A jitted function, because outside of one JAX has no devices for a constraint on an abstract
    # mesh. It is made once, so that an eager `grad` or `vmap` compiles it once.
    @cached_property
    def _constrain(self) -> Callable[[dict[int, Any]], dict[int, Any]]:
        def constrain(traced: dict[int, Any]) -> dict[int, Any]:
            return {i: self._constrained(i, array) for i, array in traced.items()}

        return jax.jit(constrain)

    def _constrained(self, i: int, array: Any) -> Any:
        # The layout of a traced array without names is left to the compiler.
        if i in self.nameless:
            return array
        return with_decision(array, self.decisions[i], self.mesh)


def is_unplaced(array: Any) -> bool:
    """Whether nobody has said where an array is: it is uncommitted, abstract, traced or of
    numpy."""
    if isinstance(array, Tracer):
        return jax.typeof(array).sharding.mesh.empty
    if isinstance(array, jax.Array):
        return not array.committed
    return getattr(array, "sharding", None) is None


def is_worth_telling(array: AnyArray) -> bool:
    """Whether a warning tells of an array that is replicated or moved: not of random keys, which
    are other ones in each step, nor of arrays that cost nothing."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return not is_key and array.size >= _SMALLEST


_SMALLEST = 128  # elements


def find_targets(
    call: Any,
    arrays: Mapping[int, Any],
    layouts: ParameterLayouts,
    mesh: Mesh | AbstractMesh,
    donated: Collection[int] = (),
) -> Targets:
    """Where the rules lay out the arguments that nobody has placed.

    Trees are laid out by the whole of the rules, as `ft.shard` lays them out. An argument that is
    one array is laid out by a pattern that names it, otherwise by its annotation and `AxisRules`.

    Args:
        call: the call.
        arrays: the arrays that nobody has placed, by their indices.
        layouts: the rules as the layout of each parameter, by `rules_for_parameters`.
        mesh: the mesh of the function.
        donated: the indices of the donated arrays.

    Raises:
        ShardingError: the rules do not fit an array, as in `ft.plan`.
    """
    leaves, parts = _read_arguments(call, layouts)
    view = agreed_mesh(mesh, own_meshes(parts))
    # Filters are checked over all arguments together, by `check_rules`.
    decided = decide_parts(leaves, as_partial(parts), view, allow_unspecified=True)
    decisions, nameless = _without_names(decided)
    # What somebody has placed stays, whatever the rules say about it. What has no names is
    # replicated, with a warning.
    settled = {leaf.path for i, leaf in enumerate(decided.leaves) if i not in arrays}
    # A parameter tells the problems of what follows it, too.
    settled.difference_update(followed_paths([decided.leaves[i] for i in arrays]).values())
    settled |= {decided.leaves[i].path for i in nameless}
    problems = [problem for problem in decided.problems if problem.path not in settled]
    for i in arrays:
        leaf = decided.leaves[i]
        is_array = is_bare(leaf) or not (leaf.shape or is_in_module(leaf))
        if not is_array and not decisions[i].specified:
            problems.append(leaf.problem(*UNSPECIFIED))
    problems = without_repeats(problems, followed_paths(decided.leaves))
    name = layouts.signature.name
    if problems:
        at_fault = leaves_at_fault(problems) or "the call"
        headline = f"{name}: the rules do not fit {at_fault} that nobody has placed, on mesh {view}"
        raise ShardingError(headline, problems)
    replicated = [
        decided.leaves[i]
        for i in arrays
        if i in nameless and not isinstance(arrays[i], Tracer) and is_worth_telling(arrays[i])
    ]
    if replicated and view.devices > 1:
        _warn_replicated(name, replicated, view)
    bare = [decided.leaves[i] for i in arrays if not is_in_module(decided.leaves[i])]
    _warn_forgotten(name, bare, layouts.otherwise, view)
    return Targets(
        mesh,
        {i: decisions[i] for i in arrays if decisions[i].specified},
        frozenset(nameless),
        frozenset(donated),
    )


def _warn_forgotten(name: str, leaves: Sequence[Leaf], rules: Layout, view: MeshView) -> None:
    """Warn of bare arrays that the rules place whole because that for the batch was forgotten."""
    found = [(leaf, forgotten_axes(rules, leaf.axes, view)) for leaf in leaves]
    having = [(leaf, forgotten) for leaf, forgotten in found if forgotten]
    if not having:
        return
    arrays = listed([f"`{leaf.path}` {array_text(leaf.value)}" for leaf, _ in having])
    warn(f"{name}: {forgotten_text(arrays, having[0][1])}")


def warn_unplaced(
    name: str, paths: Sequence[Path], arrays: Sequence[AnyArray], given: Callable[[Path], bool]
) -> None:
    """Warn of arrays that nobody has placed beside arrays on several devices, and that no rules
    place: they are replicated, so that each device does all the work with them.

    Args:
        name: the name of the function.
        paths: the paths of the arguments' arrays.
        arrays: these arrays.
        given: whether `in_shardings` says where the array at a path is.
    """
    devices = max(map(_devices, arrays), default=1)
    if devices == 1:
        return
    unplaced: list[str] = []
    for path, array in zip(paths, arrays, strict=True):
        # About a traced array the function that traces it decides.
        if not is_worth_telling(array) or isinstance(array, Tracer) or given(path):
            continue
        if is_unplaced(array):
            unplaced.append(f"`{path}` {array_text(array)}")
    if not unplaced:
        return
    it = "it" if len(unplaced) == 1 else "them"
    warn(
        f"{name}: nobody has placed {listed(unplaced)}, and other arguments are on {devices} "
        f"devices, so each of these gets all of {it} and does all the work: "
        f"place {it} with `ft.shard`, or write `rules=` or `in_shardings=`"
    )


def _devices(array: AnyArray) -> int:
    """The number of devices that an array is on, or will be; 1 if that is not known."""
    # As of a traced array.
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct) or isinstance(array, Tracer):
        return 1
    if array.sharding is None:
        return 1
    return array.sharding.num_devices


def check_rules(call: Any, rules: Layout, signature: Signature) -> None:
    """Check that each filter in the rules of a function decides about a leaf of a call.

    Raises:
        ShardingError: a filter decides about none.
    """
    leaves, parts = _read_arguments(call, rules_for_parameters(rules, signature))
    problems = filter_problems(leaves, parts)
    if problems:
        what = f"{signature.name}: the rules have filters that lay out nothing"
        raise ShardingError(what, problems)


def _read_arguments(call: Any, layouts: ParameterLayouts) -> tuple[Leaves, list[Part]]:
    """The leaves of a call, and the parts of the rules."""
    leaves, parts = layouts.read(call)
    arrays = for_arrays(as_layout(layouts.otherwise))
    return leaves, [part._replace(for_arrays=arrays) for part in parts]


def rules_for_parameters(rules: Layout, signature: Signature) -> ParameterLayouts:
    """Rules as the layout of each parameter, so that the patterns of filters begin in the
    argument."""
    return ParameterLayouts("rules", {}, signature, otherwise=rules)


def _without_names(decided: Decisions) -> tuple[list[Decision], set[int]]:
    """The decisions, in which arrays without names are replicated; and the indices of these."""
    decisions, nameless = list(decided.decisions), set[int]()
    for i, (leaf, decision) in enumerate(zip(decided.leaves, decisions, strict=True)):
        if not is_in_module(leaf) and not leaf.shape:
            # JAX replicates a scalar at no cost, wherever it is.
            decisions[i] = decision._replace(specified=False)
            continue
        has_rules = decision.specified or not is_bare(leaf)
        has_names = leaf.annotated or leaf.spec is not None or leaf.misfit is not None
        if has_rules and (has_names or not decision.faults):
            continue
        nameless.add(i)
        decisions[i] = whole(leaf)._replace(specified=True).settle()
    return decisions, nameless


def _warn_replicated(name: str, leaves: Sequence[Leaf], view: MeshView) -> None:
    """Warn about replicated arrays; one warning for those that lack the same."""
    groups = defaultdict[tuple[str, str], list[Leaf]](list)
    for leaf in leaves:
        if any(leaf.axes):
            lack, remedy = "axes but the rules know no names", "add `ft.AxisRules` to the rules"
        elif leaf.unread is None:
            lack, remedy = "no axis names", "annotate {}"
        else:
            reason, remedy = leaf.unread
            lack = f"no axis names ({reason})"
        groups[lack, remedy].append(leaf)
    for (lack, remedy), own in groups.items():
        arrays = listed([f"`{leaf.path}` {array_text(leaf.value)}" for leaf in own])
        in_optimizer = any(is_optimizer_state(cls) for leaf in own for cls in leaf.within)
        optimizer = USE_PLAN_OPTIMIZER if in_optimizer else ""
        what, verb = ("it", "has") if len(own) == 1 else ("them", "have")
        advice = remedy.replace("{}", what)
        warn(
            f"{name}: {arrays} {verb} {lack} and nobody has placed {what}, "
            f"so this is replicated on the mesh {view}: "
            f"{advice}, place {what} with `ft.shard`, or write `in_shardings=`"
            f"{optimizer}",
        )
