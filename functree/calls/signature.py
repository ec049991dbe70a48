"""A function ─► its `Signature`: a class for its calls, which are trees with the parameters as annotated fields."""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from jax.tree_util import default_registry, register_static

from functree.calls.closures import closed_over
from functree.errors import FunctreeError
from functree.parameters import FUNCTION, shown
from functree.tree.annotations.hints import UNREADABLE
from functree.tree.paths import Path

RESULT = "result"  # the name of a function's result in paths
_EMPTY = inspect.Parameter.empty


@register_static
class NotGiven:
    """The value of a parameter that a call does not give; a tree without leaves."""


NOT_GIVEN = NotGiven()


class Bound(NamedTuple):
    """A callable, as a function and the arguments that are bound to it.

    Attributes:
        fun: the function.
        args: arguments bound by position: the instance of a method, the arguments of a partial, a callable module.
        kwargs: arguments bound by name.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, fun: Any) -> "Bound":
        """The function of a callable and its bound arguments. Raises FunctreeError if it cannot be called."""
        if not FUNCTION.fits(fun):
            raise FunctreeError(f"a function was expected, not {shown(fun)}")
        if isinstance(fun, functools.partial):
            inner, args, kwargs = cls.of(fun.func)
            return cls(inner, (*args, *fun.args), {**kwargs, **fun.keywords})
        if hasattr(fun, "__func__") and hasattr(fun, "__self__"):
            return cls(fun.__func__, (fun.__self__,), {})
        # A callable module is a node of a tree: its arrays are arguments of the function `type(fun).__call__`.
        if default_registry.flatten_one_level(fun) is not None:
            return cls(type(fun).__call__, (fun,), {})
        return cls(fun, (), {})

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of a call with those that are bound."""
        if not self.args and not self.kwargs:
            return args, kwargs
        return (*self.args, *args), {**self.kwargs, **kwargs}


