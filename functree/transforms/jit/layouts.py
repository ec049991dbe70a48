"""This module decides the shardings of a call's uncommitted arguments and of its result.

Uncommitted arguments ─► the same arguments, placed with `in_shardings` and the rules. A result ─►
its shardings, from `out_shardings` and the donated arguments.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import Shardings
from functree.calls.signature import Record, Signature
from functree.devices.constraint import with_constraint
from functree.devices.meshes import MeshView, agreed_mesh, without_devices
from functree.devices.placement import is_sharded_as, mesh_of, sharding_text
from functree.errors import Problem, ShardingError, count, listed, warn
from functree.labels.leaves import Leaf, Leaves, is_bare, is_in_module
from functree.layout.decide import (
    UNSPECIFIED,
    decide_parts,
    filter_problems,
    plan_leaves,
)
from functree.layout.decision import Decision, layout_problem, refuse, whole
from functree.layout.layout import Layout, LayoutTree, Part, as_partial, own_meshes, read_on_mesh
from functree.layout.rules import forgotten_axes, forgotten_text
from functree.layout.state_sharding import for_arrays
from functree.placing.shard import moved_once
from functree.tree.arrays import AnyArray, Tree, abstract, array_text, is_array
from functree.tree.nodes import children, walk
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.kinds import ARRAY


class Placement(NamedTuple):
    """The shardings with which similar calls place their arguments.

    Attributes:
        shardings: the sharding of each array that is placed, by its index.
        can_run: whether the mesh has devices. If not, the placed arrays are abstract: a program
            for a mesh without devices can be compiled but not run.
        donated: the indices of the donated arrays. Their placed copies share no buffer with the
            given arrays.
    """

    shardings: Mapping[int, NamedSharding]
    can_run: bool
    donated: Collection[int]

    def place(self, arrays: Sequence[Any]) -> list[Any]:
        """Place the arrays that have a sharding here, and return all arrays of the call."""
        new, traced, moving = list(arrays), list[int](), list[int]()
        for i, sharding in self.shardings.items():
            if isinstance(arrays[i], Tracer):
                traced.append(i)
            elif self.can_run and not isinstance(arrays[i], jax.ShapeDtypeStruct):
                moving.append(i)
            else:
                new[i] = abstract(jax.typeof(arrays[i]), sharding)
        # `device_put` may share a buffer with the given array, even with `may_alias=False`. This
        # happens on the array's own device, if the array is replicated.
        copies = {
            id(arrays[i]): jnp.array(arrays[i], copy=True) for i in moving if i in self.donated
        }
        sources = [copies.get(id(arrays[i]), arrays[i]) for i in moving]
        placed = moved_once(sources, [self.shardings[i] for i in moving])
        if traced:
            wanted = tuple(self.shardings[i] for i in traced)
            placed += _constrained([arrays[i] for i in traced], wanted)
        for i, array in zip((*moving, *traced), placed, strict=True):
            new[i] = array
        return new


# The function is jitted, since only a jitted function has devices for a constraint on an abstract
# mesh. An eager `grad` or `vmap` compiles it once.
@partial(jax.jit, static_argnums=1)
def _constrained(arrays: list[Any], shardings: tuple[NamedSharding, ...]) -> list[Any]:
    pairs = zip(arrays, shardings, strict=True)
    return [with_constraint(x, to.mesh, to.spec, to.memory_kind) for x, to in pairs]


def is_unplaced(array: Any) -> bool:
    """Return whether an array is uncommitted.

    NumPy arrays, abstract arrays without a sharding, and traced arrays without a mesh count as
    uncommitted.
    """
    if isinstance(array, Tracer):
        return jax.typeof(array).sharding.mesh.empty
    if isinstance(array, jax.Array):
        return not array.committed
    return getattr(array, "sharding", None) is None


def is_worth_telling(array: AnyArray) -> bool:
    """Return whether to warn about an array if it is replicated or moved.

    Random keys, which differ in each step, and small arrays do not warrant a warning.
    """
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
    """Return the shardings that the rules give to uncommitted arguments.

    Trees are laid out with all rules, as `ft.shard` lays them out. An array that is itself an
    argument is laid out with a pattern that names it, or otherwise with its annotation and the
    `AxisRules`.

    Args:
        call: the arguments of the call.
        arrays: the uncommitted arrays, by index.
        rules: the function's rules.
        signature: the function's signature.
        mesh: the function's mesh.

    Raises:
        ShardingError: if the rules do not fit an array, as in `ft.plan`.
    """
    leaves, parts = _read_arguments(call, rules, signature)
    view = agreed_mesh(mesh, own_meshes(parts))
    # `check_rules` checks the filters, for all arguments together.
    decided = decide_parts(leaves, as_partial(parts), view, allow_unspecified=True)
    wanted, nameless, missing = dict[int, Decision](), list[Leaf](), list[Problem]()
    for i, array in arrays.items():
        leaf, decision = decided.leaves[i], decided.decisions[i]
        # Replicating a scalar is cheap.
        if not is_in_module(leaf) and not leaf.shape:
            continue
        has_names = leaf.annotated or leaf.spec is not None or leaf.misfit is not None
        is_left = is_bare(leaf) and not decision.specified
        if is_left or (decision.faults and not has_names):
            nameless.append(leaf)
            # The compiler chooses the sharding of a traced array without names.
            if not isinstance(array, Tracer):
                wanted[i] = whole(leaf)
        elif decision.specified:
            wanted[i] = decision
        else:
            missing.append(leaf.problem(*UNSPECIFIED))
    # Committed arrays stay where they are, so their problems do not matter. Arrays without names
    # are replicated, with a warning.
    settled = {leaf.path for i, leaf in enumerate(decided.leaves) if i not in arrays}
    # A problem of an uncommitted leaf that follows a parameter may be reported for the parameter.
    followed = [decided.leaves[i].follows for i in arrays]
    settled.difference_update([follows.path for follows in followed if follows is not None])
    settled.update(leaf.path for leaf in nameless)
    problems = [problem for problem in decided.problems if problem.path not in settled]
    problems += missing
    name = signature.name
    if problems:
        raise refuse(problems, view, f"{name}: rules of uncommitted arguments: ")
    if view.devices > 1:
        _warn_replicated(name, nameless, view)
    bare = [decided.leaves[i] for i in arrays if not is_in_module(decided.leaves[i])]
    _warn_forgotten(name, bare, rules, view)
    return {
        i: NamedSharding(mesh, decision.spec, memory_kind=decision.memory_kind)
        for i, decision in wanted.items()
    }


def _warn_forgotten(name: str, leaves: Sequence[Leaf], rules: Layout, view: MeshView) -> None:
    """Warn about bare arrays that are unsharded because no rule covers the batch."""
    pairs = [(leaf, forgotten_axes(rules, leaf.axes, view)) for leaf in leaves]
    affected = [(leaf, forgotten) for leaf, forgotten in pairs if forgotten]
    if affected:
        arrays = listed([f"`{leaf.path}` {array_text(leaf.value)}" for leaf, _ in affected])
        warn(f"{name}: {forgotten_text(arrays, affected[0][1])}")


def warn_unplaced(
    name: str, paths: Sequence[Path], arrays: Sequence[AnyArray], given: Callable[[Path], bool]
) -> None:
    """Warn about uncommitted arrays without a layout, if other arrays are on several devices.

    These arrays are replicated, so every device repeats the work on them.

    Args:
        name: the function's name.
        paths: the paths of the arguments' arrays.
        arrays: the arrays at these paths.
        given: a function that returns whether `in_shardings` has an entry for a path.
    """
    placed: list[Any] = [x for x in arrays if not is_unplaced(x) and not isinstance(x, Tracer)]
    devices = max((x.sharding.num_devices for x in placed), default=1)
    if devices == 1:
        return
    unplaced: list[str] = []
    for path, array in zip(paths, arrays, strict=True):
        # The outer function places traced arrays.
        if not is_worth_telling(array) or isinstance(array, Tracer) or given(path):
            continue
        if is_unplaced(array):
            unplaced.append(f"`{path}` {array_text(array)}")
    if unplaced:
        warn(
            f"{name}: every device repeats the work on uncommitted arrays, since other arguments "
            f"span {devices} devices ({listed(unplaced)}): place them with `ft.shard`, or pass "
            "`rules=` or `in_shardings=`"
        )


def warn_without_mesh(name: str, arrays: Sequence[AnyArray]) -> None:
    """Warn that rules have no effect without a mesh, although there are several devices."""
    if jax.device_count() > 1 and any(map(is_worth_telling, arrays)):
        warn(
            f"{name}: one of {jax.device_count()} devices does all the work, since `rules=` shards "
            "nothing without a mesh: pass `mesh=`, or create the state with `ft.init` and place "
            "the batch with `ft.shard`"
        )


def check_rules(call: Any, rules: Layout, signature: Signature) -> None:
    """Check that each filter in a function's rules applies to at least one leaf of a call.

    Raises:
        ShardingError: if a filter applies to no leaf.
    """
    problems = filter_problems(*_read_arguments(call, rules, signature))
    if problems:
        what = f"{signature.name}: the rules have unused filters or patterns"
        raise ShardingError(what, problems)


def _read_arguments(call: Any, rules: Layout, signature: Signature) -> tuple[Leaves, list[Part]]:
    """Read the leaves of a call, with the rules as the layout of each parameter.

    The patterns of filters match paths within an argument.
    """
    leaves, parts = ParameterLayouts("rules", {}, signature, otherwise=rules).read(call)
    arrays = for_arrays(rules)
    return leaves, [part._replace(for_arrays=arrays) for part in parts]


def _warn_replicated(name: str, leaves: Sequence[Leaf], view: MeshView) -> None:
    """Warn about uncommitted arrays that are replicated, since no rule names their axes."""
    arrays: list[str] = []
    for leaf in leaves:
        if isinstance(leaf.value, Tracer) or not is_worth_telling(leaf.value):
            continue
        why = "no axis names"
        if any(leaf.axes):
            why = f'no rules for "{leaf.axes}"'
        arrays.append(f"`{leaf.path}` {array_text(leaf.value)} ({why})")
    if arrays:
        warn(
            f"{name}: uncommitted arrays are replicated on mesh {view}: {listed(arrays)}: annotate "
            "them and add `ft.AxisRules` to the rules, place them with `ft.shard`, or pass "
            "`in_shardings=`"
        )


# The layouts of `in_shardings`


def planning_mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh | None:
    """Return the mesh for a plan.

    Inside shard_map, the mesh is None, so that the plan raises its error for Manual axes.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        return None
    return mesh


