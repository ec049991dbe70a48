"""A function of modules ─► a `Function`, which is compiled for each group of its calls; the base of all wrappers."""

import functools
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import jax
from jax.core import Tracer

from functree.calls.call_groups import FoundCall
from functree.calls.checks import check_call, warn_moved
from functree.calls.compilations import Compilation, Log, Seen
from functree.calls.compile_events import compile_events
from functree.calls.program import Program, around, without_jit
from functree.calls.signature import Bound, wrapper_updates
from functree.calls.stages import Call, Lowered, Traced
from functree.calls.static_arguments import with_static
from functree.calls.traces import Traces
from functree.layout.layout import Layout
from functree.layout.meshes import tracing
from functree.layout.placement import is_concrete

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_T = TypeVar("_T")


class Function(Generic[_P, _T]):
    """A function of modules that is compiled for each group of its calls.

    Attributes:
        compilations: a record for each program that it has used or that `.lower(...).compile()` has made, with the
            differences from the most similar earlier one. A program that another wrapper of the function had compiled
            is marked as shared.
    """

    compilations: list[Compilation]
    __name__: str
    __wrapped__: Callable[_P, _T]

    def __init__(self, fun: Callable[_P, _T], bound: Bound, traces: Traces, static: frozenset[str] = frozenset()):
        self.__name__ = traces.signature.name  # a partial and a module have no name of their own
        functools.update_wrapper(self, fun, updated=wrapper_updates(fun))
        self._bound, self._traces, self._static = bound, traces, static
        self._is_bound = bool(bound.args or bound.kwargs)
        # Copied, because each attribute of an attribute takes time in every call.
        self._signature, self._groups = traces.signature, traces.groups
        self._log, self._used = Log(traces.signature.name), set[Program]()
        self._moving: Counter[Program] = Counter()
        self.compilations = self._log.records

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        # A call of a compiled function may take 300 µs, and each Python function that it calls takes one or two. So
        # everything that most calls do not need is behind a condition here.
        program, found = self._prepare(args, kwargs)
        arrays = found.arrays
        if program.careful or found.group.several_devices or not found.concrete:
            check_call(program, found)
        # Only these events show that JAX has lowered or compiled something during the call.
        before = compile_events.count
        if program.entered is None:
            result = program(arrays)
        else:
            with around(program.entered):
                result = program(arrays)
        if compile_events.count != before or program not in self._used:
            self._note(program, arrays, compile_events.have(program.body.__name__, before))
        # The first call may move its arguments on purpose; a second one shows that every call does.
        if program.moved:
            self._moving[program] += 1
            if self._moving[program] == 2:
                warn_moved(program)
        return result

    def trace(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Traced:
        """Trace a call, of arrays or of `jax.ShapeDtypeStruct`s, without running it."""
        return self._trace((), args, kwargs)

    def lower(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """Trace and lower a call, of arrays or of `jax.ShapeDtypeStruct`s, without running it."""
        return self._trace((), args, kwargs).lower()

    def eval_shape(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """The result of a call as `jax.ShapeDtypeStruct`s."""
        return self._trace((), args, kwargs).out_info

    def clear_cache(self) -> None:
        """Forget all traces and programs, and their records. Other wrappers that share them forget them too."""
        self._groups.clear()
        self._log.clear()
        self._used.clear()
        self._moving.clear()

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: "Function[Concatenate[Any, _Q], _T]", instance: object, owner: type | None = None
    ) -> "BoundFunction[_Q, _T]": ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    # For subclasses

    @abstractmethod
    def _rules(self) -> Layout | None:
        """The rules that are ambient in the body of a call that is made now."""

    @abstractmethod
    def _key(self, found: FoundCall, rules: Layout | None) -> Hashable:
        """Everything that a program depends on, except the group of the call."""

    def _placed(self, call: Any, found: FoundCall, rules: Layout) -> FoundCall:
        """The call, with arrays that nobody has placed where the rules put them."""
        return found

    @abstractmethod
    def _program(self, call: Any, found: FoundCall) -> Program:
        """Make a program: everything that is checked and resolved only once."""

    # From a call to its program

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Program, FoundCall]:
        """The program for a call, which is made if it does not exist yet, and the flattened call."""
        if self._is_bound:
            args, kwargs = self._bound.call(args, kwargs)
        call = self._signature.bind(args, kwargs)
        if self._static:
            call = with_static(call, self._static)
        found = self._groups.find(call)
        if without_jit():
            return self._program(call, found), found  # which runs without being traced, and is not kept
        rules = self._rules()
        if rules is not None:
            found = self._placed(call, found, rules)
        group, key = found.group, self._key(found, rules)
        # Most calls have the key of the last call. Comparing keys is cheaper than hashing them, because most of their
        # elements are the same objects.
        last = group.last
        if last is None or last[0] != key:
            program = group.programs.get(key)
            if program is None:
                program = self._program(call, found)
                # Again, because the key has more elements once calls of the group are on several devices, and
                # `_program` may have found that.
                key = self._key(found, rules)
                group.programs[key] = program
                self._used.add(program)
            group.last = last = key, program
        return last[1], found

    def _note(self, program: Program, arrays: Sequence[Any], compiled: bool) -> None:
        """Log that a call has compiled its program, or has used it for the first time."""
        # Under a trace of another function, the program is a part of that function's program. Under
        # `jax.disable_jit()` there is none.
        if tracing() or without_jit() or any(isinstance(x, Tracer) for x in arrays):
            return
        if on_several_devices(arrays):
            program.group.several_devices = True
        if compiled or program not in self._used:
            self._used.add(program)
            seen = Seen.of(program.group, arrays, program.mesh, program.rules)
            self._log.add(seen.situation, shared=not compiled)

    def _trace(self, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
        """Trace a call; `bound` is the instance of a method, or empty."""
        with jax.disable_jit(False):  # which changes calls only
            program, found = self._prepare((*bound, *args), kwargs)
            seen = Seen.of(program.group, found.arrays, program.mesh, program.rules)
            names = frozenset(kwargs)
            call = Call(program, self._signature, self._bound, bound, self._static, names, seen, self._log)
            return Traced(program.trace(found.arrays), call)


class BoundFunction(Generic[_P, _T]):
    """A `Function` in a class, bound to an instance."""

    def __init__(self, function: Function[..., _T], instance: Any):
        self._function, self._instance = function, instance
        # Bound methods have these attributes, by which other wrappers such as `ft.jit` find the instance.
        self.__func__: Function[..., _T] = function
        self.__self__: Any = instance
        self.__name__: str = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._function(self._instance, *args, **kwargs)

    @property
    def compilations(self) -> list[Compilation]:
        """The compilations of the function, for all instances."""
        return self._function.compilations

    def clear_cache(self) -> None:
        """Forget all traces and programs of the function, for all instances; see `Function.clear_cache`."""
        self._function.clear_cache()

    def trace(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Traced:
        """Trace a call without running it; see `Function.trace`."""
        return self._function._trace((self._instance,), args, kwargs)

    def lower(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """Trace and lower a call without running it; see `Function.lower`."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """The result of a call as `jax.ShapeDtypeStruct`s; see `Function.eval_shape`."""
        return self.trace(*args, **kwargs).out_info


def on_several_devices(arrays: Sequence[Any]) -> bool:
    """Whether an array is on more than one device."""
    return any(x.sharding.num_devices > 1 for x in arrays if is_concrete(x))
