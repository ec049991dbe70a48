"""`explore` ranks a function's layouts on several meshes, based on their compiled programs."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from functree.argument_checks import FLAG, FUNCTION, MAPPING, TEXT, Takes, check
from functree.calls.out_of_memory import SMALLER
from functree.calls.stages import Compiled
from functree.compiled.collective import Memory
from functree.compiled.flops import count_flops
from functree.devices.make_mesh import make_mesh
from functree.devices.specs import mesh_axes, spec_text
from functree.devices.targets import Target, target_devices
from functree.errors import USERS_ERRORS, FunctreeError, Problem, error_text
from functree.explorer.hardware import Hardware, Kind, MeshAxes, kind_of
from functree.explorer.links import bandwidth, check_links, wire_bytes
from functree.explorer.meshes_to_try import Trial, trials
from functree.explorer.progress import shown_progress
from functree.explorer.ranking import GIVEN, Candidate, Ranking, name_of, ranked
from functree.explorer.step import Step
from functree.layout.layout import LayoutTree
from functree.layout.plan.plan import Plan
from functree.report.table import bytes_text
from functree.tree.arrays import Tree, array_text

_HARDWARE = Takes("an `ft.Hardware`", lambda value: isinstance(value, Hardware))
_ARGS = Takes("the arguments as a tuple", lambda value: isinstance(value, tuple | list))


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
        layouts=(layouts, MAPPING._replace(is_value=bool, text="a dict from names to layouts")),
        target=(target, TEXT.or_none()),
        hardware=(hardware, _HARDWARE.or_none()),
        progress=(progress, FLAG),
    )
    named = None if target is None else Target.read(target)
    exploration = _Exploration(Step(step, args), layouts, out_shardings, named, hardware)
    wanted = trials(meshes, layouts, named)
    for trial in wanted:
        check_links(trial.sizes, exploration.hardware)
    candidates = exploration.run(wanted, progress)
    return Ranking(
        ranked(candidates),
        exploration.hardware,
        exploration.called,
        target,
    )


class _Exploration:
    """The settings that all candidates share."""

    def __init__(
        self,
        step: Step,
        layouts: Mapping[str, LayoutTree],
        out_shardings: LayoutTree,
        target: Target | None,
        hardware: Hardware | None,
    ):
        self._step, self._layouts, self._target = step, layouts, target
        self._out: LayoutTree = out_shardings
        # `out_shardings` applies to all candidates, unless it is a dict with the names of the
        # layouts.
        self._out_by_name: bool = isinstance(out_shardings, Mapping) and set(out_shardings) == set(
            layouts
        )
        self._kind: Kind = kind_of(target)
        self._is_given: bool = hardware is not None
        self.hardware: Hardware = hardware or self._kind.hardware

    @property
    def _is_assumed(self) -> bool:
        """Whether neither a target nor hardware was given."""
        return self._target is None and not self._is_given

    @property
    def called(self) -> str:
        """The name of the hardware in the ranking."""
        return GIVEN if self._is_given else self._kind.name

    def run(self, wanted: Sequence[Trial], progress: bool) -> list[Candidate]:
        """Return the candidates; those that may fit are compiled."""
        candidates = list(map(self._on_paper, wanted))
        waiting = [i for i, candidate in enumerate(candidates) if not candidate.problems]
        if waiting and self._target is not None:
            target_devices(self._target)  # raises once, for all candidates, if anything is missing
        errors: list[BaseException] = []
        with shown_progress("explore: {} compiled", len(waiting), progress) as show:
            for done, i in enumerate(waiting):
                show(done, name_of(candidates[i]))
                try:
                    candidates[i] = self._compiled(candidates[i])
                except KeyboardInterrupt:
                    for rest in waiting[done:]:
                        candidates[rest] = replace(candidates[rest], problems=(NOT_COMPILED,))
                    break
                except (FunctreeError, jax.errors.JaxRuntimeError, *USERS_ERRORS) as error:
                    errors.append(error)
                    candidates[i] = replace(candidates[i], problems=_problems_of(error))
        _raise_if_all_alike(errors, len(waiting))
        return candidates

    def _on_paper(self, trial: Trial) -> Candidate:
        """Return a candidate with the figures and the problems of its plan."""
        layouts = self._layouts[trial.name]
        candidate = Candidate(trial.sizes, trial.name, layout=layouts)
        try:
            plan = self._step.plan(layouts, trial.sizes)
        except FunctreeError as error:
            return replace(candidate, problems=_problems_of(error))
        there = f"a {self._kind.name} has" if self._is_assumed else "each has"
        return replace(
            candidate,
            problems=plan.problems or _too_large(plan, self.hardware.memory, there),
            bytes_per_device=sum(row.bytes_per_device for row in plan.rows if not row.memory_kind),
        )

    def _compiled(self, candidate: Candidate) -> Candidate:
        """Compile a candidate."""
        target = None if self._target is None else self._target.text
        sizes: dict[str, Any] = dict(candidate.mesh)
        mesh = make_mesh(target=target, **sizes)
        out = self._out[candidate.layout_name] if self._out_by_name else self._out
        options = self._step.options(candidate.layout)
        compiled = self._step.compile({**options, "out_shardings": out, "mesh": mesh})
        return self._scored(candidate, compiled, mesh)

    def _scored(self, candidate: Candidate, compiled: Compiled, mesh: Mesh) -> Candidate:
        """Return a candidate with the figures of its program."""
        ledger, flops = compiled.ledger(), count_flops(compiled.as_text() or "")
        sent, unknown = wire_bytes(ledger)
        notes = list(flops.not_understood)
        if unknown:
            notes.append(f"{bytes_text(unknown)} is moved over unknown mesh axes")
        compute = flops.total / (self.hardware.flops * self.hardware.efficiency)
        wire = sum(size / self._bandwidth(axes, mesh) for axes, size in sent.items())
        problems: tuple[Problem, ...] = ()
        if ledger.memory.peak > self.hardware.memory:
            # A target's compiler refuses programs that exceed its memory.
            if self._is_given:
                problems = (_too_high(ledger.memory, self.hardware.memory),)
            elif self._is_assumed:
                notes.append(_may_not_fit(ledger.memory, self._kind))
        return replace(
            candidate,
            problems=problems,
            peak_bytes=ledger.memory.peak,
            flops=flops.total,
            wire_bytes=sent,
            compute_seconds=compute,
            wire_seconds=wire,
            # A program that does not fit is not ranked.
            score=None if problems else compute + wire,
            notes=tuple(f"{name_of(candidate)}: {note}" for note in notes),
            ledger=ledger,
        )

    def _bandwidth(self, axes: MeshAxes, mesh: Mesh) -> float:
        return bandwidth(mesh_axes(axes), mesh, self._target, self.hardware, self._kind)


NOT_COMPILED = Problem(None, None, "", "not compiled: the exploration was interrupted")
"""The problem of a candidate after an interrupt."""


def _raise_if_all_alike(errors: Sequence[BaseException], compiled: int) -> None:
    """Raise the error of the user's code if all candidates raise it, whatever their layouts."""
    if not errors or len(errors) < compiled:
        return
    first = errors[0]
    if isinstance(first, FunctreeError | jax.errors.JaxRuntimeError):
        return
    if len({(type(error), str(error)) for error in errors}) == 1:
        raise first