def by_in_shardings(
    call: Record,
    arrays: Sequence[Any],
    layouts: ParameterLayouts,
    mesh: Mesh | AbstractMesh | None,
) -> tuple[Mesh | AbstractMesh | None, Shardings]:
    """Return the mesh of `in_shardings`, and the sharding that it gives to each array.

    The sharding is None for an array that may have any sharding.

    Raises:
        ShardingError: if a layout does not fit.
        ShardingError: if a committed array is sharded differently.
    """
    leaves, parts = layouts.read(call)
    view = agreed_mesh(planning_mesh(mesh), own_meshes(parts))
    # The plan's problems are raised below, together with the problems of wrongly sharded arrays.
    planned = plan_leaves(leaves, parts, view, check=False, allow_unspecified=True)
    problems = list(planned.problems)
    shardings: Shardings = [None] * len(arrays)
    # A spec that does not fit its array cannot become a sharding.
    if not problems:
        shardings = [None if row.spec is None else planned.sharding(row) for row in planned.rows]
    reported: set[Path] = set()
    pairs = zip(planned.rows, shardings, strict=True)
    for leaf, array, (row, wanted) in zip(leaves.leaves, arrays, pairs, strict=True):
        # Tracers, and arrays for an abstract mesh, are on no device yet.
        if wanted is None or isinstance(wanted.mesh, AbstractMesh) or isinstance(array, Tracer):
            continue
        explicit = AxisType.Explicit in wanted.mesh.axis_types
        if not is_unplaced(array):
            # On Explicit axes, the mesh is part of an array's type: an equivalent sharding on a
            # different mesh is a different type.
            is_typed = not explicit or mesh_of(array) == wanted.mesh
            is_taken = is_typed and is_sharded_as(array, wanted)
            # A parameter's problem is reported once, not again for its moments.
            if not is_taken and row.follows not in reported:
                reported.add(leaf.path)
                # Moving an array takes time, so users must request the move.
                why = f"is sharded {sharding_text(array.sharding)}, but `in_shardings` specifies "
                why += f"{sharding_text(wanted)}; `ft.jit` does not move arrays implicitly"
                move = "move it once: `ft.shard(x, layout, mesh)`"
                problems.append(layout_problem(leaf, (why, move)))
        elif isinstance(array, jax.ShapeDtypeStruct) or without_devices(wanted.mesh) is not None:
            continue
        elif explicit:
            problems.append(layout_problem(leaf, _UNTYPED))
    if problems:
        raise refuse(problems, planned.view, f"{layouts.signature.name}: in_shardings: ")
    return planned.mesh, shardings


