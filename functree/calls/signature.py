"""A `Signature` turns a call of a function into a tree with the parameters as fields.

The module also wraps the static arguments of a call, and refuses values that cannot be static.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.core import ShapedArray
from jax.tree_util import default_registry, register_static

from functree.argument_checks import FUNCTION, shown
from functree.calls.closures import closed_over
from functree.errors import FunctreeTypeError, FunctreeValueError, Problem, count
from functree.labels.annotations.hints import UNREADABLE
from functree.tree.arrays import Tree, is_array, is_unheld_number, unheld, value_text
from functree.tree.paths import Keys, Path
from functree.tree.skeleton.skeleton import Skeleton
from functree.tree.skeleton.static_value import PLAIN, StaticValue, is_hashable, runs_once

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
    """The value of a parameter without an argument. It is a tree without leaves."""


NOT_GIVEN = NotGiven()


class Partial(NamedTuple):
    """A callable, split into a function and its bound arguments, like `functools.partial`.

    Attributes:
        fun: the function.
        args: the arguments bound by position: the instance of a method, the arguments of a partial,
            or a callable module.
        kwargs: the arguments bound by name.
    """

    fun: AnyFunction
    args: Args
    kwargs: Kwargs

    @classmethod
    def of(cls, fun: Any) -> "Partial":
        """Separate a callable into a function and its bound arguments.

        Raises:
            FunctreeError: if the value is not callable.
        """
        if not FUNCTION.fits(fun):
            raise FunctreeTypeError(f"expected a function, not {shown(fun)}")
        if isinstance(fun, functools.partial):
            inner, args, kwargs = cls.of(fun.func)
            return cls(inner, (*args, *fun.args), {**kwargs, **fun.keywords})
        if hasattr(fun, "__func__") and hasattr(fun, "__self__"):
            return cls(fun.__func__, (fun.__self__,), {})
        # A callable module is a tree node, so its arrays become arguments of `type(fun).__call__`.
        if default_registry.flatten_one_level(fun) is not None:
            return cls(type(fun).__call__, (fun,), {})
        return cls(fun, (), {})

    def with_bound(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return a call's arguments together with the bound arguments."""
        if not self.args and not self.kwargs:
            return args, kwargs
        return (*self.args, *args), {**self.kwargs, **kwargs}


class Record(tuple):
    """A call of a function, or its result, as a named tuple with annotated fields.

    Signatures use subclasses with their own fields. `typing.NamedTuple` is not used, since it
    refuses names that begin with an underscore. JAX and functree treat any tuple subclass with
    `_fields` as a named tuple.
    """

    __slots__ = ()
    # With an annotation, `_fields` would be read as a parameter.
    _fields = tuple[str, ...]()

    def __new__(cls, *values: Tree) -> Self:
        return tuple.__new__(cls, values)


