"""A traced optimizer ─► one error for all that looks at several leaves at once."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import jax

from functree.errors import FunctreeValueError, Problem, count, listed
from functree.labels.leaf import array_problem
from functree.optimizers.update_trace import Place, UpdateTrace
from functree.tree.paths import Path


def check_apart(trace: UpdateTrace, by: str = "layerwise") -> None:
    """Raise FunctreeError if what belongs to one parameter depends on another one.

    Parameters that are in no stack may depend on each other, because they stay what they are.

    Args:
        trace: the traced optimizer.
        by: the name of the function that was called with it.
    """
    problems: list[Problem] = []
    for i, place in enumerate(trace.outputs):
        inputs = [trace.inputs[j] for j in sorted(trace.depends[i])]
        others = list(dict.fromkeys(_others(place, inputs)))
        if others:
            depends = f"depends on {listed([f'`{path}`' for path in others])}"
            problems.append(_problem(trace, i, depends, _outside(by)))
    _refuse(problems, by)


def check_layers_apart(
    trace: UpdateTrace, depending: Collection[Path], by: str = "layerwise"
) -> None:
    """Raise FunctreeError if there are parameters of which one layer depends on another one."""
    depends = "depends on other layers of the stack"
    found = [i for i, place in enumerate(trace.outputs) if place.owner in depending]
    _refuse([_problem(trace, i, depends, _outside(by)) for i in found], by)


def check_matrices_apart(trace: UpdateTrace, joint: Mapping[Path, Collection[Path]]) -> None:
    """Raise FunctreeError if the matrices of one parameter are not computed by themselves.

    Args:
        trace: the traced optimizer.
        joint: for some parameters, the others that are in the program of their update.
    """
    problems: list[Problem] = []
    for i, place in enumerate(trace.outputs):
        others = [] if place.owner is None else list(joint.get(place.owner, ()))
        if not others or place.part != "update":
            continue
        texts = listed([f"`{path}`" for path in others])
        on = {trace.inputs[j].owner for j in trace.depends[i]}
        if on.isdisjoint(others):
            why = f"is computed in one loop or condition with that of {texts}"
            problems.append(_problem(trace, i, why, _STEPS_OUTSIDE))
        else:
            problems.append(_problem(trace, i, f"depends on {texts}", _outside("whole_matrices")))
    if problems:
        raise FunctreeValueError(
            "`ft.whole_matrices` computes the matrices of each parameter by themselves, but "
            f"{count(len(problems), 'parameter')} cannot be updated without others",
            problems,
        )


def _others(output: Place, inputs: Sequence[Place]) -> Iterator[Path]:
    """The other parameters that an output depends on, if one of the two is in a stack."""
    for place in inputs:
        if place.owner is None or place.owner == output.owner:
            continue
        if place.stack or output.stack:
            yield place.owner


def _problem(trace: UpdateTrace, i: int, why: str, remedy: str) -> Problem:
    """The problem of an output."""
    place, type_ = trace.outputs[i], trace.program.out_avals[i]
    whole = jax.ShapeDtypeStruct((*place.stack, *type_.shape), type_.dtype)
    what = "its update" if place.part == "update" else "this leaf of the optimizer's state"
    return array_problem(place.path, whole, f"{what} {why}", remedy)


def _refuse(problems: Sequence[Problem], by: str) -> None:
    """Raise FunctreeError for problems, if there are any."""
    if problems:
        raise FunctreeValueError(
            f"`ft.{by}` takes each layer of a stack for a leaf of its own, but the optimizer "
            f"looks at all leaves at once: {count(len(problems), 'array')} of its result "
            f"{'depends' if len(problems) == 1 else 'depend'} on several parameters",
            problems,
        )


def _outside(by: str) -> str:
    """What to do about an optimizer that looks at all leaves."""
    inner = "optax.adafactor(1e-3)" if by == "layerwise" else "optax.contrib.muon(1e-3)"
    return (
        "put what looks at all leaves outside, and what acts on each leaf inside: "
        f"`optax.chain(optax.clip_by_global_norm(1.0), ft.{by}({inner}))`"
    )


_STEPS_OUTSIDE = (
    "put what has a loop or a condition around all parameters outside: "
    "`optax.MultiSteps(ft.whole_matrices(optax.contrib.muon(1e-3)), 4)`"
)
