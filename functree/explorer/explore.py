"""`explore` ranks a function's layouts on several meshes, based on their compiled programs.

`candidates` pairs the meshes and the layouts that an exploration tries.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import tree_leaves

from functree.argument_checks import FLAG, FUNCTION, MAPPING, SIZE, TEXT, Takes, check
from functree.calls.stages import SMALLER
from functree.compiled.flops import count_flops
from functree.devices.make_mesh import make_mesh
from functree.devices.meshes import mesh_axes, mesh_view, spec_text
from functree.devices.targets import Target
from functree.errors import FunctreeError, Problem, RuleError, count, error_text
from functree.explorer.hardware import Hardware, Kind, bandwidth, check_links, kind_of, wire_bytes
from functree.explorer.progress import attempts
from functree.explorer.ranking import GIVEN, Candidate, Ranking, name_of, ranked
from functree.explorer.step import Step
from functree.layout.fsdp import FSDP
from functree.layout.layout import Layout, LayoutTree, SpecLayout, as_layout, is_layout, walk
from functree.layout.plan.plan import Plan
from functree.layout.plan.text import per_device
from functree.layout.rules import AxisRules
from functree.report.table import bytes_text
from functree.tree.arrays import Tree, array_text

# Candidates


def candidates(meshes: Any, layouts: Mapping[str, LayoutTree]) -> list[Candidate]:
    """Pair meshes with layouts, in the given order.

    Each given mesh is paired with each layout. A mesh made from a number of devices is paired only
    with the layouts that name all its mesh axes of size above 1.

    Raises:
        ShardingError: if a mesh has an invalid name or size.
        RuleError: if `meshes` contains a number of devices, but the layouts name no mesh axes.
    """
    by_key: dict[tuple[tuple[tuple[str, int], ...], str], Candidate] = {}
    for mesh in _listed(meshes):
        if isinstance(mesh, Mapping):
            pairs = [(mesh_view(mesh).sizes, name) for name in layouts]
        else:
            pairs = _factored(mesh, layouts)
        for sizes, name in pairs:
            by_key[tuple(sizes.items()), name] = Candidate(sizes, name, layout=layouts[name])
    return list(by_key.values())


def _listed(meshes: Any) -> Sequence[Any]:
    """Return a list of meshes, from one mesh or several."""
    return meshes if isinstance(meshes, list | tuple) else [meshes]


def _are_meshes(value: Any) -> bool:
    entries = _listed(value)
    return bool(entries) and all(isinstance(one, Mapping) or SIZE.fits(one) for one in entries)


MESHES = Takes(
    'dicts of sizes, such as `[{"data": 8, "model": 4}]`, or the total number of devices',
    _are_meshes,
)
"""The values that `candidates` accepts for meshes."""


def _factored(
    devices: int, layouts: Mapping[str, LayoutTree]
) -> Iterator[tuple[Mapping[str, int], str]]:
    """Yield all meshes of this many devices, each with the layouts that fit it.

    A layout fits a mesh if it names all mesh axes whose size is above 1.
    """
    used = {name: named_mesh_axes(layout) for name, layout in layouts.items()}
    # The compiled function may name a mesh axis that only some layouts use, so each mesh has all of
    # the mesh axes.
    names = list(dict.fromkeys(chain.from_iterable(used.values())))
    if not names:
        raise RuleError(
            f"explore: cannot divide {count(devices, 'device')}, because the layouts name no mesh "
            'axes that functree can read: pass dicts of sizes, such as `meshes=[{"data": 8}]`'
        )
    divisors = [size for size in range(devices, 0, -1) if devices % size == 0]
    for sizes in product(divisors, repeat=len(names)):
        if math.prod(sizes) != devices:
            continue
        mesh = dict(zip(names, sizes, strict=True))
        for name, axes in used.items():
            # Along a mesh axis that the layout does not name, all devices would do the same work.
            if all(size == 1 or axis in axes for axis, size in mesh.items()):
                yield mesh, name


def named_mesh_axes(layouts: LayoutTree) -> tuple[str, ...]:
    """Return the mesh axes that a layout, or a tree of layouts, names, in order of appearance."""
    names: dict[str, None] = {}
    for layout in tree_leaves(layouts, is_leaf=is_layout):
        if is_layout(layout):
            for part in walk(as_layout(layout)):
                names |= dict.fromkeys(_named(part))
    return tuple(names)


def _named(layout: Layout) -> Iterator[str]:
    """Yield the mesh axes that a layout names itself. Those in a function are unknown."""
    match layout:
        case AxisRules():
            for rule in layout.table:
                yield from rule.mesh_axes
        case FSDP():
            yield from layout.mesh_axes
        case SpecLayout():
            for entry in layout.spec.partitions:
                yield from mesh_axes(entry)
        case Plan():
            yield from named_mesh_axes([row.spec for row in layout.rows])


# Exploration

_HARDWARE = Takes("an `ft.Hardware`", lambda value: isinstance(value, Hardware))
_ARGS = Takes("the arguments as a tuple", lambda value: isinstance(value, tuple | list))
_LAYOUTS = Takes(
    "a dict from names to layouts", lambda value: MAPPING.fits(value) and len(value) > 0
)


def explore(
    step: Callable[..., Tree],
    args: Sequence[Tree],
    *,
    meshes: Any,
    layouts: Mapping[str, LayoutTree],
    target: str | None = None,
    hardware: Hardware | None = None,
    out_shardings: LayoutTree = None,
    progress: bool = True,
) -> Ranking:
    """Compile a function for several meshes and layouts, and rank the combinations. Nothing is run.

    Candidates whose arguments cannot fit in memory, according to their plan, are not compiled. The
    target's compiler compiles all other candidates. The score is flops / (peak × efficiency) plus,
    for each mesh axis, bytes sent / bandwidth; see `Candidate`. Scores within 15 % of the best
    are ties. Scores do not forecast times, since they ignore overlap and latency.

    An interrupt (Ctrl-C) ends the exploration. The ranking then lists the remaining candidates as
    not compiled.

    Args:
        step: the function. If it comes from `ft.jit`, its options, such as donation, are kept, but
            its layouts and mesh are replaced. Its `rules` apply to layouts without rules.
        args: its arguments, which may be abstract.
        meshes: a dict of sizes, such as `{"data": 8, "model": 4}`, the total number of devices, or
            a list of these. A number stands for all ways to divide it among the mesh axes that the
            layouts name.
        layouts: a dict from names to layouts as in `ft.jit(in_shardings=...)`. If parts of a layout
            have rules, the first such part is also the function's `rules`.
        target: the target to compile for, as in `ft.make_mesh`: `"tpu:v5e:4x8"`. Without a target,
            programs are compiled for this machine's devices.
        hardware: the figures for the score. The default is the target's hardware. Without a target,
            the default is a TPU v5e, which the ranking's first line names. In that case, a peak
            above the v5e's memory only adds a note.
        out_shardings: the layout of the result, as in `ft.jit`, or a dict with a layout for each
            name in `layouts`. By default, results that replace donated arguments keep the
            arguments' shardings.
        progress: whether to show progress on standard error. A terminal shows one line. A log gets
            a line for each candidate if the exploration takes several seconds.

    Raises:
        FunctreeError: if an argument is invalid.
        ShardingError: if a mesh does not have the target's number of devices.
        ShardingError: if a mesh has more devices than this machine.
        ShardingError: if the target's compiler is not installed.

    Examples:
        >>> def step(w, x: Float[Array, "batch embed"]):
        ...     return ((x @ w) ** 2).sum()
        >>> arrays = [
        ...     jax.ShapeDtypeStruct(shape, "float32")
        ...     for shape in [(512, 512), (64, 512)]
        ... ]
        >>> layouts = {
        ...     "data": (ft.P(), ft.P("data")),
        ...     "model": (ft.P(None, "model"), ft.P()),
        ... }
        >>> ranking = ft.explore(step, arrays, meshes=8, layouts=layouts)
        >>> [(row.layout_name, dict(row.mesh), row.flops) for row in ranking]
        [('model', {'data': 1, 'model': 8}, 4194304), ('data', {'data': 8,
        'model': 1}, 4194304)]
    """
    check(
        "explore: invalid arguments",
        step=(step, FUNCTION),
        args=(args, _ARGS),
        meshes=(meshes, MESHES),
        layouts=(layouts, _LAYOUTS),
        target=(target, TEXT.or_none()),
        hardware=(hardware, _HARDWARE.or_none()),
        progress=(progress, FLAG),
    )
    named = None if target is None else Target.read(target)
    kind = kind_of(named)
    if hardware is not None:
        kind = kind._replace(name=GIVEN, hardware=hardware)
    outs: Mapping[str, LayoutTree] = dict.fromkeys(layouts, out_shardings)
    if isinstance(out_shardings, Mapping) and set(out_shardings) == set(layouts):
        outs = out_shardings
    wanted = candidates(meshes, layouts)
    for candidate in wanted:
        check_links(candidate.mesh, kind.hardware)
    rows = _Exploration(Step(step, args), outs, named, kind).run(wanted, progress)
    return Ranking(ranked(rows), kind.hardware, kind.name, target)


class _Exploration(NamedTuple):
    """The settings that all candidates share.

    Attributes:
        step: the function with its arguments.
        outs: the layout of the result, by the name of the arguments' layout.
        target: the target to compile for; None for this machine.
        kind: the kind of accelerator, with the figures for the score.
    """

    step: Step
    outs: Mapping[str, LayoutTree]
    target: Target | None
    kind: Kind

    def run(self, wanted: Sequence[Candidate], progress: bool) -> list[Candidate]:
        """Return the candidates with their figures; those that may fit are compiled."""
        planned = list(map(self._planned, wanted))
        refused = [candidate for candidate in planned if candidate.problems]
        # An error about a mesh is raised before anything is compiled.
        waiting = [(one, self._mesh(one)) for one in planned if not one.problems]
        done: list[Candidate] = []
        users_errors: list[Exception] = []
        for (candidate, _), result in attempts(
            "explore: {} compiled",
            waiting,
            lambda pair: name_of(pair[0]),
            lambda pair: self._compiled(*pair),
            progress,
        ):
            if isinstance(result, Exception):
                if not isinstance(result, FunctreeError | jax.errors.JaxRuntimeError):
                    users_errors.append(result)
                result = replace(candidate, problems=_problems_of(result))
            done.append(result)
        # If the user's code fails for every candidate, the layouts are not the cause.
        if users_errors and len(users_errors) == len(waiting):
            raise users_errors[0]
        for candidate, _ in waiting[len(done) :]:
            done.append(replace(candidate, problems=(NOT_COMPILED,)))
        return done + refused

    def _planned(self, candidate: Candidate) -> Candidate:
        """Add the figures and the problems of a candidate's plan."""
        try:
            plan = self.step.plan(candidate.layout, candidate.mesh)
        except FunctreeError as error:
            return replace(candidate, problems=_problems_of(error))
        return replace(
            candidate,
            problems=plan.problems or _too_large(plan, self.kind),
            bytes_per_device=sum(row.bytes_per_device for row in plan.rows if not row.memory_kind),
        )

    def _mesh(self, candidate: Candidate) -> Mesh:
        target = None if self.target is None else self.target.text
        sizes: dict[str, Any] = dict(candidate.mesh)
        return make_mesh(target=target, **sizes)

    def _compiled(self, candidate: Candidate, mesh: Mesh) -> Candidate:
        """Compile a candidate, and add the figures of its program."""
        options = self.step.options(candidate.layout)
        out = self.outs[candidate.layout_name]
        compiled = self.step.compile({**options, "out_shardings": out, "mesh": mesh})
        ledger, flops = compiled.ledger(), count_flops(compiled.as_text() or "")
        sent, unknown = wire_bytes(ledger)
        notes = list(flops.not_understood)
        if unknown:
            notes.append(f"{bytes_text(unknown)} is moved over unknown mesh axes")
        hardware, peak = self.kind.hardware, ledger.memory.peak
        compute = flops.total / (hardware.flops * hardware.efficiency)
        wire = 0.0
        for axes, size in sent.items():
            wire += size / bandwidth(mesh_axes(axes), mesh, self.target, self.kind)
        problems: tuple[Problem, ...] = ()
        if peak > hardware.memory:
            given = bytes_text(sum(ledger.memory.arguments.values()))
            why = _excess(f"the program, whose arguments take {given}, needs", peak, self.kind)
            if self.kind.name == GIVEN:
                problems = (Problem(None, None, "", why, SMALLER),)
            # A target's compiler refuses programs that exceed its memory. The peak on this machine
            # is not a problem, since the accelerator's own program has a different peak.
            elif self.target is None:
                notes.append(f"may not fit: {why}; give a target to be sure")
        return replace(
            candidate,
            problems=problems,
            peak_bytes=peak,
            flops=flops.total,
            wire_bytes=sent,
            compute_seconds=compute,
            wire_seconds=wire,
            # A program that does not fit is not ranked.
            score=None if problems else compute + wire,
            notes=tuple(f"{name_of(candidate)}: {note}" for note in notes),
            ledger=ledger,
        )