class Signature:
    """The parameters and annotations of a function, and the class of its calls.

    A call is a named tuple of the arguments. It is a tree with annotated fields, so the axes of
    arguments are read like the axes of a module. A signature does not reference the function, so
    caches that hold signatures do not keep functions alive.

    Args:
        fun: a function.
        bound: the number of parameters bound by position, and the names of the parameters bound by
            name.

    Raises:
        FunctreeError: if the function is written in C and Python cannot read its signature.

    Attributes:
        name: the name of the function.
        positional: the names of the positional parameters that are not bound.
        by_name: the name of the `**kwargs` parameter, or None.
        many: the name of the `*args` parameter, or None.
        call: the class of its calls.
    """

    def __init__(self, fun: AnyFunction, bound: tuple[int, Collection[str]] = (0, ())):
        # The name of a method includes its class (`Model.step`). The name of a nested function does
        # not include the outer function.
        self.name: str = getattr(fun, "__qualname__", type(fun).__name__).rpartition("<locals>.")[2]
        self._signature: inspect.Signature = inspected(fun)
        self.positional: tuple[str, ...] = ()
        self.by_name: str | None = None
        self.many: str | None = None
        parameters = list(self._signature.parameters.values())
        number, names = bound
        taken = {*list(self._signature.parameters)[:number], *names}
        omitted: list[Tree] = []
        for parameter in parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                self.by_name = parameter.name
                omitted.append({})
            elif parameter.kind is parameter.VAR_POSITIONAL:
                self.many = parameter.name
                omitted.append(())
            else:
                omitted.append(NOT_GIVEN)
            by_position = parameter.kind in (*_BY_POSITION, parameter.VAR_POSITIONAL)
            if by_position and parameter.name not in taken:
                self.positional += (parameter.name,)
        self._simple: bool = all(p.kind in _BY_POSITION for p in parameters)
        self._omitted: Args = tuple(omitted)  # the call without arguments
        # Forward references in annotations are looked up in the function's module. A function has
        # no module if `exec` defined it in a namespace without `__name__`.
        self._module: str = getattr(fun, "__module__", None) or __name__
        self._returned: object = _resolved(fun, self._signature.return_annotation)
        self.call: type[Record] = _record(
            self._module, {p.name: _annotation(fun, p) for p in parameters}
        )

    @classmethod
    def of(cls, fun: object) -> tuple["Signature", Partial]:
        """Return the signature of a callable, and its function with the bound arguments."""
        partial = Partial.of(fun)
        return cls(partial.fun, (len(partial.args), partial.kwargs)), partial

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters, in the order of the signature."""
        return self.call._fields

    # Made only on demand: only layouts of results need this class, and making it takes as long as
    # reading a signature.
    @cached_property
    def result(self) -> type[Record]:
        """The class of the function's results, with one field."""
        return _record(self._module, {RESULT: self._returned})

    def bind(self, args: Args, kwargs: Kwargs) -> Record:
        """Bind arguments to the parameters.

        Defaults are left to the function, as in `jax.jit`. A wrapper such as `jax.vmap(f)` would
        map over the defaults of `f`, and may supply an argument that `f` requires.

        Args:
            args: the positional arguments, which begin with the bound arguments.
            kwargs: the keyword arguments.

        Raises:
            FunctreeError: if the function has no parameter for an argument.
        """
        # `inspect` is slow, so a call without keyword arguments is bound without it if all
        # parameters are positional.
        if self._simple and not kwargs and len(args) <= len(self._omitted):
            return tuple.__new__(self.call, (*args, *self._omitted[len(args) :]))
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise FunctreeTypeError(f"{self.name}: {error}") from None
        values = dict(zip(self.parameters, self._omitted, strict=True)) | bound.arguments
        return self.call(*values.values())

    def each(self, call: Record) -> Iterator[tuple[Keys, Tree]]:
        """Yield the arguments of a call with the keys of their paths.

        Each argument in `*args` and `**kwargs` has its own path.
        """
        for name, value in zip(self.parameters, call, strict=True):
            if name == self.by_name:
                yield from (((name, key), value[key]) for key in value)
            elif name == self.many:
                yield from (((name, i), argument) for i, argument in enumerate(value))
            else:
                yield (name,), value

    def run(self, fun: AnyFunction, call: Sequence[Tree]) -> Tree:
        """Run a function that has this signature with the values of a call."""
        args, kwargs = self.arguments(call)
        return fun(*args, **kwargs)

    def arguments(self, call: Sequence[Tree]) -> tuple[Args, dict[str, Tree]]:
        """Return a call as `(args, kwargs)`, with as many positional arguments as possible."""
        values = OrderedDict[str, Tree]()
        for name, value in zip(self.parameters, call, strict=True):
            if value is not NOT_GIVEN:
                values[name] = value
        bound = inspect.BoundArguments(self._signature, values)
        return bound.args, bound.kwargs


def wrapper_updates(fun: object) -> tuple[str, ...]:
    """Return the `updated=` argument of `functools.update_wrapper` for a callable.

    A wrapper gets the attributes that a user set on a function. The `__dict__` of any other
    callable, such as a module, holds its fields, which a wrapper must not get.
    """
    if isinstance(fun, FunctionType | MethodType):
        return functools.WRAPPER_UPDATES
    return ()