# Why a candidate cannot run

LARGEST = 3
"""The maximum number of arrays to list if the arguments exceed the memory."""


def _too_large(plan: Plan, memory: float, there: str) -> tuple[Problem, ...]:
    """Return the problems of arguments that exceed the memory; empty if they may fit.

    Arrays without a spec are left out, since the compiler may shard them.

    Args:
        plan: the plan of the arguments.
        memory: the bytes of memory.
        there: the words before the memory: `each has`, `a TPU v5e has`.
    """
    rows = [row for row in plan.rows if row.memory_kind is None and row.spec is not None]
    needed = sum(row.bytes_per_device for row in rows)
    if needed <= memory:
        return ()
    why = f"the arguments take {bytes_text(needed)} on each device, but {there} "
    why += bytes_text(round(memory))
    problems = [Problem(None, None, "", why, SMALLER)]
    rows.sort(key=lambda row: -row.bytes_per_device)
    for row in rows[:LARGEST]:
        spec = spec_text(row.spec or PartitionSpec())
        each = f"takes {bytes_text(row.bytes_per_device)} on each device, with the spec {spec}"
        problems.append(Problem(row.path, row.shape, array_text(row), each))
    return tuple(problems)


def _may_not_fit(program: Memory, kind: Kind) -> str:
    """Describe a peak on this machine that exceeds an accelerator's memory.

    The peak is not a problem, since the accelerator's own program has a different peak.
    """
    peak, there = bytes_text(program.peak), bytes_text(round(kind.hardware.memory))
    return (
        f"may not fit: the program compiled for this machine needs {peak} of memory, but a "
        f"{kind.name} has {there}; give a target to be sure"
    )


def _too_high(program: Memory, memory: float) -> Problem:
    """Return the problem of a program whose peak exceeds the memory."""
    arguments = sum(program.arguments.values())
    why = (
        f"the program needs {bytes_text(program.peak)} of memory, but each device has "
        f"{bytes_text(round(memory))}; the arguments take {bytes_text(arguments)} on each device"
    )
    return Problem(None, None, "", why, SMALLER)


def _problems_of(error: BaseException) -> tuple[Problem, ...]:
    """Return an error's headline and the problems that it lists."""
    if not isinstance(error, FunctreeError):
        return (Problem(None, None, "", error_text(error)),)
    headline = re.split(r"\n\s*\n", str(error).strip(), maxsplit=1)[0]
    listed = [problem for problem in error.problems if problem.why != str(error)]
    return (Problem(None, None, "", headline), *listed)
