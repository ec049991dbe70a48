"""A function, meshes and layouts ─► the layouts ranked by their programs: `explore`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from functree.argument_checks import FLAG, FUNCTION, MAPPING, TEXT, Takes, check
from functree.calls.stages import Compiled
from functree.compiled.flops import count_flops
from functree.devices.make_mesh import make_mesh
from functree.devices.targets import Target, target_devices
from functree.errors import USERS_ERRORS, FunctreeError, Problem
from functree.explorer.candidate import Candidate, mesh_text
from functree.explorer.hardware import Hardware, Kind, MeshAxes, kind_of
from functree.explorer.links import bandwidth, check_links
from functree.explorer.memory import device_bytes, may_not_fit, problems_of, too_high, too_large
from functree.explorer.meshes_to_try import Trial, trials
from functree.explorer.progress import Progress
from functree.explorer.ranking import GIVEN, Ranking, ranked
from functree.explorer.step import Step
from functree.explorer.wire_bytes import wire_bytes
from functree.layout.layout import LayoutTree
from functree.report.table import bytes_text
from functree.tree.arrays import Tree

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
    """Compile a function on several meshes with several layouts, and rank these. Nothing is run.

    What cannot fit in memory is dropped on paper, by the plan of the arguments. The rest is
    compiled, by the compiler of the target. The score is flops / (peak × efficiency) plus, for each
    mesh axis, bytes sent / bandwidth; see `Candidate`. It is good enough to tell layouts apart that
    differ by more than 15 %, and is no forecast: it knows of no overlap and no latency.

    An interrupt (Ctrl-C) ends the exploration with what is compiled until then.

    Args:
        step: the function. If it is one of `ft.jit`, its options are kept, such as what it donates,
            but for its layouts and its mesh; its `rules` stay where a layout has none.
        args: its arguments, which may be abstract.
        meshes: dicts of sizes, such as `{"data": 8, "model": 4}`, or a number of devices: all ways
            to divide it among the mesh axes that the layouts name. One, or a list.
        layouts: a dict from a name to what `in_shardings` of `ft.jit` takes. The first of these
            layouts that has rules is also the `rules` of the function.
        target: what the programs are compiled for, as in `ft.make_mesh`: `"tpu:v5e:4x8"`. Without
            it, they are compiled for the devices of this machine.
        hardware: what the score is computed with. By default that of the target; without a target
            that of a TPU v5e, as the head of the ranking says: a peak above its memory is then a
            note, and no reason to refuse.
        out_shardings: the layout of the result, as in `ft.jit`; or a dict that has one for each
            name in `layouts`. Donated arguments keep their shardings without it.
        progress: whether to say on the standard error how far it is, if it takes long.

    Raises:
        FunctreeError: an argument is not one of these.
        ShardingError: a mesh has other devices than the target, or more than there are; the
            compiler of the target is not installed.

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
        "explore cannot compare these",
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
    for one in wanted:
        check_links(one.sizes, exploration.hardware)
    found = exploration.run(wanted, progress)
    return Ranking(
        ranked(found),
        exploration.hardware,
        exploration.called,
        target,
        tuple(exploration.notes()),
    )