def inspected(fun: AnyFunction) -> inspect.Signature:
    """Return the signature that a call of a callable must fit.

    A decorator that passes on all arguments, as `(*args, **kwargs)`, has the signature of the
    function that it wraps. A decorator with its own parameters has its own signature, although
    `functools.wraps` points to the wrapped function.

    Raises:
        FunctreeError: if the callable is written in C and has no signature.
    """
    try:
        outer = inspect.signature(fun, follow_wrapped=False)
    except (ValueError, TypeError):
        outer = None
    try:
        if outer is None or [p.kind for p in outer.parameters.values()] == _ANY_ARGUMENTS:
            return inspect.signature(fun)
    except (ValueError, TypeError) as error:
        raise FunctreeValueError(
            f"{fun!r} has no signature: wrap it in a function, `lambda x: ...`"
        ) from error
    return outer


_ANY_ARGUMENTS = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def _record(module: str, annotations: Mapping[str, object]) -> type[Record]:
    """Return a class of records with annotated fields."""
    members = {
        "__slots__": (),
        "__module__": module,
        "__annotations__": {name: x for name, x in annotations.items() if x is not _EMPTY},
        "_fields": tuple(annotations),
    }
    return type("Record", (Record,), members)


def _annotation(fun: AnyFunction, parameter: inspect.Parameter) -> Any:
    """Return the annotation of a parameter's value in a call.

    The value is a tuple for `*args` and a dict for `**kwargs`.
    """
    hint = _resolved(fun, parameter.annotation)
    if hint is _EMPTY:
        return hint
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return tuple[hint, ...]
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return dict[str, hint]
    return hint


def _resolved(fun: AnyFunction, annotation: object) -> Any:
    """Resolve a quoted annotation in the scope of the function; return it unchanged on failure."""
    if not isinstance(annotation, str):
        return annotation
    inner = inspect.unwrap(fun)
    # The scope includes closed-over variables, such as a class that an outer function defines.
    try:
        return eval(annotation, getattr(inner, "__globals__", {}), closed_over(inner))
    except UNREADABLE:
        return annotation


# Static arguments

JAX_VALUE = "is a JAX value, but not an array", "use its arrays instead, such as `ref[...]`"
"""The reason and the remedy for a value that `is_jax_value` recognizes."""


def is_jax_value(value: object) -> bool:
    """Return whether JAX treats a value as data, although it is neither an array nor a pytree.

    Examples are a `jax.Ref`, a value with a type from `jax.experimental.hijax`, and an instance of
    a class with a `__jax_array__` method.
    """
    try:
        return not isinstance(jax.typeof(value), ShapedArray)
    except (TypeError, ValueError):
        # Looked up on the class, as Python does for special methods.
        return hasattr(type(value), "__jax_array__")


class StaticArgument(StaticValue):
    """A static argument as one leaf of a call, compared by type and value.

    Raises:
        TypeError: (when hashed) if the value is not hashable.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        hash(self.value)  # raises an error if the value is not hashable, and so cannot be static
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


def with_static(call: Record, names: frozenset[str]) -> Record:
    """Return a call in which the named arguments are static leaves.

    The name `more.mode` stands for the argument `mode` in `**more`.
    """
    values: list[Tree] = []
    for name, value in zip(call._fields, call, strict=True):
        if name in names and value is not NOT_GIVEN:
            values.append(StaticArgument(value))
        elif type(value) is dict:  # possibly `**more`, in which each argument may be static
            static = {k: StaticArgument(x) for k, x in value.items() if f"{name}.{k}" in names}
            values.append({**value, **static})
        else:
            values.append(value)
    return type(call)(*values)


def opened(call: Sequence[Tree]) -> list[Tree]:
    """Return the values of a call for the user's function, with static leaves unwrapped."""
    values: list[Tree] = []
    for value in call:
        # Possibly `**more`. Static arguments are never nested deeper.
        if type(value) is dict:
            values.append({key: _opened(x) for key, x in value.items()})
        else:
            values.append(_opened(value))
    return values


def _opened(value: Tree) -> Tree:
    if isinstance(value, StaticArgument):
        return value.value
    return value


