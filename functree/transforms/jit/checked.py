"""`CheckedJit`: a compiled function that runs only if all processes have compiled the same program."""

from collections.abc import Mapping
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

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if jax.process_count() > 1 and not tracing():
            self._check(args, kwargs)
        return super().__call__(*args, **kwargs)

    def _check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare the compilation that a call needs, if it is a new one."""
        failure = f"{self.__name__} does not run"
        if not self._agreed:  # the other processes are at their first call too, and hear of an error in this one
            agreed(failure, lambda: (None, lambda: self._facts(*self._prepare(args, kwargs))))
            self._agreed.add(_key(*self._prepare(args, kwargs)))
            return
        program, found = self._prepare(args, kwargs)
        key = _key(program, found)
        if key not in self._agreed:
            agreed(failure, lambda: (None, lambda: self._facts(program, found)))
            self._agreed.add(key)

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
