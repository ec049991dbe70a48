"""The arguments of a call ─► the same, placed where `in_shardings` and the rules lay them out if
nobody has placed them; its result ─► the shardings by `out_shardings` and the donated arguments."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import Shardings
from functree.calls.signature import Record, Signature
from functree.devices.constraint import with_constraint
from functree.devices.meshes import MeshView, agreed_mesh, without_devices
from functree.devices.placement import is_sharded_as, memory_of, mesh_of, sharding_text
from functree.devices.specs import spec_text
from functree.errors import Problem, ShardingError, count, listed, warn
from functree.labels.leaf import Leaf, is_bare, is_in_module
from functree.labels.leaves import Leaves
from functree.layout.decide import UNSPECIFIED, Decisions, decide_parts, filter_problems
from functree.layout.decision import (
    USE_PLAN_OPTIMIZER,
    Decision,
    Fault,
    followed_paths,
    is_optimizer_state,
    layout_problem,
    leaves_at_fault,
    whole,
    without_repeats,
)
from functree.layout.layout import Layout, LayoutTree, Part, as_partial, own_meshes
from functree.layout.plan.make_plan import plan_leaves, plan_tree
from functree.layout.rules import forgotten_axes, forgotten_text
from functree.layout.state_sharding import for_arrays
from functree.placing.shard import moved_once
from functree.tree.arrays import AnyArray, Tree, abstract, array_text, is_array
from functree.tree.nodes import children, walk
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.kinds import ARRAY


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the arguments of some calls are placed.

    Attributes:
        shardings: the sharding of each array that is placed, by its index.
        can_run: whether the mesh has devices. If not, the placed arrays are abstract: a program
            for such a mesh can be compiled, and not run.
        donated: the indices of the donated arrays: their placed copies share no buffer with the
            given arrays.
    """

    shardings: Mapping[int, NamedSharding]
    can_run: bool
    donated: Collection[int]

    def place(self, arrays: Sequence[Any]) -> list[Any]:
        """All arrays of a call, with those that are placed where they belong."""
        new, traced, moving = list(arrays), dict[int, Any](), dict[int, Any]()
        for i, sharding in self.shardings.items():
            array = arrays[i]
            if isinstance(array, Tracer):
                traced[i] = array
            elif isinstance(array, jax.ShapeDtypeStruct):
                new[i] = array.update(sharding=sharding)
            elif self.can_run:
                moving[i] = array
            elif isinstance(sharding.mesh, Mesh):
                new[i] = abstract(jax.typeof(array), sharding)
        if traced:
            for i, array in self._constrain(traced).items():
                new[i] = array
        # `device_put` may share a buffer with the given array, even with `may_alias=False`: that on
        # the device where the given array is, if the array is replicated.
        copies = {
            id(array): jnp.array(array, copy=True)
            for i, array in moving.items()
            if i in self.donated
        }
        own = [copies.get(id(array), array) for array in moving.values()]
        moved = moved_once(own, [self.shardings[i] for i in moving])
        for i, array in zip(moving, moved, strict=True):
            new[i] = array
        return new

    # A jitted function, because outside of one JAX has no devices for a constraint on an abstract
    # mesh. It is made once, so that an eager `grad` or `vmap` compiles it once.
    @cached_property
    def _constrain(self) -> Callable[[dict[int, Any]], dict[int, Any]]:
        def constrain(traced: dict[int, Any]) -> dict[int, Any]:
            new: dict[int, Any] = {}
            for i, array in traced.items():
                one = self.shardings[i]
                new[i] = with_constraint(array, one.mesh, one.spec, one.memory_kind)
            return new

        return jax.jit(constrain)


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


def by_rules(
    call: Any,
    arrays: Mapping[int, Any],
    rules: Layout,
    signature: Signature,
    mesh: Mesh | AbstractMesh,
) -> dict[int, NamedSharding]:
    """The shardings that the rules give to arguments that nobody has placed.

    Trees are laid out by the whole of the rules, as `ft.shard` lays them out. An argument that is
    one array is laid out by a pattern that names it, otherwise by its annotation and `AxisRules`.

    Args:
        call: the call.
        arrays: the arrays that nobody has placed, by their indices.
        rules: the rules.
        signature: the signature of the function.
        mesh: the mesh of the function.

    Raises:
        ShardingError: the rules do not fit an array, as in `ft.plan`.
    """
    leaves, parts = _read_arguments(call, rules, signature)
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
    name = signature.name
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
    _warn_forgotten(name, bare, rules, view)
    found: dict[int, NamedSharding] = {}
    for i, array in arrays.items():
        # The layout of a traced array without names is left to the compiler.
        is_left = i in nameless and isinstance(array, Tracer)
        if decisions[i].specified and not is_left:
            found[i] = NamedSharding(mesh, decisions[i].spec, memory_kind=decisions[i].memory_kind)
    return found


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
    problems = filter_problems(*_read_arguments(call, rules, signature))
    if problems:
        what = f"{signature.name}: the rules have filters that lay out nothing"
        raise ShardingError(what, problems)


def _read_arguments(call: Any, rules: Layout, signature: Signature) -> tuple[Leaves, list[Part]]:
    """The leaves of a call, and the rules as the layout of each parameter: the patterns of filters
    begin in the argument."""
    leaves, parts = ParameterLayouts("rules", {}, signature, otherwise=rules).read(call)
    arrays = for_arrays(rules)
    return leaves, [part._replace(for_arrays=arrays) for part in parts]


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


# The layouts of `in_shardings`


