"""A function ─► its `Signature`: a class for its calls, trees with the parameters as fields."""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

from jax.tree_util import default_registry, register_static

from functree.argument_checks import FUNCTION, shown
from functree.calls.closures import closed_over
from functree.errors import FunctreeTypeError, FunctreeValueError
from functree.labels.annotations.hints import UNREADABLE
from functree.tree.arrays import Tree
from functree.tree.paths import Path

RESULT = "result"  # the name of a function's result in paths
_EMPTY = inspect.Parameter.empty
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

AnyFunction = Callable[..., Tree]
"""A function of trees, with any signature."""

Args = tuple[Tree, ...]
"""The arguments of a call that are passed by position."""

Kwargs = Mapping[str, Tree]
"""The arguments of a call that are passed by keyword."""


@register_static
class NotGiven:
    """The value of a parameter that a call does not give; a tree without leaves."""


NOT_GIVEN = NotGiven()


class Partial(NamedTuple):
    """A callable as a function and the arguments that are bound to it, as `functools.partial` is.

    Attributes:
        fun: the function.
        args: arguments bound by position: the instance of a method, the arguments of a partial, a
            callable module.
        kwargs: arguments bound by name.
    """

    fun: AnyFunction
    args: Args
    kwargs: Kwargs

    @classmethod
    def of(cls, fun: Any) -> "Partial":
        """The function of a callable and its bound arguments. Raises FunctreeError if it cannot be
        called."""
        if not FUNCTION.fits(fun):
            raise FunctreeTypeError(f"a function was expected, not {shown(fun)}")
        if isinstance(fun, functools.partial):
            inner, args, kwargs = cls.of(fun.func)
            return cls(inner, (*args, *fun.args), {**kwargs, **fun.keywords})
        if hasattr(fun, "__func__") and hasattr(fun, "__self__"):
            return cls(fun.__func__, (fun.__self__,), {})
        # A callable module is a node of a tree: its arrays are arguments of the function
        # `type(fun).__call__`.
        if default_registry.flatten_one_level(fun) is not None:
            return cls(type(fun).__call__, (fun,), {})
        return cls(fun, (), {})

    def with_bound(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The arguments of a call with those that are bound."""
        if not self.args and not self.kwargs:
            return args, kwargs
        return (*self.args, *args), {**self.kwargs, **kwargs}


class Record(tuple):
    """A call of a function, or its result: a named tuple, which is a tree with annotated fields.

    Each signature has classes of its own for them. They are not made by `typing.NamedTuple`, which
    refuses names that begin with an underscore. JAX and functree treat any subclass of tuple with
    `_fields` as a named tuple.
    """

    __slots__ = ()
    # Without an annotation, which would be read as that of a parameter.
    _fields = tuple[str, ...]()

    def __new__(cls, *values: Tree) -> Self:
        return tuple.__new__(cls, values)


class Signature:
    """The parameters and annotations of a function. A call of the function is a named tuple of its
    arguments.

    Such a named tuple is a tree with annotated fields, so the axes of arguments are read like those
    of a module. A signature has no reference to the function itself, so that caches with signatures
    do not keep functions alive.

    Args:
        fun: a function.
        bound: the number of parameters that are bound by position, and the names of those that are
            bound by name.

    Raises:
        FunctreeError: the function is written in C, and has no signature that Python can read.

    Attributes:
        name: the name of the function.
        positional: the names of the parameters that are given by position, without those that are
            bound.
        by_name: the name of the `**kwargs` parameter, or None.
        many: the name of the `*args` parameter, or None.
        call: the class of its calls.
    """

    def __init__(self, fun: AnyFunction, bound: tuple[int, Collection[str]] = (0, ())):
        # `Model.step`, and of a function in a function its own name only.
        self.name: str = getattr(fun, "__qualname__", type(fun).__name__).rpartition("<locals>.")[2]
        signature = inspected(fun)
        if _passes_on(fun):
            signature = _with_defaults_left(signature)
        self._signature: inspect.Signature = signature
        self.positional: tuple[str, ...] = ()
        self.by_name: str | None = None
        self.many: str | None = None
        parameters = list(signature.parameters.values())
        number, names = bound
        taken = {*list(signature.parameters)[:number], *names}
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                self.by_name = parameter.name
            if parameter.kind is parameter.VAR_POSITIONAL:
                self.many = parameter.name
            by_position = parameter.kind in (*_BY_POSITION, parameter.VAR_POSITIONAL)
            if by_position and parameter.name not in taken:
                self.positional += (parameter.name,)
        self._simple: bool = all(p.kind in _BY_POSITION for p in parameters)
        self._defaults: Args = tuple(p.default for p in parameters)
        # Forward references in the annotations are looked up in this module.
        # Code that runs without a `__name__`, such as by `exec`, has functions of no module.
        self._module: str = getattr(fun, "__module__", None) or __name__
        self._returned: object = _resolved(fun, signature.return_annotation)
        self.call: type[Record] = _record(
            self._module, {p.name: _annotation(fun, p) for p in parameters}
        )

    @classmethod
    def of(cls, fun: object) -> tuple["Signature", Partial]:
        """The signature of a callable, and what is bound to it."""
        partial = Partial.of(fun)
        return cls(partial.fun, (len(partial.args), partial.kwargs)), partial

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters, in the order of the signature."""
        return self.call._fields

    # Only for layouts of the result, and a new class takes as long as a signature.
    @cached_property
    def result(self) -> type[Record]:
        """The class of its results, with one field."""
        return _record(self._module, {RESULT: self._returned})

    def bind(self, args: Args, kwargs: Kwargs) -> Record:
        """A call with defaults; `args` begin with bound arguments. Raises FunctreeError for a call
        that does not fit."""
        # The usual call, by position and without `*args` or `**kwargs`, is bound without `inspect`,
        # which is slow.
        if self._simple and not kwargs:
            missing = self._defaults[len(args) :]
            if len(args) + len(missing) == len(self._defaults) and not any(
                x is _EMPTY for x in missing
            ):
                return tuple.__new__(self.call, (*args, *missing))
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise FunctreeTypeError(f"{self.name}: {error}") from None
        # They are a part of the call, so that a call with a default is that in which it is given.
        bound.apply_defaults()
        return self.call(*bound.arguments.values())

    def each(self, call: Record) -> Iterator[tuple[Path, Tree]]:
        """The arguments of a call with their paths; each argument in `*args` and `**kwargs` has its
        own path."""
        for name, value in zip(self.parameters, call, strict=True):
            if name == self.by_name:
                yield from ((Path((name, key)), value[key]) for key in value)
            elif name == self.many:
                yield from ((Path((name, i)), one) for i, one in enumerate(value))
            else:
                yield Path((name,)), value

    def given(self, args: Args, kwargs: Kwargs) -> Collection[str]:
        """The parameters that have a value in `args` and `kwargs`, and not their default."""
        return self._signature.bind(*args, **kwargs).arguments.keys()

    def run(
        self, fun: AnyFunction, call: Sequence[Tree], given: Collection[str] | None = None
    ) -> Tree:
        """The result of a function with this signature for a call; with `given`, only these
        parameters are passed."""
        args, kwargs = self.arguments(call, given)
        return fun(*args, **kwargs)

    def arguments(
        self, call: Sequence[Tree], given: Collection[str] | None = None
    ) -> tuple[Args, dict[str, Tree]]:
        """A call as `(args, kwargs)`; with `given`, only the values of these parameters."""
        if self._simple and given is None and not any(value is NOT_GIVEN for value in call):
            return tuple(call), {}
        values = OrderedDict[str, Tree]()
        for name, value in zip(self.parameters, call, strict=True):
            if value is not NOT_GIVEN and (given is None or name in given):
                values[name] = value
        bound = inspect.BoundArguments(self._signature, values)
        return bound.args, bound.kwargs

    def by_keyword(
        self, args: Args, kwargs: Kwargs, names: Collection[str]
    ) -> tuple[Args, dict[str, Tree]]:
        """Arguments as they are if these names, and what comes behind the first of them, are passed
        by keyword."""
        parameters = list(self._signature.parameters.values())
        start = len(args)
        for i, parameter in enumerate(parameters[: len(args)]):
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name in names:
                start = i
                break
        # Positional-only parameters come before all others, so all that follow have names.
        moved = {p.name: value for p, value in zip(parameters[start:], args[start:], strict=False)}
        return args[:start], {**moved, **kwargs}


def _with_defaults_left(signature: inspect.Signature) -> inspect.Signature:
    """The signature of a wrapper such as `jax.vmap(f)`, which leaves defaults to `f`.

    To pass the defaults of `f` is something else: `jax.vmap` would map over them. Nor is an
    argument required that a call leaves out: the wrapper may supply it.
    """
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            parameter = parameter.replace(default=NOT_GIVEN)
        parameters.append(parameter)
    return signature.replace(parameters=parameters)


def wrapper_updates(fun: object) -> tuple[str, ...]:
    """The `updated=` of `functools.update_wrapper`: a wrapper gets the attributes that a user gave
    to a function.

    The `__dict__` of another callable, such as a module, has its fields, which a wrapper must not
    get.
    """
    if isinstance(fun, FunctionType | MethodType):
        return functools.WRAPPER_UPDATES
    return ()


def inspected(fun: AnyFunction) -> inspect.Signature:
    """The signature by which a callable is called. Raises FunctreeError if it is written in C and
    has none.

    A decorator that passes on all arguments, as `(*args, **kwargs)`, has the signature of the
    function that it wraps. One with parameters of its own has those, although `functools.wraps`
    refers to the other signature.
    """
    try:
        own = inspect.signature(fun, follow_wrapped=False)
    except (ValueError, TypeError):
        own = None
    try:
        if own is None or [p.kind for p in own.parameters.values()] == _ANY_ARGUMENTS:
            return inspect.signature(fun)
    except (ValueError, TypeError) as error:
        raise FunctreeValueError(
            f"{fun!r} has no signature: wrap it in a function, `lambda x: ...`"
        ) from error
    return own


_ANY_ARGUMENTS = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def _passes_on(fun: AnyFunction) -> bool:
    """Whether a callable is a wrapper that passes on the arguments that it is given, whatever they
    are."""
    code = getattr(fun, "__code__", None)
    if code is None:  # such as what `jax.jit` returns
        return hasattr(fun, "__wrapped__")
    # By the code, because a wrapper may have a `__signature__` that is not its own.
    any_arguments = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return (
        code.co_argcount + code.co_kwonlyargcount == 0
        and code.co_flags & any_arguments == any_arguments
    )


def _record(module: str, annotations: Mapping[str, object]) -> type[Record]:
    """A class of records with annotated fields. Without annotations, it is one for all functions of
    a module with these parameters."""
    hints = {name: hint for name, hint in annotations.items() if hint is not _EMPTY}
    fields = tuple(annotations)
    # Such as a function that is made in each step of a loop. What Python and JAX have to find out
    # about a class, when they first see it, takes longer than to make it.
    record = None if hints else _RECORDS.get((module, fields))
    if record is None:
        members = {
            "__slots__": (),
            "__module__": module,
            "__annotations__": hints,
            "_fields": fields,
        }
        record = type("Record", (Record,), members)
        if not hints:
            _RECORDS[module, fields] = record
    return record


_RECORDS: WeakValueDictionary[tuple[str, tuple[str, ...]], type[Record]] = WeakValueDictionary()


def _annotation(fun: AnyFunction, parameter: inspect.Parameter) -> Any:
    """The annotation of a parameter's value in a call: a tuple for `*args`, and a dict for
    `**kwargs`."""
    hint = _resolved(fun, parameter.annotation)
    if hint is _EMPTY:
        return hint
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return tuple[hint, ...]
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return dict[str, hint]
    return hint


def _resolved(fun: AnyFunction, annotation: object) -> Any:
    """A quoted annotation, resolved in the scope of the function. If that fails, it is returned as
    it is."""
    if not isinstance(annotation, str):
        return annotation
    inner = inspect.unwrap(fun)
    # The variables that it closes over too, such as a class that a test defines.
    try:
        return eval(annotation, getattr(inner, "__globals__", {}), closed_over(inner))
    except UNREADABLE:
        return annotation
