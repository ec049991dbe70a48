"""`CheckedJit`: a compiled function that runs only if all processes have compiled the same program."""

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax

from functree.calls.call_groups import FoundCall
from functree.calls.program import Program
from functree.layout.meshes import tracing
from functree.layout.placement import sharding_text
from functree.processes.agreement import Facts, agreed
from functree.processes.facts import facts_of
from functree.transforms.jit.jitted import Jit
from functree.tree.arrays import array_text

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CheckedJit(Jit[_P, _T]):
    """A function that compares what it compiles with all processes; made by `ft.jit(..., check_processes=True)`."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._agreed: set[Any] = set()  # the compilations that were found to be the same
        self._is_call = False  # whether what is prepared next is a call, and not only traced

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._is_call = jax.process_count() > 1 and not tracing()
        return super().__call__(*args, **kwargs)

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Program, FoundCall]:
        """As that of every function; and what a call needs that was not compiled yet is compared."""
        is_call, self._is_call = self._is_call, False
        if not is_call:
            return super()._prepare(args, kwargs)
        failure = f"{self.__name__} does not run"
        if not self._agreed:
            # The other processes are at their first call too, and hear of an error in this one.
            prepared = agreed(failure, lambda: self._told(super(CheckedJit, self)._prepare(args, kwargs)))
        else:
            prepared = super()._prepare(args, kwargs)
            if _key(*prepared) not in self._agreed:
                agreed(failure, lambda: self._told(prepared))
        self._agreed.add(_key(*prepared))
        return prepared

    def _told(self, prepared: tuple[Program, FoundCall]) -> tuple[tuple[Program, FoundCall], Callable[[], Facts]]:
        return prepared, lambda: self._facts(*prepared)

    def _facts(self, program: Program, found: FoundCall) -> Facts:
        """What has to be the same in all processes: the arguments, the mesh, the lowered program."""
        paths = program.group.paths
        arguments = [
            f"{path}: {array_text(x)} {sharding_text(getattr(x, 'sharding', None))}"
            for path, x in zip(paths, found.arrays, strict=True)
        ]
        mesh = {} if program.mesh is None else {"mesh": facts_of(program.mesh)}
        return {"arguments": arguments, **mesh, "program": facts_of(program.trace(found.arrays).lower())}


def _key(program: Program, found: FoundCall) -> Any:
    """All that a compilation depends on."""
    return program, tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in found.arrays)
