"""An operation of a program and the paths of the program's arguments ─► those that it takes."""

from collections.abc import Mapping, Sequence

from functree.testing.scopes import Around
from functree.testing.steps import Body, Number, Step
from functree.tree.paths import Path


def paths_taken(
    step: Step, body: Body, around: Sequence[Around], paths: Sequence[Path | None]
) -> tuple[Path, ...]:
    """The arguments of a program that an operation takes.

    Args:
        step: the operation.
        body: the body in which it is.
        around: the steps around that body, from the outside.
        paths: the paths of the program's inputs; None for those that have none.
    """
    inputs = paths
    for one in around:
        labels = _labels(one.body, inputs)
        outer = one.body.steps[one.index]
        inputs = _of_inner_inputs(outer, [labels.get(value) for value in outer.ins])
    labels = _labels(body, inputs)
    found = [labels.get(value) for value in step.ins]
    return tuple(dict.fromkeys(path for path in found if path is not None))


def _labels(body: Body, inputs: Sequence[Path | None]) -> Mapping[Number, Path | None]:
    """For each value that depends on inputs: the path of the only one; None if there are several.

    What is made of one argument alone is still this argument, such as a weight that is normalized.
    What is made of two is an activation, and has no name.
    """
    labels: dict[Number, Path | None] = dict(zip(body.inputs, inputs, strict=True))
    for step in body.steps:
        given = {labels[value] for value in step.ins if value in labels}
        if given:
            label = given.pop() if len(given) == 1 and not step.bodies else None
            labels.update(dict.fromkeys(step.outs, label))
    return labels


def _of_inner_inputs(step: Step, given: Sequence[Path | None]) -> Sequence[Path | None]:
    """The labels of the inputs of a body, from those of what the step takes."""
    if step.name in ("scan", "while"):
        constants, carry, rest = step.loop_operands(given)
        return [*constants, *[None] * len(carry), *rest]
    # Of a conditional, the first is which branch it is.
    return given[1:] if step.name == "cond" else given