class _Exploration:
    """All that is the same for each candidate."""

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
        # One for all, unless it is a dict of the same names.
        self._out_by_name: bool = isinstance(out_shardings, Mapping) and set(out_shardings) == set(
            layouts
        )
        self._kind: Kind = kind_of(target)
        self._is_given: bool = hardware is not None
        self.hardware: Hardware = hardware or self._kind.hardware

    @property
    def _is_assumed(self) -> bool:
        """Whether nobody has said what the program is for."""
        return self._target is None and not self._is_given

    @property
    def called(self) -> str:
        """What the hardware is called in the ranking."""
        return GIVEN if self._is_given else self._kind.name

    def notes(self) -> list[str]:
        """What a reader must know before the figures."""
        if self._target is not None:
            return []
        platform = jax.devices()[0].platform.upper()
        return [
            f"compiled for {platform} devices of this machine, whose programs say little of those "
            "for other accelerators: give a target"
        ]

    def run(self, wanted: Sequence[Trial], progress: bool) -> list[Candidate]:
        """The candidates, those that may fit compiled."""
        found = [self._on_paper(one) for one in wanted]
        waiting = [i for i, one in enumerate(found) if not one.problems]
        if waiting and self._target is not None:
            target_devices(self._target)  # which says what is missing, once for all candidates
        errors: list[BaseException] = []
        with Progress(len(waiting), progress) as told:
            for done, i in enumerate(waiting):
                one = found[i]
                told.step(done, f"{one.layout_name} on {mesh_text(one.mesh)}")
                try:
                    found[i] = self._compiled(one)
                except KeyboardInterrupt:
                    for rest in waiting[done:]:
                        found[rest] = replace(found[rest], problems=(NOT_COMPILED,))
                    break
                except (FunctreeError, jax.errors.JaxRuntimeError, *USERS_ERRORS) as error:
                    errors.append(error)
                    found[i] = replace(one, problems=problems_of(error))
        _raise_if_all_alike(errors, len(waiting))
        return found

    def _on_paper(self, trial: Trial) -> Candidate:
        """A candidate with what the plan of the arguments says."""
        layouts = self._layouts[trial.name]
        one = Candidate(trial.sizes, trial.name, layout=layouts)
        try:
            plan = self._step.plan(layouts, trial.sizes)
        except FunctreeError as error:
            return replace(one, problems=problems_of(error))
        return replace(
            one,
            problems=plan.problems or too_large(plan, self.hardware.memory, self._there()),
            bytes_per_device=device_bytes(plan),
        )

    def _compiled(self, one: Candidate) -> Candidate:
        """A candidate with what the compiler says."""
        target = None if self._target is None else self._target.text
        sizes: dict[str, Any] = dict(one.mesh)
        mesh = make_mesh(target=target, **sizes)
        out = self._out[one.layout_name] if self._out_by_name else self._out
        laid = self._step.laid(self._layouts[one.layout_name])
        compiled = self._step.compile(laid, out, mesh)
        return self._scored(one, compiled, mesh)

    def _scored(self, one: Candidate, compiled: Compiled, mesh: Mesh) -> Candidate:
        """A candidate with the figures of its program."""
        ledger, flops = compiled.ledger(), count_flops(compiled.as_text() or "")
        sent, unknown = wire_bytes(ledger)
        notes = list(flops.not_understood)
        if unknown:
            notes.append(f"{bytes_text(unknown)} are moved over mesh axes that are not known")
        compute = flops.total / (self.hardware.flops * self.hardware.efficiency)
        wire = sum(size / self._bandwidth(axes, mesh) for axes, size in sent.items())
        problems: tuple[Problem, ...] = ()
        # Otherwise the compiler of the target has refused what does not fit in its memory.
        if self._is_given:
            problems = too_high(ledger.memory, self.hardware.memory)
        elif self._is_assumed:
            notes.append(may_not_fit(ledger.memory, self.hardware.memory, self._kind.name))
        return replace(
            one,
            problems=problems,
            peak_bytes=ledger.memory.peak,
            flops=flops.total,
            wire_bytes=sent,
            compute_seconds=compute,
            wire_seconds=wire,
            # What does not fit has no place among those that run.
            score=None if problems else compute + wire,
            notes=tuple(
                f"{one.layout_name} on {mesh_text(one.mesh)}: {note}" for note in notes if note
            ),
            ledger=ledger,
        )

    def _there(self) -> str:
        return f"a {self._kind.name} has" if self._is_assumed else "there are"

    def _bandwidth(self, axes: MeshAxes, mesh: Mesh) -> float:
        together = (axes,) if isinstance(axes, str) else axes
        return bandwidth(together, mesh, self._target, self.hardware, self._kind)


NOT_COMPILED = Problem(None, None, "", "it was not compiled: the exploration was interrupted")
"""The problem of a candidate after an interrupt."""


def _raise_if_all_alike(errors: Sequence[BaseException], compiled: int) -> None:
    """Raise the error of a user's function if it is the same for all candidates: it is not about
    layouts then."""
    if not errors or len(errors) < compiled:
        return
    first = errors[0]
    if isinstance(first, FunctreeError | jax.errors.JaxRuntimeError):
        return
    if len({(type(error), str(error)) for error in errors}) == 1:
        raise first