# JAX would move the array, but would not change its type.
_UNTYPED = (
    "is uncommitted and not on a mesh: on Explicit axes, its type in the body would be unsharded, "
    "whatever `in_shardings` specifies",
    "move it first: `ft.shard(x, layout, mesh)`",
)


# The result


StateForm = tuple[type, tuple[tuple[Keys, tuple[int, ...], Any], ...]]
"""The form that two trees share if either can replace the other as state.

The form consists of the root's class, and of the path, shape and dtype of each array. A model's
gradient has the model's form, although None replaces the model's functions."""


def state_form(tree: Any) -> StateForm:
    """Return the form of a tree. Its arrays may be abstract."""
    arrays = [(keys, x.shape, x.dtype) for keys, x, kind in walk(tree) if kind is ARRAY]
    return type(tree), tuple(arrays)


Donated = Mapping[StateForm, Mapping[Path, tuple[NamedSharding | None, ...]]]
"""The shardings of the donated arguments' arrays, by the argument's form and path."""


def closed(name: str, result: Tree, donated: Donated, given: Shardings) -> Shardings:
    """Return the sharding of each array of a result.

    An array gets its given sharding, or otherwise keeps the sharding of the donated argument that
    it replaces. Outer parts are compared with donated arguments before inner parts. A bare array
    never keeps a sharding, since it may have an argument's shape without replacing the argument.

    Args:
        name: the function's name.
        result: the function's result.
        donated: the donated arguments.
        given: the sharding that `out_shardings` gives to each array of the result, or None.

    Raises:
        ShardingError: if a part has the form of several arguments that are sharded differently.
    """
    roots = {root for root, _ in donated}
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
        # Computing the form of every part would be slow.
        same = donated.get(state_form(node), {}) if type(node) in roots else {}
        if not same:
            waiting += reversed([((*keys, key), child) for key, child in below])
            continue
        kept, *others = set(same.values())
        wanted = given[start : start + len(kept)]
        if others and None in wanted:
            problems.append(_several(Path(keys), same))
        shardings += [new or old for new, old in zip(wanted, kept, strict=True)]
    if problems:
        parts = count(len(problems), "part")
        raise ShardingError(
            f"{name}: the shardings of {parts} of the result are ambiguous", problems
        )
    return shardings


def _several(path: Path, arguments: Iterable[Path]) -> Problem:
    """Build the problem for a part of the result that may replace several arguments."""
    names = listed([f"`{argument}`" for argument in arguments])
    why = f"has the structure of the donated arguments {names}, which are sharded differently"
    remedy = "pass `out_shardings=` to choose how the result is sharded"
    return Problem(path, None, "" if path else "the result", why, remedy)


def resolve_out_shardings(
    signature: Signature, result: Tree, layouts: LayoutTree, mesh: Mesh | AbstractMesh | None
) -> Shardings:
    """Resolve `out_shardings`, a prefix of the result.

    Rules use the axis names in the result's annotation.

    Raises:
        ShardingError: if a layout does not fit.
        RuleError: if the prefix does not match the structure of the result.
    """
    # Here, a record has one field, with the annotation of the result.
    record = signature.result
    read = read_on_mesh(record(result), record(layouts), planning_mesh(mesh))
    planned = plan_leaves(*read, check=False, allow_unspecified=True)
    if planned.problems:
        raise refuse(planned.problems, planned.view, f"{signature.name}: out_shardings: ")
    return [None if row.spec is None else planned.sharding(row) for row in planned.rows]