NOT_COMPILED = Problem(None, None, "", "not compiled: the exploration was interrupted")
"""The problem of a candidate after an interrupt."""

# Why a candidate cannot run

LARGEST = 3
"""The maximum number of arrays to list if the arguments exceed the memory."""


def _too_large(plan: Plan, kind: Kind) -> tuple[Problem, ...]:
    """Return the problems of arguments that exceed the memory; empty if they may fit.

    Arrays without a spec are left out, since the compiler may shard them.
    """
    rows = [row for row in plan.rows if row.memory_kind is None and row.spec is not None]
    needed = per_device(rows)
    if needed <= kind.hardware.memory:
        return ()
    problems = [Problem(None, None, "", _excess("the arguments take", needed, kind), SMALLER)]
    rows.sort(key=lambda row: -row.bytes_per_device)
    for row in rows[:LARGEST]:
        spec = spec_text(row.spec or PartitionSpec())
        each = f"takes {bytes_text(row.bytes_per_device)} on each device, with the spec {spec}"
        problems.append(Problem(row.path, row.shape, array_text(row), each))
    return tuple(problems)


def _excess(what: str, needed: int, kind: Kind) -> str:
    """Describe bytes that exceed the memory of a device."""
    memory = bytes_text(round(kind.hardware.memory))
    return f"{what} {bytes_text(needed)} on each device, but a device has {memory} ({kind.name})"


def _problems_of(error: Exception) -> tuple[Problem, ...]:
    """Return an error's headline and the problems that it lists."""
    if not isinstance(error, FunctreeError):
        return (Problem(None, None, "", error_text(error)),)
    headline, *_ = str(error).split("\n\n")
    listed = [problem for problem in error.problems if problem.why != str(error)]
    return (Problem(None, None, "", headline), *listed)
