"""`first_nonfinite` finds the first operation that makes a NaN or infinity from finite values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from functree.argument_checks import FUNCTION, check
from functree.calls.function import Function
from functree.testing.checksums import SCALE, has_checksum, is_inexact
from functree.testing.evidence import crossing, fetched, values_of
from functree.testing.intermediates import RAN, Site, Watch
from functree.testing.operation import Operation, described
from functree.testing.programs import Program
from functree.testing.scopes import Place, Records
from functree.testing.steps import Body
from functree.transforms.jit.jit import jit

# Badness: how bad a value's worst element is.
_FINITE, _INFINITE, _NAN = 0, 1, 2


def first_nonfinite(fn: Callable[..., Any], *args: Any) -> Operation | None:
    """Find the first operation of a function that makes a NaN or infinity from finite values.

    The function runs as one program, which checks each value that leaves its source line, even in
    loops, conditionals, shard_maps and gradients. A second run checks all values on the line of the
    first bad value.

    Infinities that are constants of the program, such as the infinities in a mask, are ignored. An
    operation that makes a NaN from infinities is found. An operation that uses a constant NaN, such
    as the variance of no elements, is found only if the NaN reaches a value that leaves its source
    line.

    Args:
        fn: the function. A function from `ft.jit` runs unchanged, but donates nothing. Any other
            function is jitted.
        *args: its arguments. Sharded arguments stay sharded.

    Returns:
        The operation, with its line, the arguments that it uses, the iteration and the devices. The
            result is None if all values are finite, or if all NaNs and infinities come from the
            arguments.

    Raises:
        FunctreeError: if `fn` is not a function.

    Examples:
        >>> def loss(x):
        ...     return jnp.log(x).sum()
        >>> operation = ft.testing.first_nonfinite(loss, jnp.arange(3.0))
        >>> operation.name, operation.what
        ('log', 'it makes an infinity from finite values: 1 of 3 elements')
        >>> ft.testing.first_nonfinite(loss, 1 + jnp.arange(3.0)) is None
        True
    """
    check("first_nonfinite: invalid arguments", fn=(fn, FUNCTION))
    program = Program.of(fn if isinstance(fn, Function) else jit(fn), args)
    sites = frozenset(site for site, kind in crossing(program.body) if is_inexact(kind.dtype))
    watch = Watch(sites, lambda site, x: _size(x), _any_nonfinite)
    badness: dict[Site, np.ndarray] = {}
    for site, record in fetched(program.watched(watch)(program.arrays)).items():
        # The record with the number of iterations is not a size.
        badness[site] = record if site[-1] == RAN else _badness(record)
    finding = _Reading(badness).first(program)
    return None if finding is None else _looked_at(finding, badness, program)


def _any_nonfinite(records: Sequence[jax.Array]) -> jax.Array:
    # An iteration without floats has no records.
    finite = [jnp.ones((), bool), *[jnp.isfinite(one).all() for one in records]]
    return ~jnp.stack(finite).all()


@jax.jit
def _size(x: Shaped[Array, "..."]) -> Float[Array, ""]:
    """Compute a sum that is NaN or infinite if an element is.

    A maximum would not do, since over several devices it may lose a NaN.
    """
    x = abs(x)
    if jnp.finfo(x.dtype).bits < 32:
        x = x.astype(jnp.float32)
    return jnp.sum(x * x.dtype.type(SCALE))


def _badness(values: np.ndarray) -> np.ndarray:
    """Return the badness of each number."""
    return np.where(np.isnan(values), _NAN, np.where(np.isinf(values), _INFINITE, _FINITE))


def _worst(value: Any) -> int:
    """Return the badness of a concrete value."""
    if not hasattr(value, "dtype") or not is_inexact(value.dtype):
        return _FINITE
    return int(_badness(np.asarray(value)).max(initial=_FINITE))


@dataclass(frozen=True, eq=False)
class _Finding:
    """A value that is worse than the inputs of its step.

    Attributes:
        body: its body.
        index: the index of its step.
        result: its index among the step's results.
        place: the place of the body.
        badness: its badness on each device of a shard_map.
        worst: the badness of the step's worst input.
        written: whether a constant NaN is among the inputs.
    """

    body: Body
    index: int
    result: int
    place: Place
    badness: np.ndarray
    worst: int
    written: bool


class _Reading:
    """A search through the records, in the order in which operations run."""

    def __init__(self, records: Records):
        self._records = records
        # The steps whose bodies contain a value that is not finite.
        self._loud = {
            site[:end] for site, one in records.items() if one.any() for end in range(len(site))
        }

    def first(self, program: Program) -> _Finding | None:
        """Return the finding in a program."""
        return self.body(program.body, list(map(_worst, program.arrays)), Place())[0]

    def body(
        self, body: Body, given: Sequence[int], place: Place
    ) -> tuple[_Finding | None, list[int]]:
        """Return the finding in a body, and the badness of the body's outputs.

        Args:
            body: the body.
            given: the badness of its inputs.
            place: its place.
        """
        known = dict(zip(body.inputs, given, strict=True))
        known.update((value, _worst(one)) for value, one in body.constants.items())
        # A constant NaN, such as `x.var()` of no elements, is harmless unless an operation selects
        # it.
        written = {value for value in body.constants if known[value] == _NAN}
        known.update(dict.fromkeys(written, _FINITE))
        for index, step in enumerate(body.steps):
            ins = [known[value] for value in step.ins]
            if step.bodies and (*place.at, index) in self._loud:
                finding = self._inside(body, index, ins, place)
                if finding is not None:
                    return finding, []
            worst = max(ins, default=_FINITE)
            of_written = not written.isdisjoint(step.ins)
            # Such a value depends only on constants.
            if of_written and body.dependent.isdisjoint(step.outs):
                written.update(step.outs)
                known.update(dict.fromkeys(step.outs, worst))
                continue
            for result, value in enumerate(step.outs):
                found = place.of(self._records, index, result)
                # An unrecorded value may be as bad as its inputs.
                known[value] = worst if _is_inexact(step.types[result]) else _FINITE
                if found is not None:
                    known[value] = int(found.max())
                    if known[value] > worst:
                        return _Finding(body, index, result, place, found, worst, of_written), []
                elif of_written:
                    written.add(value)
        return None, [known[value] for value in body.outputs]

    def _inside(self, body: Body, index: int, ins: Sequence[int], place: Place) -> _Finding | None:
        """Return the finding in the bodies of a step."""
        step = body.steps[index]
        constants, carry, rest = step.body_operands(ins)
        for inner, of_run in place.runs(body, index, self._records):
            given = [*constants, *carry, *rest]
            finding, outs = self.body(step.bodies[inner], given, of_run)
            if finding is not None:
                return finding
            carry = outs[: len(carry)]
        return None


def _looked_at(finding: _Finding, badness: Records, program: Program) -> Operation:
    """Describe the operation of a finding, using the values on its line."""
    steps, at = finding.body.steps, finding.place.at
    sites: list[Site] = []
    for index, step in enumerate(steps):
        if step.source == steps[finding.index].source:
            kinds = enumerate(step.types)
            sites += [(*at, index, result) for result, kind in kinds if _is_inexact(kind)]
    watch = values_of(sites)._replace(until=_any_nonfinite)
    arrays = program.watched(watch)(program.arrays)
    of_line: dict[Site, np.ndarray] = {}
    for site, record in fetched(arrays).items():
        if site[-1] == RAN:
            continue
        kind = steps[site[-2]].types[site[-1]]
        of_values = tuple(range(record.ndim - len(kind.shape), record.ndim))
        of_line[site] = _badness(record).max(of_values, initial=_FINITE)
    finding = _Reading({**badness, **of_line}).first(program) or finding
    return _operation(finding, program, arrays)


def _operation(finding: _Finding, program: Program, arrays: Mapping[Site, jax.Array]) -> Operation:
    what = "a NaN" if finding.badness.max() == _NAN else "an infinity"
    of = "finite values" if finding.worst == _FINITE else "infinities"
    if finding.written:
        of += ", or from a constant NaN of the program"
    body, place, result = finding.body, finding.place, finding.result
    array = arrays.get((*place.at, finding.index, result))
    bad = finding.badness > _FINITE
    step = body.steps[finding.index]
    operation = described(step, result, body, place, program.paths, array, bad)
    return replace(operation, what=f"it makes {what} from {of}{_share(finding, array)}")


def _share(finding: _Finding, array: jax.Array | None) -> str:
    """Format the number of elements that are as bad as the worst element."""
    if array is None:
        return ""
    bad = finding.place.viewed(_badness(np.asarray(array))) == finding.badness.max()
    return f": {int(bad.sum())} of {bad.size} elements"


def _is_inexact(kind: Any) -> bool:
    return has_checksum(kind) and is_inexact(kind.dtype)
