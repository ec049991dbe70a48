"""A function on one device and on a mesh ─► the first operation whose values differ."""

import math
from dataclasses import replace

import jax
import numpy as np

from functree.testing.evidence import Checksums, Values, Watched
from functree.testing.intermediates import KEPT_ITERATIONS, Site
from functree.testing.operation import (
    Operation,
    described,
    devices_text,
    layout_text,
    source_text,
)
from functree.testing.pairs import Pairs
from functree.testing.programs import Program
from functree.testing.relations import assignments, on_devices
from functree.testing.scopes import Scope
from functree.testing.search import Compared, Finding, Search
from functree.testing.steps import Step

# The values of a line are compared themselves if they are not more than so many numbers.
_MOST_NUMBERS = 2**24


def first_difference(one: Program, many: Program) -> Operation | None:
    """The first operation whose values differ on a mesh.

    Each program is run with checksums of the values that leave their line; where one of these
    differs, the values of its line are compared themselves.

    Args:
        one: the function on one device.
        many: the function on the mesh.

    Returns:
        The operation; None if no value differs by more than rounding.
    """
    pairs = Pairs.of(one.body, many.body)
    checksums = Watched(pairs, one, many).checksums(one, many)
    finding = Search(checksums).first(Scope(pairs))
    return None if finding is None else _looked_at(finding, checksums, one, many)


def _looked_at(finding: Finding, checksums: Checksums, one: Program, many: Program) -> Operation:
    """The operation of a finding, with the values of its line."""
    if finding.only:
        return _only_one_has(finding, many)
    sites = _sites_of_line(finding)
    if sites is None:
        return _operation(finding, many, None, None)
    values = Values(checksums, one, many, sites)
    if not finding.step.bodies:
        search = Search(values)
        finding = search.explained(finding.scope, finding.step.outs[finding.result]) or finding
    scope, j = finding.scope, finding.index
    array = values.arrays.get((*scope.right, j, finding.result))
    if array is None:
        return _operation(finding, many, None, None)
    compared = values.compared(scope, scope.pairs.left_of[j], j, finding.result)
    return _operation(finding, many, compared, array)


def _sites_of_line(finding: Finding) -> list[tuple[Site, Site]] | None:
    """The values that are made on the line of a finding; None if they are too many."""
    scope, sites, numbers = finding.scope, list[tuple[Site, Site]](), 0
    for i, j in scope.pairs.steps:
        step = scope.step(j)
        if step is not finding.step and (step.bodies or step.source != finding.step.source):
            continue
        for result, kind in enumerate(scope.pairs.left.steps[i].types):
            sites.append(((*scope.left, i, result), (*scope.right, j, result)))
            numbers += math.prod(getattr(kind, "shape", ()))
    for around in scope.around:
        numbers *= _iterations(around.body.steps[around.index])
    return sites if numbers <= _MOST_NUMBERS else None


def _iterations(step: Step) -> int:
    """How many iterations of a step are recorded."""
    if step.name == "while":
        return KEPT_ITERATIONS + 1
    return step.params["length"] if step.name == "scan" else 1


def _only_one_has(finding: Finding, many: Program) -> Operation:
    """The first operation that only one of the programs has."""
    scope = finding.scope
    where = "on the mesh" if finding.only == "mesh" else "on one device"
    what = f"only the program {where} has it"
    if finding.before is not None:
        what += f", and the last before it that both have is {_named(scope.step(finding.before))}"
    if finding.other is not None:
        what += f"; on one device there is {_named(scope.pairs.left.steps[finding.other])}"
    return replace(_described(finding, many), what=what)


def _named(step: Step) -> str:
    source, line = source_text(step.source)
    return f"`{step.name}` at {source}, in `{line}`" if line else f"`{step.name}`"


def _described(finding: Finding, many: Program) -> Operation:
    scope, step = finding.scope, finding.step
    if finding.only != "device":
        return described(step, finding.result, scope.pairs.right, scope.around, many.paths)
    # The steps around are those on the mesh: of another program the inputs are not known.
    body = scope.pairs.left
    paths = [None] * len(body.inputs) if scope.around else many.paths
    return described(step, finding.result, body, (), paths)


def _operation(
    finding: Finding, many: Program, compared: Compared | None, array: jax.Array | None
) -> Operation:
    scope = finding.scope
    where = [around.where for around in reversed(scope.around) if around.where]
    difference, what = None, "its values differ"
    if compared is not None:
        difference, bad = _largest(compared, scope)
        where += devices_text(bad, scope.axes)
        what = _difference_text(difference, compared)
    if finding.note:
        what += f": {finding.note}"
    relation = finding.relation
    layout = layout_text(array, len(scope.view), bool(scope.axes))
    if scope.axes and (relation.assignment or relation.missing):
        layout += f", as {relation}"
    return replace(
        _described(finding, many),
        layout=layout,
        difference=difference,
        what=what,
        where=", ".join(where),
    )


def _difference_text(difference: float, compared: Compared) -> str:
    if not math.isfinite(difference):
        return "its values are finite in one program and not in the other"
    size = np.abs(np.nan_to_num(compared.whole)).max(initial=0)
    return f"its values differ by up to {difference:.3g}, where they are up to {size:.3g}"


def _largest(compared: Compared, scope: Scope) -> tuple[float, np.ndarray]:
    """The largest difference, and on which devices there is one."""
    found: list[tuple[float, np.ndarray]] = []
    dims = tuple(range(len(scope.axes), compared.parts.ndim))
    tiles = compared.whole.shape[: compared.whole.ndim - len(dims)]
    for assignment in assignments(tiles, scope.axes):
        expected = on_devices(compared.whole, assignment, scope.axes)
        with np.errstate(invalid="ignore"):
            distance = abs(compared.parts - expected)
        # Not a number at the same place is no difference, and elsewhere the largest there is.
        alike = np.isnan(compared.parts) & np.isnan(expected)
        alike |= compared.parts == expected
        distance = np.where(alike, 0.0, np.nan_to_num(distance, nan=np.inf, posinf=np.inf))
        margin = on_devices(
            np.broadcast_to(compared.tolerance, compared.whole.shape), assignment, scope.axes
        )
        found.append((float(distance.max(initial=0)), np.asarray((distance > margin).any(dims))))
    return min(found, key=lambda one: one[0])