class Signature:
    """The parameters and annotations of a function. A call of the function is a named tuple of its arguments.

    Such a named tuple is a tree with annotated fields, so the axes of arguments are read like those of a module. A
    signature has no reference to the function itself, so that caches with signatures do not keep functions alive.

    Args:
        fun: a function.
        bound: the number of parameters that are bound by position, and the names of those that are bound by name.

    Raises:
        FunctreeError: the function is written in C, and has no signature that Python can read.

    Attributes:
        name: the name of the function.
        positional: the names of the parameters that are given by position, without those that are bound.
        by_name: the name of the `**kwargs` parameter, or None.
        call: the class of its calls.
        result: the class of its results, with one field.
    """

    def __init__(self, fun: Callable[..., Any], bound: tuple[int, Collection[str]] = (0, ())):
        self.name: str = getattr(fun, "__qualname__", type(fun).__name__).rpartition("<locals>.")[2]
        signature, kinds = inspected(fun), inspect.Parameter
        parameters = list(signature.parameters.values())
        if _passes_on(fun):
            # Such as `jax.vmap(f)`: to pass the defaults of `f` is something else than to leave them to `f`.
            parameters = [p if p.default is _EMPTY else p.replace(default=NOT_GIVEN) for p in parameters]
        self._signature: inspect.Signature = signature.replace(parameters=parameters)
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
        """The names of all parameters, in the order of the signature."""
        return self.call._fields

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call with defaults; `args` begin with bound arguments. Raises TypeError as Python does."""
        # The usual call, by position and without `*args` or `**kwargs`, is bound without `inspect`, which is slow.
        if self._simple and not kwargs:
            missing = self._defaults[len(args) :]
            if len(args) + len(missing) == len(self._defaults) and not any(x is _EMPTY for x in missing):
                return tuple.__new__(self.call, (*args, *missing))
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.call(*bound.arguments.values())

    def each(self, call: Any) -> Iterator[tuple[Path, Any]]:
        """The arguments of a call with their paths; each argument in `*args` and `**kwargs` has its own path."""
        for name, value in zip(self.parameters, call, strict=True):
            if name == self.by_name:
                yield from ((Path((name, key)), value[key]) for key in value)
            elif name == self._many:
                yield from ((Path((name, i)), one) for i, one in enumerate(value))
            else:
                yield Path((name,)), value

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Collection[str]:
        """The parameters that have a value in `args` and `kwargs`, and not their default."""
        return self._signature.bind(*args, **kwargs).arguments.keys()

    def run(self, fun: Callable[..., Any], call: Any, given: Collection[str] | None = None) -> Any:
        """The result of a function with this signature for a call; with `given`, only these parameters are passed."""
        args, kwargs = self.arguments(call, given)
        return fun(*args, **kwargs)

    def arguments(self, call: Any, given: Collection[str] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call as `(args, kwargs)`; with `given`, only the values of these parameters."""
        pairs = [(name, value) for name, value in zip(self.parameters, call, strict=True) if value is not NOT_GIVEN]
        values = OrderedDict((name, value) for name, value in pairs if given is None or name in given)
        bound = inspect.BoundArguments(self._signature, values)
        return bound.args, bound.kwargs

    def by_keyword(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Collection[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as they are if these names, and what comes behind the first of them, are passed by keyword."""
        parameters = [
            p for p in self._signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        either = [p.name if p.kind is p.POSITIONAL_OR_KEYWORD else None for p in parameters[: len(args)]]
        start = next((i for i, name in enumerate(either) if name in names), len(args))
        moved = {name: value for name, value in zip(either[start:], args[start:], strict=False) if name is not None}
        return args[:start], {**moved, **kwargs}


def wrapper_updates(fun: Any) -> tuple[str, ...]:
    """The `updated=` of `functools.update_wrapper`: a wrapper gets the attributes that a user gave to a function.

    The `__dict__` of another callable, such as a module, has its fields, which a wrapper must not get.
    """
    return functools.WRAPPER_UPDATES if isinstance(fun, FunctionType | MethodType) else ()


def inspected(fun: Any) -> inspect.Signature:
    """The signature by which a callable is called. Raises FunctreeError if it is written in C and has none.

    A decorator that passes on all arguments, as `(*args, **kwargs)`, has the signature of the function that it wraps.
    One with parameters of its own has those, although `functools.wraps` refers to the other signature.
    """
    try:
        own = inspect.signature(fun, follow_wrapped=False)
    except (ValueError, TypeError):
        own = None
    try:
        if own is None or [p.kind for p in own.parameters.values()] == _ANY_ARGUMENTS:
            return inspect.signature(fun)
    except (ValueError, TypeError) as error:
        raise FunctreeError(f"{fun!r} has no signature: wrap it in a function, `lambda x: ...`") from error
    return own


_ANY_ARGUMENTS = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def _passes_on(fun: Any) -> bool:
    """Whether a callable is a wrapper that passes on the arguments that it is given, whatever they are."""
    code = getattr(fun, "__code__", None)
    if code is None:  # such as what `jax.jit` returns
        return hasattr(fun, "__wrapped__")
    # By the code, because a wrapper may have a `__signature__` that is not its own.
    any_arguments = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return code.co_argcount + code.co_kwonlyargcount == 0 and code.co_flags & any_arguments == any_arguments


def _record(fun: Any, annotations: Mapping[str, Any]) -> Any:
    """A class of named tuples with annotated fields."""
    # Not `typing.NamedTuple`, which refuses names that begin with an underscore. JAX and functree treat any subclass of
    # tuple with `_fields` as a named tuple.
    members = {
        "__slots__": (),
        "__module__": getattr(fun, "__module__", __name__),
        "__annotations__": {name: hint for name, hint in annotations.items() if hint is not _EMPTY},
        "__new__": lambda cls, *values: tuple.__new__(cls, values),
        "_fields": tuple(annotations),
    }
    return type("Record", (tuple,), members)


def _annotation(fun: Any, parameter: inspect.Parameter) -> Any:
    """The annotation of a parameter's value in a call: a tuple for `*args`, and a dict for `**kwargs`."""
    hint = _resolved(fun, parameter.annotation)
    if hint is _EMPTY:
        return hint
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return tuple[hint, ...]
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return dict[str, hint]
    return hint


def _resolved(fun: Any, annotation: Any) -> Any:
    """A quoted annotation, resolved in the scope of the function. If that fails, it is returned as it is."""
    if not isinstance(annotation, str):
        return annotation
    inner = inspect.unwrap(fun)
    try:
        return eval(annotation, getattr(inner, "__globals__", {}), closed_over(inner))
    except UNREADABLE:
        return annotation
