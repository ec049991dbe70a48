"""A function that is compiled for each group of its calls: `Function`, the base of what the wrappers return."""

import functools
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from jax.core import Tracer

from functree.calls.call_groups import FoundCall
from functree.calls.checks import check_call, warn_moved
from functree.calls.compilations import Compilation, Log, situation
from functree.calls.lowerings import lowerings
from functree.calls.program import Program, around
from functree.calls.signature import Bound
from functree.calls.stages import Call, Lowered, Traced
from functree.calls.static_arguments import with_static
from functree.calls.traces import Traces
from functree.layout.meshes import tracing
from functree.layout.placement import is_concrete

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_T = TypeVar("_T")


class Function(Generic[_P, _T]):
    """A function that is compiled once for each group of its calls.

    Attributes:
        compilations: a record for each program that it has used, of what differed from the nearest earlier one. One
            that another wrapper of the function had compiled before is marked as shared.
    """

    compilations: list[Compilation]
    __name__: str
    __wrapped__: Callable[_P, _T]

    def __init__(self, fun: Callable[_P, _T], bound: Bound, traces: Traces, static: frozenset[str] = frozenset()):
        functools.update_wrapper(self, fun, updated=())
        self._bound, self._traces, self._static = bound, traces, static
        self._is_bound = bool(bound.args or bound.kwargs)
        # Looked up once: a call has no time for an attribute of an attribute.
        self._signature, self._groups = traces.signature, traces.groups
        self._log, self._used = Log(traces.signature.name), set[Program]()
        self._moving: Counter[Program] = Counter()
        self.compilations = self._log.records

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        # What most calls need not do is left out of their way: where a call has 300 µs, each function that it enters
        # for the first time in a while costs one or two.
        program, found = self._prepare(args, kwargs)
        arrays = found.arrays
        if program.careful or found.group.several_devices or not found.concrete:
            check_call(program, found)
        before = lowerings.count
        if program.entered is None:
            result = program(arrays)
        else:
            with around(program.entered):
                result = program(arrays)
        if lowerings.count != before or program not in self._used:
            self._note(program, arrays, shared=lowerings.count == before)
        if program.moved:
            self._moving[program] += 1
            if self._moving[program] == 2:
                warn_moved(program)
        return result

    def trace(self, *args: _P.args, **kwargs: _P.kwargs) -> Traced:
        """Trace a call, of arrays or of `jax.ShapeDtypeStruct`s, without running it."""
        return self._trace((), args, kwargs)

    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """Trace and lower a call, of arrays or of `jax.ShapeDtypeStruct`s, without running it."""
        return self._trace((), args, kwargs).lower()

    def eval_shape(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """The result of a call as `jax.ShapeDtypeStruct`s."""
        return self._trace((), args, kwargs).out_info

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: "Function[Concatenate[Any, _Q], _T]", instance: object, owner: type | None = None
    ) -> "BoundFunction[_Q, _T]": ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    # What each kind of function says for itself

    @abstractmethod
    def _key(self, found: FoundCall) -> Hashable:
        """All that a program depends on, besides the group of its calls."""

    @abstractmethod
    def _program(self, call: Any, found: FoundCall) -> Program:
        """A new program: all that is checked and resolved once."""

    # A call finds its program

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Program, FoundCall]:
        """The program for a call, made if there is none yet; and the call taken apart."""
        if self._is_bound:
            args, kwargs = self._bound.call(args, kwargs)
        call = self._signature.bind(args, kwargs)
        if self._static:
            call = with_static(call, self._static)
        found = self._groups.find(call)
        group, key = found.group, self._key(found)
        # Most calls are as the last one was: to compare what is mostly the same objects is cheaper than to hash it.
        last = group.last
        if last is None or last[0] != key:
            program = group.programs.get(key)
            if program is None:
                program = self._program(call, found)
                key = self._key(found)  # which may ask for more, once such calls are on several devices
                group.programs[key] = program
                self._used.add(program)
            group.last = last = key, program
        return last[1], found

    def _note(self, program: Program, arrays: Sequence[Any], shared: bool) -> None:
        """A call has compiled something, or used a program for the first time, unless it is a part of another one."""
        if tracing() or any(isinstance(x, Tracer) for x in arrays):
            return
        if on_several_devices(arrays):
            program.group.several_devices = True
        self._used.add(program)
        self._log.add(situation(program.group, arrays, program.mesh, program.rules), shared)

    def _trace(self, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
        program, found = self._prepare((*bound, *args), kwargs)
        seen = situation(program.group, found.arrays, program.mesh, program.rules)
        call = Call(program, self._signature, self._bound, bound, self._static, seen)
        return Traced(program.trace(found.arrays), call)


class BoundFunction(Generic[_P, _T]):
    """A method that is such a function, with its instance."""

    def __init__(self, function: Function[..., _T], instance: Any):
        self._function, self._instance = function, instance
        # As of any bound method: by these others, `ft.jit` too, know what it is bound to.
        self.__func__: Function[..., _T] = function
        self.__self__: Any = instance
        self.__name__: str = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._function(self._instance, *args, **kwargs)

    @property
    def compilations(self) -> list[Compilation]:
        """Those of the function, for all instances."""
        return self._function.compilations

    def trace(self, *args: _P.args, **kwargs: _P.kwargs) -> Traced:
        """As the function's."""
        return self._function._trace((self._instance,), args, kwargs)

    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """As the function's."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """As the function's."""
        return self.trace(*args, **kwargs).out_info


def on_several_devices(arrays: Sequence[Any]) -> bool:
    """Whether an array is on more than one device."""
    return any(x.sharding.num_devices > 1 for x in arrays if is_concrete(x))
