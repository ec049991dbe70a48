"""A `Body` lists the operations of a traced function, with calls inlined."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
    no_effects,
)

from functree.compiled.sources import is_model_file
from functree.tree.jaxprs import AnyJaxpr, inner_programs, is_random, scan_sizes

T = TypeVar("T")

Number = int
"""The index of a value in a body."""

# Equations that only run another program. Recomputed values are treated as saved, since they are
# equal.
_CALLS = frozenset(
    "jit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr".split()
)

# Equations with bodies.
_WITH_BODIES = frozenset("scan while cond shard_map".split())

# Operations that place an array or change its type, without changing values.
_PLACING = frozenset(
    "sharding_constraint reshard mesh_cast layout_constraint device_put copy optimization_barrier "
    "pvary pcast retyped".split()
)

# Equations that are left out, since running them again would only print again.
_PRINTS = frozenset({"debug_callback", "debug_print"})


class Source(NamedTuple):
    """A line of the user's source code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


# Compared by identity, since a step is one operation of one program.
@dataclass(frozen=True, eq=False)
class Step:
    """An operation of a body.

    Attributes:
        name: the name of JAX's primitive.
        params: its parameters.
        ins: its inputs.
        outs: its results.
        types: the types of its results.
        source: the innermost line of the user's model around it; None if there is none.
        draws: whether it draws random numbers, or makes keys for them.
        bodies: the body of a loop or shard_map, or the branches of a conditional.
        operands: three counts of inputs, in this order: inputs that its bodies do not receive,
            constants of a loop's body, and values that a loop carries. All other inputs follow.
        acts: whether it has side effects, such as writing to a `jax.Ref`.
        run: the operation as a function from arrays to arrays.
    """

    name: str
    params: Mapping[str, Any]
    ins: tuple[Number, ...]
    outs: tuple[Number, ...]
    types: tuple[Any, ...]
    source: Source | None
    draws: bool
    bodies: tuple["Body", ...]
    operands: tuple[int, int, int]
    acts: bool
    run: Callable[..., Sequence[Any]]

    @property
    def places(self) -> bool:
        """Whether it only places an array."""
        return self.name in _PLACING

    def body_operands(self, ins: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Divide a sequence that has one element for each of the step's inputs.

        The three lists are for the constants of a loop's body, the values that a loop carries, and
        the other inputs of the bodies.
        """
        skipped, constants, carried = self.operands
        given = list(ins)[skipped:]
        end = constants + carried
        return given[:constants], given[constants:end], given[end:]


@dataclass(frozen=True, eq=False)
class Body:
    """A program as a list of operations. Each value in it has a unique number.

    Attributes:
        inputs: its inputs.
        constants: its constants, by number.
        steps: the operations that its outputs need, in order.
        outputs: its outputs.
    """

    inputs: tuple[Number, ...]
    constants: Mapping[Number, Any]
    steps: tuple[Step, ...]
    outputs: tuple[Number, ...]

    @cached_property
    def makers(self) -> Mapping[Number, tuple[int, int]]:
        """The index of the step that makes each value, and the value's index among the results."""
        return {
            value: (index, result)
            for index, step in enumerate(self.steps)
            for result, value in enumerate(step.outs)
        }

    @cached_property
    def crossing(self) -> frozenset[Number]:
        """The values that leave their source line, or the body.

        They are about half of all values, and enough to find the line where something goes wrong.
        """
        found = set(self.outputs)
        for step in self.steps:
            if step.bodies:
                found.update(step.outs)
            for value in step.ins:
                if value in self.makers:
                    maker = self.steps[self.makers[value][0]]
                    if maker.source != step.source:
                        found.add(value)
        return frozenset(found)

    @cached_property
    def dependent(self) -> frozenset[Number]:
        """The values that depend on an input, or are random.

        Other values in a shard_map may depend on the device's index.
        """
        found = set(self.inputs)
        for step in self.steps:
            if step.draws or not found.isdisjoint(step.ins):
                found.update(step.outs)
        return frozenset(found)

    def all_steps(self) -> Iterator[Step]:
        """Yield all steps, including inner bodies."""
        for step in self.steps:
            yield step
            for body in step.bodies:
                yield from body.all_steps()


def body_of(program: AnyJaxpr, source: Source | None = None) -> Body:
    """Build the body of a traced program.

    Args:
        program: the program.
        source: the line for operations that are on no line of the user's model, as in the body of a
            library's loop.
    """
    flat = _Flat()
    inputs = [flat.new() for _ in _open(program).invars]
    outputs = flat.inline(program, inputs, source)
    return Body(tuple(inputs), flat.constants, tuple(_needed(flat.steps, outputs)), tuple(outputs))


def _open(program: AnyJaxpr) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


class _Flat:
    """A collector of the steps of one body."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.constants: dict[Number, Any] = {}
        self.new: Callable[[], Number] = itertools.count().__next__  # returns a new number

    def inline(
        self, program: AnyJaxpr, inputs: Sequence[Number], source: Source | None
    ) -> list[Number]:
        """Add the steps of a program, and return the numbers of its outputs."""
        jaxpr = _open(program)
        numbers: dict[Var, Number] = dict(zip(jaxpr.invars, inputs, strict=True))
        constants = program.consts if isinstance(program, ClosedJaxpr) else ()
        for var, value in zip(jaxpr.constvars, constants, strict=True):
            numbers[var] = self._constant(value)
        for eqn in jaxpr.eqns:
            ins = [self._number(atom, numbers) for atom in eqn.invars]
            line = line_of(eqn) or source
            if eqn.primitive.name in _CALLS:
                (inner,) = inner_programs(eqn)
                outs = self.inline(inner, ins, line)
            else:
                outs = [self.new() for _ in eqn.outvars]
                self.steps.append(_step(eqn, ins, outs, line, jaxpr))
            numbers.update(zip(eqn.outvars, outs, strict=True))
        return [self._number(atom, numbers) for atom in jaxpr.outvars]

    def _constant(self, value: Any) -> Number:
        number = self.new()
        self.constants[number] = value
        return number

    def _number(self, atom: Any, numbers: Mapping[Var, Number]) -> Number:
        if not isinstance(atom, Literal):
            return numbers[atom]
        # The literal keeps its dtype, which a Python number would lose.
        return self._constant(np.asarray(atom.val, getattr(atom.aval, "dtype", None)))


def _step(
    eqn: JaxprEqn,
    ins: Sequence[Number],
    outs: Sequence[Number],
    source: Source | None,
    jaxpr: Jaxpr,
) -> Step:
    name, params = eqn.primitive.name, eqn.params
    programs = list(inner_programs(eqn)) if name in _WITH_BODIES else []
    operands = 0, 0, 0
    if name == "cond":
        operands = 1, 0, 0  # the index of the branch
    elif name == "scan":
        constants, carried = scan_sizes(eqn)
        operands = 0, constants, carried
    elif name == "while":
        # The condition is left out: it only determines how often the body runs, which is recorded.
        programs = [params["body_jaxpr"]]
        operands = params["cond_nconsts"], params["body_nconsts"], len(outs)
    return Step(
        name=name,
        params=params,
        ins=tuple(ins),
        outs=tuple(outs),
        types=tuple(var.aval for var in eqn.outvars),
        source=source,
        draws=is_random(eqn),
        bodies=tuple(body_of(one, source) for one in programs),
        operands=operands,
        acts=bool(eqn.effects) and name not in _PRINTS,
        run=_runner(eqn, jaxpr),
    )


def _runner(eqn: JaxprEqn, around: Jaxpr) -> Callable[..., Sequence[Any]]:
    """Build a function that evaluates a single equation on arrays.

    The equation becomes a separate program. The program runs in the context in which the equation
    was traced, including its mesh.
    """
    # A position of each variable, which may be an input several times.
    positions = {var: i for i, var in enumerate(eqn.invars) if not isinstance(var, Literal)}
    info = around.debug_info.with_unknown_names()
    program = Jaxpr((), list(positions), eqn.outvars, [eqn], no_effects, info)
    function = jaxpr_as_fun(ClosedJaxpr(program, ()))
    return lambda *arrays: function(*[arrays[i] for i in positions.values()])


def _needed(steps: Sequence[Step], outputs: Sequence[Number]) -> list[Step]:
    """Return the steps that outputs need, and steps with side effects.

    A traced gradient has many steps that no output needs.
    """
    needed, kept = set(outputs), list[Step]()
    for step in reversed(steps):
        if step.acts or not needed.isdisjoint(step.outs):
            kept.append(step)
            needed.update(step.ins)
    return kept[::-1]


def line_of(eqn: JaxprEqn) -> Source | None:
    """Return the innermost line of the user's model around an equation, or None."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return None
    for frame in traceback.frames:
        if is_model_file(frame.file_name):
            return Source(frame.file_name, frame.line_num)
    return None
