"""A function ─► its `Signature`: the class of its calls, which are trees whose fields are annotated."""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from jax.tree_util import default_registry

from functree.errors import FunctreeError
from functree.tree.annotations.hints import UNREADABLE
from functree.tree.paths import Path

RESULT = "result"  # what paths call it
_EMPTY = inspect.Parameter.empty


class Bound(NamedTuple):
    """A callable, as a function and what is bound to it.

    Attributes:
        fun: the function.
        args: bound by position: the instance of a method, a partial's arguments, a module that is called.
        kwargs: bound by name.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, fun: Any) -> "Bound":
        """What is bound to a callable. Raises TypeError for what cannot be called."""
        if isinstance(fun, functools.partial):
            inner, args, kwargs = cls.of(fun.func)
            return cls(inner, (*args, *fun.args), {**kwargs, **fun.keywords})
        if hasattr(fun, "__func__") and hasattr(fun, "__self__"):
            return cls(fun.__func__, (fun.__self__,), {})
        if default_registry.flatten_one_level(fun) is not None:
            return cls(type(fun).__call__, (fun,), {})
        if not callable(fun):
            raise TypeError(f"a function was expected, not {fun!r}")
        return cls(fun, (), {})

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """All arguments of a call."""
        if not self.args and not self.kwargs:
            return args, kwargs
        return (*self.args, *args), {**self.kwargs, **kwargs}


class Signature:
    """A function as its annotations describe it. A call of it is a named tuple of its parameters' values.

    Such a tuple is a tree whose fields are annotated, so that what reads the axes of a module reads those of a call.
    It knows nothing of the function itself, so that what is remembered for a function does not keep it alive.

    Args:
        fun: a function.
        bound: how many parameters are bound by position, and the names of those that are bound by name.

    Raises:
        FunctreeError: a function of C that does not tell its parameters.

    Attributes:
        name: of the function.
        positional: the parameters that are given by position, without those that are bound.
        by_name: the parameter that takes unknown names, or None.
        call: the class of its calls.
        result: the class of its results, with one field.
    """

    def __init__(self, fun: Callable[..., Any], bound: tuple[int, Collection[str]] = (0, ())):
        self.name: str = getattr(fun, "__qualname__", type(fun).__name__).rpartition("<locals>.")[2]
        self._signature: inspect.Signature = _signature(fun)
        parameters = list(self._signature.parameters.values())
        kinds = inspect.Parameter
        by_position = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        number, names = bound
        taken = {*(p.name for p in parameters[:number]), *names}
        ordered = [p.name for p in parameters if p.kind in (*by_position, kinds.VAR_POSITIONAL)]
        self.positional: tuple[str, ...] = tuple(name for name in ordered if name not in taken)
        self.by_name: str | None = next((p.name for p in parameters if p.kind is kinds.VAR_KEYWORD), None)
        self._many: str | None = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None)
        self._simple: bool = all(p.kind in by_position for p in parameters)
        self._defaults: tuple[Any, ...] = tuple(p.default for p in parameters)
        self.call: Any = _record(fun, {p.name: _annotation(fun, p) for p in parameters})
        self.result: Any = _record(fun, {RESULT: _resolved(fun, self._signature.return_annotation)})

    @classmethod
    def of(cls, fun: Any) -> tuple["Signature", Bound]:
        """The signature of a callable, and what is bound to it."""
        bound = Bound.of(fun)
        return cls(bound.fun, (len(bound.args), bound.kwargs)), bound

    @property
    def parameters(self) -> tuple[str, ...]:
        """All of them, those that are bound first."""
        return self.call._fields

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call, defaults filled in; `args` begin with what is bound. Raises TypeError as Python does."""
        if self._simple and not kwargs:
            missing = self._defaults[len(args) :]
            if len(args) + len(missing) == len(self._defaults) and not any(x is _EMPTY for x in missing):
                return tuple.__new__(self.call, (*args, *missing))
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.call(*bound.arguments.values())

    def each(self, call: Any) -> Iterator[tuple[Path, Any]]:
        """A call's arguments by path, one by one where a parameter takes any number of them."""
        for name, value in zip(self.parameters, call, strict=True):
            if name == self.by_name:
                yield from ((Path((name, key)), value[key]) for key in value)
            elif name == self._many:
                yield from ((Path((name, i)), one) for i, one in enumerate(value))
            else:
                yield Path((name,)), value

    def run(self, fun: Callable[..., Any], call: Any) -> Any:
        """The result of the function, or of one that takes the same, for a call."""
        args, kwargs = self.arguments(call)
        return fun(*args, **kwargs)

    def arguments(self, call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call as the function takes it."""
        bound = inspect.BoundArguments(self._signature, OrderedDict(zip(self.parameters, call, strict=True)))
        return bound.args, bound.kwargs


def _signature(fun: Any) -> inspect.Signature:
    try:
        return inspect.signature(fun)
    except ValueError as error:
        raise FunctreeError(f"{fun!r} does not tell its parameters: wrap it, `lambda x: ...`") from error


def _record(fun: Any, annotations: Mapping[str, Any]) -> Any:
    """A class of named tuples. `typing.NamedTuple` refuses names that begin with an underscore."""
    members = {
        "__slots__": (),
        "__module__": getattr(fun, "__module__", __name__),
        "__annotations__": {name: hint for name, hint in annotations.items() if hint is not _EMPTY},
        "__new__": lambda cls, *values: tuple.__new__(cls, values),
        "_fields": tuple(annotations),
    }
    return type("Record", (tuple,), members)


def _annotation(fun: Any, parameter: inspect.Parameter) -> Any:
    hint = _resolved(fun, parameter.annotation)
    if hint is _EMPTY:
        return hint
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return tuple[hint, ...]
    return dict[str, hint] if parameter.kind is inspect.Parameter.VAR_KEYWORD else hint


def _resolved(fun: Any, annotation: Any) -> Any:
    """An annotation in quotes looked up where the function stands; one that cannot be read there stays as it is."""
    if not isinstance(annotation, str):
        return annotation
    inner = inspect.unwrap(fun)
    try:
        return eval(annotation, getattr(inner, "__globals__", {}), closed_over(inner))
    except UNREADABLE:
        return annotation


def closed_over(fun: Any) -> dict[str, Any]:
    """The values of the variables that a function closes over, by name."""
    code, cells = getattr(fun, "__code__", None), getattr(fun, "__closure__", None)
    found: dict[str, Any] = {}
    if not code or not cells:
        return found
    for name, cell in zip(code.co_freevars, cells, strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found
