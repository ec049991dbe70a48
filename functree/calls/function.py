"""A `Function` wraps a function of modules and compiles it for each group of its calls."""

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from types import MethodType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import jax
from jax.core import Tracer

from functree.calls.call_groups import FlatCall, Traces, traces_of
from functree.calls.checks import check_call
from functree.calls.compilations import Compilation, Log, Situation, compile_events
from functree.calls.program import Program, around, raise_failed, without_jit
from functree.calls.signature import (
    Args,
    Kwargs,
    Partial,
    Record,
    Signature,
    check_identity,
    check_wrapped,
    with_static,
    wrapper_updates,
)
from functree.calls.stages import Lowered, StagedCall, Traced
from functree.devices.meshes import tracing
from functree.devices.placement import is_deleted, refuse_deleted
from functree.layout.layout import Layout
from functree.placing.constrain import ambient_rules
from functree.tree.arrays import AnyArray, Tree

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_T = TypeVar("_T")


class Function(Generic[_P, _T]):
    """A function of modules that is compiled for each group of its calls.

    Attributes:
        compilations: one record for each program that its calls used or that
            `.lower(...).compile()` compiled, with the differences from the most similar earlier
            program. A program that another wrapper of the function compiled is marked as shared.
        static: the names of the parameters that are static, whatever their values.
    """

    compilations: list[Compilation]
    _door: ClassVar[str]  # the name of the public function that makes it
    _places: ClassVar[bool] = False  # whether it places uncommitted arguments
    __name__: str
    __qualname__: str
    __wrapped__: Callable[_P, _T]
    # Set only on bound methods.
    __func__: Any
    __self__: Any

    def __init__(
        self,
        fun: Callable[_P, _T],
        partial: Partial,
        traces: Traces,
        options: Any,
    ):
        check_wrapped(self._door, fun)
        # A partial or a module has no name.
        self.__name__ = self.__qualname__ = traces.signature.name
        functools.update_wrapper(self, fun, updated=wrapper_updates(fun))
        self._partial, self._traces = partial, traces
        # A named tuple, with its own class for each public function. Copies are made from it.
        self._options: Any = options
        self.static: frozenset[str] = getattr(options, "static", frozenset())
        self._is_bound = bool(partial.args or partial.kwargs)
        # Copied, because nested attribute lookups take time in every call.
        self._signature, self._groups = traces.signature, traces.groups
        self._log, self._used = Log(traces.signature.name), set[Program]()
        self.compilations = self._log.records
        self._set_up()

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        # Each nested Python call noticeably slows down the call of a small compiled function. Work
        # that most calls do not need is therefore conditional.
        program, flat = self._prepare(args, kwargs)
        arrays = flat.arrays
        if program.careful or flat.group.several_devices or not flat.concrete:
            check_call(program, flat)
        # Only these events show whether JAX lowers or compiles anything during the call.
        before = compile_events.count
        try:
            if program.entered is None:
                result = program.run(program.jitted, arrays)
            else:
                with around(program.entered):
                    result = program.run(program.jitted, arrays)
        except (RuntimeError, ValueError) as error:
            # On a single device, a check for deleted arguments would slow down each call, so the
            # check follows JAX's error. After other errors, donated arguments may be deleted too.
            if str(error).startswith("Array has been deleted") and any(map(is_deleted, arrays)):
                raise refuse_deleted(program.name, program.group.paths, arrays) from error
            raise_failed(error, program.name)
            raise
        if compile_events.count != before or program not in self._used:
            self._note(program, arrays, compile_events.have(program.body.__name__, before))
        return result

    def trace(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Traced:
        """Trace a call without running it; arguments may be arrays or `jax.ShapeDtypeStruct`s."""
        with jax.disable_jit(False):  # `jax.disable_jit()` affects only calls
            program, flat = self._prepare(args, kwargs)
            number, arrays = len(self._partial.args) + len(args), flat.abstract()
            call = StagedCall(program, self._signature, self._find, number, arrays, self._log)
            return Traced(program.trace(flat.arrays), call)

    def lower(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """Trace and lower a call without running it.

        Arguments may be arrays or `jax.ShapeDtypeStruct`s.
        """
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, /, *args: _P.args, **kwargs: _P.kwargs) -> Tree:
        """Return the result of a call as `jax.ShapeDtypeStruct`s."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Discard all traces, programs and records.

        Other wrappers that share the traces and programs lose them too.
        """
        self._groups.clear()
        self._log.clear()
        self._used.clear()

    def changed(self, fun: Callable[_P, _T] | None = None, **options: Any) -> Self:
        """Return a function with some options changed.

        Args:
            fun: the same function, if it is bound to different arguments.
            **options: the changed options.
        """
        return self.of(self.__wrapped__ if fun is None else fun, self._options._replace(**options))

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: "Function[Concatenate[Any, _Q], _T]", instance: object, owner: type | None = None
    ) -> "Function[_Q, _T]": ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind a function in a class to an instance.

        The bound method shares its traces, programs and records with the function.
        """
        if instance is None:
            return self
        method = object.__new__(type(self))
        vars(method).update(vars(self))
        args = (*self._partial.args, instance)
        method._partial = self._partial._replace(args=args)
        method._is_bound = True
        # Bound methods have these attributes. Other wrappers such as `ft.jit` use them to find the
        # instance.
        method.__func__, method.__self__ = self, instance
        method.__wrapped__ = MethodType(self.__wrapped__, instance)
        return method

    # A `Function` is copied and pickled as a function and options, without its traces and programs.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if hasattr(self, "__self__"):
            return self.__func__.__get__(copy.deepcopy(self.__self__, memo))
        # A copy of a Python function is the function itself, so the wrapper is its own copy too.
        fun = copy.deepcopy(self.__wrapped__, memo)
        return self if fun is self.__wrapped__ else type(self).of(fun, self._options)

    def __reduce__(self) -> tuple[Any, ...]:
        if hasattr(self, "__self__"):
            return type(self).__get__, (self.__func__, self.__self__)
        return type(self).of, (self.__wrapped__, self._options)

    @classmethod
    def of(cls, fun: Callable[_P, _T], options: Any) -> Self:
        """Wrap a function with these options."""
        return cls.made(fun, *Signature.of(fun), options)

    @classmethod
    def made(
        cls, fun: Callable[_P, _T], signature: Signature, partial: Partial, options: Any
    ) -> Self:
        """Wrap a function whose signature was already read."""
        return cls(fun, partial, traces_of(partial, signature, options), options)

    def __repr__(self) -> str:
        return f"<ft.{self._door} of {self._signature.name}>"

    # For subclasses

    def _set_up(self) -> None:
        """Store the options that calls need in attributes."""

    def _rules(self) -> Layout | None:
        """Return the rules for a call made now: the function's own, or the ambient rules."""
        return self._options.rules if self._options.rules is not None else ambient_rules()

    @abstractmethod
    def _key(self, flat: FlatCall, rules: Layout | None) -> Hashable:
        """Return everything that a program depends on, except the call's group."""

    def _placed(self, flat: FlatCall, rules: Layout | None) -> FlatCall:
        """Place the uncommitted arrays of a call using the function's layouts; return the call."""
        return flat

    @abstractmethod
    def _program(self, flat: FlatCall) -> Program:
        """Make a program, with all checks and decisions that are needed only once."""

    # From a call to its program

    def _bind(self, args: Args, kwargs: Kwargs) -> Record:
        """Bind arguments to the parameters of the function."""
        if self._is_bound:
            args, kwargs = self._partial.with_bound(args, kwargs)
        call = self._signature.bind(args, kwargs)
        return with_static(call, self.static) if self.static else call

    def _find(self, args: Args, kwargs: Kwargs) -> FlatCall:
        """Flatten a call and find its group."""
        return self._groups.find(self._bind(args, kwargs))

    def _prepare(self, args: Args, kwargs: Kwargs) -> tuple[Program, FlatCall]:
        """Return the program for a call and the flattened call; make the program if necessary."""
        flat = self._find(args, kwargs)
        if without_jit():
            # The program runs without a trace, and is not cached.
            return self._program(flat), flat
        rules = self._rules()
        if self._places:
            flat = self._placed(flat, rules)
        group, key = flat.group, self._key(flat, rules)
        # Most calls have the same key as the last call. Comparing keys is cheaper than hashing
        # them, because most of their elements are the same objects.
        last = group.last
        if last is None or last[0] != key:
            program = group.programs.get(key)
            if program is None:
                check_identity(self._signature, flat.call)
                group.see_devices(flat.arrays)
                program = self._program(flat)
                if not program.is_kept:
                    return program, flat
                # The key has more elements once a call of the group has had arrays on several
                # devices.
                key = self._key(flat, rules)
                group.programs[key] = program
                self._used.add(program)
            group.last = last = key, program
        return last[1], flat

    def _note(self, program: Program, arrays: Sequence[AnyArray], compiled: bool) -> None:
        """Record that a call compiled its program, or used it for the first time."""
        # In another function's trace, the program becomes part of that function's program. Under
        # `jax.disable_jit()`, there is no program.
        if any(isinstance(x, Tracer) for x in arrays) or tracing() or without_jit():
            return
        program.group.see_devices(arrays)
        if compiled or program not in self._used:
            self._used.add(program)
            situation = Situation.of(program.group, arrays, program.mesh, program.rules)
            self._log.add(situation, shared=not compiled)
