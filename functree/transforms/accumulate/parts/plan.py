"""A traced function ─► `Plan`: which of its values stay in parts until its results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.extend.core import Literal

from functree.transforms.accumulate.equations import (
    CALLS,
    Atom,
    Equation,
    Function,
    inner,
)
from functree.transforms.accumulate.parts.dimensions import Dimension, batch_dimensions
from functree.transforms.accumulate.parts.mapped import sharded_dimensions, sums_over
from functree.transforms.accumulate.parts.uses import (
    PART,
    WHOLE,
    Use,
    uses_that_begin,
    uses_that_pass_on,
)
from functree.tree.jaxprs import inner_programs, scan_sizes


@dataclass(frozen=True)
class Step:
    """What is done with an equation whose results are in parts.

    Attributes:
        uses: how each device uses the operands, for an equation without inner functions.
        plans: the plans of its inner functions.
        results: for each result, whether it is in parts.
    """

    uses: Sequence[Use] = ()
    plans: Sequence["Plan"] = ()
    results: Sequence[bool] = ()


@dataclass(frozen=True)
class Plan:
    """What is done with a function whose results may be in parts.

    Attributes:
        function: the function.
        steps: what is done with its equations, by their indices; the others run as they are.
        operands: for each operand, whether it is used in parts.
        results: for each result, whether it is in parts.
    """

    function: Function
    steps: Mapping[int, Step]
    operands: Sequence[bool]
    results: Sequence[bool]


def make_plan(
    function: Function,
    dims: Sequence[Dimension],
    wanted: Sequence[bool],
    axes: tuple[str, ...],
    number: int,
) -> Plan | None:
    """The plan of a function none of whose operands is in parts; None if nothing stays in parts.

    Args:
        function: the function.
        dims: the dimension of each operand that is the batch's.
        wanted: for each result, whether it may be in parts.
        axes: the mesh axes of the batch.
        number: the number of parts.
    """
    found = _Search(axes, number).possible(function, dims, [False] * len(dims))
    both = zip(wanted, found.known.parts, strict=True)
    plan = found.wanted([want and possible for want, possible in both])
    return plan if plan.steps else None


class _Known(NamedTuple):
    """What is known of values.

    Attributes:
        dims: the dimension of each that is the batch's.
        parts: whether each can be in parts.
    """

    dims: Sequence[Dimension]
    parts: Sequence[bool]


@dataclass
class _Possible:
    """All that could be in parts in a function.

    Attributes:
        function: the function.
        known: what is known of its results.
        atoms: the values that could be in parts.
        uses: for the index of each equation that could make a part, how it uses its operands.
        inner: for the index of each equation with inner functions, what could be in parts there.
    """

    function: Function
    known: _Known
    atoms: set[Atom] = field(default_factory=set)
    uses: dict[int, Sequence[Use]] = field(default_factory=dict)
    inner: dict[int, Sequence["_Possible"]] = field(default_factory=dict)

    def wanted(self, results: Sequence[bool]) -> Plan:
        """The plan in which only what serves these results is in parts."""
        own = inner(self.function)
        needed: set[Atom] = set()
        self._add(needed, own.outvars, results)
        steps: dict[int, Step] = {}
        for index in reversed(range(len(own.eqns))):
            equation = own.eqns[index]
            wanted = [result in needed for result in equation.outvars]
            if not any(wanted):
                continue
            if index in self.uses:
                steps[index] = Step(uses=self.uses[index], results=wanted)
                operands = [use is PART for use in self.uses[index]]
            else:
                steps[index], operands = _inner_step(equation, self.inner[index], wanted)
            self._add(needed, equation.invars, operands)
        self._extend(steps, needed)
        return Plan(self.function, steps, [one in needed for one in own.invars], list(results))

    def _extend(self, steps: dict[int, Step], needed: set[Atom]) -> None:
        """Add what else is made of parts. It is summed where that is not linear any more: of a norm
        this is a number, and not an array."""
        for index, equation in enumerate(inner(self.function).eqns):
            if index in steps or index not in self.uses:
                continue
            pairs = zip(equation.invars, self.uses[index], strict=True)
            if any(use is PART and operand in needed for operand, use in pairs):
                steps[index] = Step(uses=self.uses[index], results=[True])
                needed.update(equation.outvars)

    def _add(self, needed: set[Atom], atoms: Sequence[Atom], wanted: Sequence[bool]) -> None:
        """Add what is wanted in parts and can be: a loop may begin with what is whole, and an
        iteration may return it."""
        for atom, want in zip(atoms, wanted, strict=True):
            if want and not isinstance(atom, Literal) and atom in self.atoms:
                needed.add(atom)


def _inner_step(
    equation: Equation, found: Sequence[_Possible], wanted: Sequence[bool]
) -> tuple[Step, list[bool]]:
    """What is done with an equation with inner functions, and which of its operands are used in
    parts."""
    match equation.primitive.name:
        case "scan":
            return _scan_step(equation, found[0], wanted)
        case "cond":
            plans = [one.wanted(wanted) for one in found]
            used = zip(*[plan.operands for plan in plans], strict=True)
            return Step((), plans, wanted), [False, *map(any, used)]
    plan = found[0].wanted(wanted)
    return Step((), [plan], wanted), list(plan.operands)


def _scan_step(
    equation: Equation, found: _Possible, wanted: Sequence[bool]
) -> tuple[Step, list[bool]]:
    scan = scan_sizes(equation)
    first, last = scan.constants, scan.constants + scan.carried
    results = list(wanted)
    while True:
        plan = found.wanted(results)
        # What an iteration takes in parts, the one before gives in parts.
        more = [
            want or used for want, used in zip(results, plan.operands[first:last], strict=False)
        ]
        if more == results[: scan.carried]:
            break
        results[: scan.carried] = more
    operands = list(plan.operands)
    operands[first:last] = results[: scan.carried]
    return Step((), [plan], results), operands


class _Search(NamedTuple):
    """The search for what could be in parts.

    Attributes:
        axes: the mesh axes of the batch.
        number: the number of parts.
    """

    axes: tuple[str, ...]
    number: int

    def possible(
        self, function: Function, dims: Sequence[Dimension], parts: Sequence[bool]
    ) -> _Possible:
        """All that could be in parts in a function.

        Args:
            function: the function.
            dims: the dimension of each operand that is the batch's.
            parts: whether each operand can be in parts.
        """
        own = inner(function)
        values: dict[Atom, tuple[Dimension, bool]] = dict.fromkeys(own.constvars, (None, False))
        values.update(zip(own.invars, zip(dims, parts, strict=True), strict=True))

        def known(atoms: Sequence[Atom]) -> _Known:
            pairs = [(None, False) if isinstance(one, Literal) else values[one] for one in atoms]
            return _Known([dim for dim, _ in pairs], [part for _, part in pairs])

        found = _Possible(function, _Known((), ()))
        for index, equation in enumerate(own.eqns):
            given = known(equation.invars)
            results = self._of_equation(found, index, equation, given)
            values.update(
                zip(equation.outvars, zip(results.dims, results.parts, strict=True), strict=True)
            )
        found.known = known(own.outvars)
        found.atoms.update(atom for atom, (_, part) in values.items() if part)
        return found

    def _of_equation(
        self, found: _Possible, index: int, equation: Equation, given: _Known
    ) -> _Known:
        """What is known of the results of an equation; notes how they could be in parts."""
        name = equation.primitive.name
        if name == "scan":
            found.inner[index], results = self._of_scan(equation, given)
            return results
        if name == "cond":
            branches = [
                self.possible(one, given.dims[1:], given.parts[1:])
                for one in inner_programs(equation)
            ]
            found.inner[index] = branches
            return _joined([one.known for one in branches])
        if name in CALLS:
            (function,) = inner_programs(equation)
            found.inner[index] = [self.possible(function, given.dims, given.parts)]
            return found.inner[index][0].known
        number = len(equation.outvars)
        if name == "shard_map":
            sums = sums_over(equation, self.axes)
            if any(sums):
                found.uses[index] = [WHOLE] * len(equation.invars)
            return _Known(sharded_dimensions(equation, self.axes), sums)
        uses: Sequence[Use] | None = None
        if number == 1:
            if any(given.parts):
                uses = uses_that_pass_on(equation, given.parts, given.dims)
            uses = uses or uses_that_begin(equation, given.dims, self.number)
        if uses:
            found.uses[index] = uses
            return _Known([None], [True])
        return _Known(batch_dimensions(equation, given.dims), [False] * number)

    def _of_scan(self, equation: Equation, given: _Known) -> tuple[list[_Possible], _Known]:
        """What could be in parts in the iterations of a scan, and what is known of its results."""
        scan = scan_sizes(equation)
        first, last = scan.constants, scan.constants + scan.carried
        # In an iteration the dimension of all iterations is gone, and maybe with it the batch's.
        each = [dim - 1 if dim else None for dim in given.dims[last:]]
        carry = _Known(given.dims[first:last], given.parts[first:last])
        while True:
            found = self.possible(
                equation.params["jaxpr"],
                [*given.dims[:first], *carry.dims, *each],
                [*given.parts[:first], *carry.parts, *given.parts[last:]],
            )
            results = found.known
            after = _Known(results.dims[: scan.carried], results.parts[: scan.carried])
            following = _joined([carry, after])
            if following == carry:
                break
            carry = following
        stacked = [None if dim is None else dim + 1 for dim in results.dims[scan.carried :]]
        return [found], _Known(
            [*carry.dims, *stacked], [*carry.parts, *results.parts[scan.carried :]]
        )


def _joined(several: Sequence[_Known]) -> _Known:
    """What is known of values that are one or the other."""
    dims: list[Dimension] = []
    for own in zip(*[one.dims for one in several], strict=True):
        dims.append(next((dim for dim in own if dim is not None), None))
    parts = [any(own) for own in zip(*[one.parts for one in several], strict=True)]
    return _Known(dims, parts)
