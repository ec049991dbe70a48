"""`CheckedJit`: a compiled function that runs only if all processes compile the same program."""

from collections.abc import Callable, Hashable
from typing import ParamSpec, TypeVar

import jax

from functree.calls.call_groups import FlatCall, Traces
from functree.calls.program import Program
from functree.calls.signature import Args, Kwargs, Partial
from functree.devices.meshes import tracing
from functree.devices.placement import sharding_text
from functree.layout.layout import Layout
from functree.processes.agreement import Agreement, Facts
from functree.processes.check_processes import (
    configuration,
    facts_of,
    has_values_here,
    own_text,
    settings,
)
from functree.transforms.jit.jitted import Jit, JitOptions
from functree.tree.arrays import array_text

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CheckedJit(Jit[_P, _T]):
    """A function that compares what it compiles with all processes; made by `ft.jit(...,
    check_processes=True)`."""

    def __init__(
        self, fun: Callable[_P, _T], partial: Partial, traces: Traces, options: JitOptions
    ):
        super().__init__(fun, partial, traces, options)
        self._agreed: set[Hashable] = set()  # the compilations that were found to be the same
        self._is_call = False  # whether what is prepared next is a call, and not only traced
        self._compares = False  # whether a call is prepared now

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._is_call = jax.process_count() > 1 and not tracing()
        return super().__call__(*args, **kwargs)

    def _prepare(self, args: Args, kwargs: Kwargs) -> tuple[Program, FlatCall]:
        """As that of every function; and what a call needs that was not compiled yet is
        compared."""
        is_call, self._is_call = self._is_call, False
        if not is_call:
            return super()._prepare(args, kwargs)
        self._compares = True
        try:
            return self._agreed_program(args, kwargs)
        finally:
            self._compares = False

    def _agreed_program(self, args: Args, kwargs: Kwargs) -> tuple[Program, FlatCall]:
        """The program of a call, which all processes have."""
        if not self._agreed:
            # The other processes are at their first call too, and hear of an error in this one.
            with self._agreement() as agreement:
                program, flat = super()._prepare(args, kwargs)
                agreement.compare(lambda: _facts(program, flat))
        else:
            program, flat = super()._prepare(args, kwargs)
            if _key(program, flat) not in self._agreed:
                with self._agreement() as agreement:
                    agreement.compare(lambda: _facts(program, flat))
        self._agreed.add(_key(program, flat))
        return program, flat

    def _placed(self, flat: FlatCall, rules: Layout | None) -> FlatCall:
        """As that of every function; and the values that are placed are compared, as
        `ft.shard` does. JAX compares them too, when it places them, in words of its own."""
        may_place = rules is not None or self._layouts is not None
        if self._compares and may_place:
            own = _own_values(flat)
            if own:
                with self._agreement() as agreement:
                    agreement.compare(lambda: {"arguments": own})
        return super()._placed(flat, rules)

    def _agreement(self) -> Agreement:
        return Agreement(f"{self.__name__} does not run", f"{self.__name__}(...)")


def _facts(program: Program, flat: FlatCall) -> Facts:
    """What has to be the same in all processes: the arguments, the mesh, the lowered program."""
    arguments: list[str] = []
    for path, x in zip(program.group.paths, flat.arrays, strict=True):
        # What is in this process alone is on devices of its own, and has to have equal values.
        if has_values_here(x):
            arguments.append(f"{path}: {own_text(x)}")
        else:
            sharding = sharding_text(getattr(x, "sharding", None))
            arguments.append(f"{path}: {array_text(x)} {sharding}")
    facts: dict[str, list[str]] = {"settings": settings(), "arguments": arguments}
    if program.mesh is not None:
        facts["mesh"] = facts_of(program.mesh)
    facts["program"] = facts_of(program.trace(flat.arrays).lower())
    return facts


def _own_values(flat: FlatCall) -> list[str]:
    """The values of the arrays that are in this process alone."""
    pairs = zip(flat.group.paths, flat.arrays, strict=True)
    return [f"{path}: {own_text(x)}" for path, x in pairs if has_values_here(x)]


def _key(program: Program, flat: FlatCall) -> Hashable:
    """All that a compilation depends on."""
    return (
        program,
        configuration(),
        tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in flat.arrays),
    )