def planning_mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """The mesh for a plan. Inside shard_map it is None, so that the plan raises its error for
    Manual axes."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        return None
    return mesh


def by_in_shardings(
    call: Record,
    arrays: Sequence[AnyArray],
    layouts: ParameterLayouts,
    mesh: Mesh | AbstractMesh | None,
) -> tuple[Mesh | AbstractMesh | None, Shardings]:
    """The mesh of `in_shardings`, and the sharding that they give to each array; None to an array
    that may have any.

    Raises:
        ShardingError: a layout does not fit, or an array that somebody has placed is sharded
            otherwise.
    """
    leaves, parts = layouts.read(call)
    view = agreed_mesh(planning_mesh(mesh), own_meshes(parts))
    # Its problems are raised together with those of arrays that are sharded otherwise.
    planned = plan_leaves(leaves, parts, view, check=False, allow_unspecified=True)
    problems = list(planned.problems)
    shardings: Shardings = [None] * len(arrays)
    # A spec that does not fit its array cannot be made a sharding.
    if not problems:
        shardings = [None if row.spec is None else planned.sharding(row) for row in planned.rows]
    for leaf, array, wanted in zip(leaves.leaves, arrays, shardings, strict=True):
        # A tracer is on no device yet, nor is an array beside an abstract mesh.
        if wanted is None or isinstance(wanted.mesh, AbstractMesh) or isinstance(array, Tracer):
            continue
        if not is_unplaced(array):
            if not _is_taken(array, wanted):
                problems.append(layout_problem(leaf, _other_sharding(array, wanted)))
        elif isinstance(array, jax.ShapeDtypeStruct) or without_devices(wanted.mesh) is not None:
            continue
        elif AxisType.Explicit in wanted.mesh.axis_types:
            problems.append(layout_problem(leaf, _untyped(array)))
    if problems:
        problems = without_repeats(problems, {row.path: row.follows for row in planned.rows})
        at_fault = leaves_at_fault(problems) or "the call"
        headline = (
            f"{layouts.signature.name}: in_shardings does not fit {at_fault} on mesh {planned.view}"
        )
        raise ShardingError(headline, problems)
    return planned.mesh, shardings


def _is_taken(array: Any, wanted: NamedSharding) -> bool:
    """Whether JAX accepts an array without moving it."""
    # On Explicit axes the mesh is part of the array's type: an equivalent sharding on another mesh
    # is another type.
    if AxisType.Explicit in wanted.mesh.axis_types and mesh_of(array) != wanted.mesh:
        return False
    return is_sharded_as(array, wanted)


def _other_sharding(array: Any, wanted: NamedSharding) -> Fault:
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


# The result


class StateForm(NamedTuple):
    """What two trees have in common if one can replace the other as state: the class of the root,
    and the path, shape and dtype of each array. Gradients of a model have its form, although they
    have None for its functions."""

    root: type
    arrays: tuple[tuple[Keys, tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, tree: Any) -> "StateForm":
        """The form of a tree, whose arrays may be abstract."""
        arrays = [(keys, x.shape, x.dtype) for keys, x, kind in walk(tree) if kind is ARRAY]
        return cls(type(tree), tuple(arrays))


Donated = Mapping[StateForm, Mapping[Path, tuple[NamedSharding | None, ...]]]
"""The donated arguments by their form: for the path of each, the shardings of its arrays."""


def closed(name: str, result: Tree, donated: Donated, given: Shardings) -> Shardings:
    """For each array of a result, the sharding that was given, or else the one that it keeps from a
    donated argument.

    Outer parts are compared before inner ones. A bare array never keeps a sharding: that it has the
    shape of an argument does not mean that it replaces it.

    Args:
        name: the name of the function.
        result: its result.
        donated: the donated arguments.
        given: for each array of the result the sharding that `out_shardings` gives to it, or None.

    Raises:
        ShardingError: a part has the form of several arguments, which are sharded differently.
    """
    roots = {form.root for form in donated}
    shardings: list[NamedSharding | None] = []
    problems: list[Problem] = []
    waiting: list[tuple[Keys, Any]] = [((), result)]
    while waiting:
        keys, node = waiting.pop()
        below, start = children(node), len(shardings)
        if below is None:
            if is_array(node):
                shardings.append(given[start])
            continue
        # To compute the form of every part would be slow.
        same = donated.get(StateForm.of(node), {}) if type(node) in roots else {}
        if not same:
            waiting += reversed([((*keys, key), child) for key, child in below])
            continue
        kept, *others = set(same.values())
        own = given[start : start + len(kept)]
        if others and None in own:
            problems.append(_several(Path(keys), same))
        shardings += [one or other for one, other in zip(own, kept, strict=True)]
    if problems:
        parts = count(len(problems), "part")
        raise ShardingError(
            f"{name}: it is not known which shardings {parts} of the result should keep", problems
        )
    return shardings


def _several(path: Path, arguments: Iterable[Path]) -> Problem:
    """The problem of a part of the result that may replace several arguments."""
    names = listed([f"`{argument}`" for argument in arguments])
    why = f"has the structure of the donated arguments {names}, which are sharded differently"
    remedy = "write `out_shardings=`, which says how the result is sharded"
    return Problem(path, None, "" if path else "the result", why, remedy)


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
        record(result), record(layouts), planning_mesh(mesh), check=False, allow_unspecified=True
    )
    if planned.problems:
        at_fault = leaves_at_fault(planned.problems) or "the result"
        headline = f"{signature.name}: out_shardings does not fit {at_fault} on mesh {planned.view}"
        raise ShardingError(headline, planned.problems)
    return [None if row.spec is None else planned.sharding(row) for row in planned.rows]