def check_static(skeleton: Skeleton) -> None:
    """Refuse values of a call that cannot be static.

    Raises:
        FunctreeError: if a value cannot be static; the error lists the paths.
    """
    problems: list[Problem] = []
    for keys, static in skeleton.statics:
        why = _not_static(static)
        if why is not None:
            problems.append(Problem(Path(keys), None, *why))
    # These problems come first, since their remedies differ from the remedy for unhashable leaves.
    if problems:
        raise FunctreeTypeError(f"{count(len(problems), 'leaf')} cannot be static", problems)
    skeleton.check_hashable()


def _not_static(static: object) -> tuple[str, str, str] | None:
    """Describe a value that cannot be static, with the reason and a remedy.

    Return None for all other values.
    """
    if type(static) in PLAIN:
        return None
    # For a static argument, the value that the user passed.
    value = _opened(static)
    kind = type(value).__name__
    why = unheld(static)
    if why is not None and (is_unheld_number(static) or not is_hashable(static)):
        return kind, *why
    if is_jax_value(static):
        return kind, *JAX_VALUE
    if runs_once(value):
        why = "would be exhausted by the trace, and its arrays would be constants of the program"
        return kind, why, "pass a list or an array"
    if isinstance(static, StaticArgument) and not is_hashable(static):
        remedy = "make the argument hashable, or do not declare it static"
        return value_text(value), "is declared static, but is not hashable", remedy
    return None


# Objects that are compared by identity


def check_identity(signature: Signature, call: Record) -> None:
    """Refuse arguments of a call, including bound arguments, that are compared by identity.

    Their arrays would be constants of the program, and later changes to the arguments would go
    unnoticed. A leaf inside a tree may be compared by identity, as in `eqx.filter_jit`.

    Raises:
        FunctreeError: if an argument is compared by identity.
    """
    problems: list[Problem] = []
    for keys, value in signature.each(call):
        cls = _by_identity(value)
        if cls is not None:
            problems.append(Problem(Path(keys), None, cls, _BY_IDENTITY, _remedy(cls)))
    if problems:
        arguments = count(len(problems), "argument")
        raise FunctreeTypeError(
            f"{signature.name}: {arguments} would be static and compared by identity", problems
        )


def check_wrapped(door: str, fun: object) -> None:
    """Refuse a function that contains an object compared by identity.

    The function may be the object itself, or a wrapper of the object or of its bound method, such
    as a result of `jax.vmap`.

    Raises:
        FunctreeError: if the function contains an object compared by identity.
    """
    inner: Any = fun
    while inner is not None:
        cls = _by_identity(Partial.of(inner).fun)
        if cls is not None:
            problem = Problem(None, None, cls, _BY_IDENTITY, _remedy(cls))
            raise FunctreeTypeError(
                f"{door}: the function would be static and compared by identity", [problem]
            )
        inner = getattr(inner, "__wrapped__", None)
        # The instance of a bound method in a wrapper is not an argument of the wrapper.
        if isinstance(inner, MethodType) and _by_identity(inner) is not None:
            inner = inner.__self__


_BY_IDENTITY = (
    "does not define `__eq__`, so its arrays would be constants of the program, and later changes "
    "to it would go unnoticed"
)


def _remedy(cls: str) -> str:
    return (
        f"make {cls} an `eqx.Module`, or close over the object in a lambda, "
        "`lambda x: obj.method(x)`. `ft.jit` also accepts the object as an argument named "
        "in `static_argnames=`"
    )


def _by_identity(value: Any) -> str | None:
    """Return the class name of an object that is compared by identity, or None for other values."""
    # A bound method is compared by its instance.
    if isinstance(value, MethodType):
        return _by_identity(value.__self__)
    cls = type(value)
    if cls.__eq__ is not object.__eq__ or isinstance(value, _EXEMPT):
        return None
    # Functions of any kind, and JAX objects.
    if cls.__module__.partition(".")[0] in _LIBRARIES or hasattr(value, "__wrapped__"):
        return None
    if is_array(value) or default_registry.flatten_one_level(value) is not None:
        return None
    return cls.__name__


_EXEMPT = type | Enum | partial | np.ufunc
_LIBRARIES = ("builtins", "functools", "jax", "jaxlib")
