"""One annotation of a class ─► a `Hint`: the axis names that it allows, for an array there and for what lies below."""

import collections.abc as abc
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import jax
import jaxtyping
import numpy as np
from jax.sharding import PartitionSpec

from functree.errors import AxesError
from functree.tree.axes import BUFFER, Axes, Names


class Dim(NamedTuple):
    """One token of a jaxtyping dimension string."""

    name: str | None
    token: str
    variadic: bool = False
    broadcast: bool = False  # `#b`: may be 1, and is never sharded then


class Form(NamedTuple):
    """One way in which an array may stand there: its dimensions, its dtypes, and a physical spec if one is written."""

    dims: tuple[Dim, ...]
    dtype: Any = None  # jaxtyping's class (`Float`), None for any
    spec: PartitionSpec | None = None
    plain: Axes | None = None  # the axes, where they do not depend on the array

    def fits(self, ndim: int) -> bool:
        return ndim == len(self.dims) or (ndim >= len(self.dims) - 1 and any(dim.variadic for dim in self.dims))

    def dims_for(self, ndim: int) -> list[Dim]:
        """One `Dim` for each dimension. A variadic one keeps its name when it spans exactly one."""
        out: list[Dim] = []
        for dim in self.dims:
            span = ndim - len(self.dims) + 1 if dim.variadic else 1
            out += [dim if span == 1 else dim._replace(name=None)] * span
        return out


class Later(NamedTuple):
    """A name in quotes, resolved when a leaf needs it."""

    text: str
    scope: "Scope"
    optional: bool  # the other half of a recursive alias of arrays, as optax's: nothing is lost where it stays unknown

    def resolve(self) -> "Hint":
        try:
            return parse(self.scope.find(self.text), self.scope, self.optional)
        except NameError:
            if self.optional:
                return NOTHING
            raise


@dataclass(frozen=True, eq=False)
class Scope:
    """Where the names of an annotation are looked up: the module and the class that wrote it."""

    module: str
    names: Mapping[str, Any] = field(default_factory=dict)

    def find(self, text: str) -> Any:
        known = sys.modules.get(self.module)
        return eval(text, dict(vars(known)) if known else {}, dict(self.names))


@dataclass(frozen=True, eq=False)
class Hint:
    """All that an annotation says. A union says what each of its alternatives says."""

    text: str = ""
    forms: tuple[Form, ...] = ()
    element: "Hint | None" = None  # list[X], tuple[X, ...], dict[str, X]
    elements: "tuple[Hint, ...]" = ()  # tuple[X, Y]
    below: "Hint | None" = None  # PyTree[X]: at any depth
    generics: "tuple[tuple[type, tuple[Hint, ...]], ...]" = ()  # Box[X]
    variables: tuple[TypeVar, ...] = ()
    names: Names | None = None
    buffer: bool = False
    later: tuple[Later, ...] = ()
    open: bool = False  # has type variables somewhere

    def child(self, index: int | None) -> "Hint":
        """What it says of a container's element; `index` is None in a mapping."""
        if self is NOTHING:
            return NOTHING
        if self.later:
            return self.resolved().child(index)
        if self.elements and index is not None and index < len(self.elements):
            found = self.elements[index]
        else:
            found = self.element or self.below or NOTHING
        found = found if self.below is None or found is self.below else merge((found, self.below))
        if self.below is not None and found.below is None:
            found = replace(found, below=self.below)
        return replace(found, buffer=True) if self.buffer and not found.buffer else found

    def arguments(self, cls: type) -> "tuple[Hint, ...]":
        """The parameters it gives to a generic class."""
        if self.later:
            return self.resolved().arguments(cls)
        return next((args for origin, args in self.generics if origin is cls), ())

    def bind(self, env: "Mapping[TypeVar, Hint]") -> "Hint":
        """The hint with type variables replaced."""
        if not self.open:
            return self
        bound = replace(
            self,
            variables=tuple(v for v in self.variables if v not in env),
            element=self.element and self.element.bind(env),
            elements=tuple(h.bind(env) for h in self.elements),
            below=self.below and self.below.bind(env),
            generics=tuple((c, tuple(h.bind(env) for h in args)) for c, args in self.generics),
        )
        found = [env[v] for v in self.variables if v in env]
        return merge((*found, bound)) if found else bound

    def resolved(self) -> "Hint":
        """The hint with its quoted names looked up. Raises NameError and the like, as Python does."""
        return merge((replace(self, later=()), *(later.resolve() for later in self.later)))


NOTHING = Hint()


def merge(hints: "typing.Iterable[Hint]") -> Hint:
    """The union of what several hints say."""
    hints = tuple(dict.fromkeys(h for h in hints if h is not NOTHING))
    if len(hints) <= 1:
        return hints[0] if hints else NOTHING

    def one(parts: list[Hint]) -> Hint | None:
        return merge(parts) if parts else None

    longest = max(len(h.elements) for h in hints)
    return Hint(
        text=" | ".join(dict.fromkeys(h.text for h in hints if h.text)),
        forms=tuple(dict.fromkeys(form for h in hints for form in h.forms)),
        element=one([h.element for h in hints if h.element]),
        elements=tuple(merge(h.elements[i] for h in hints if i < len(h.elements)) for i in range(longest)),
        below=one([h.below for h in hints if h.below]),
        generics=tuple(pair for h in hints for pair in h.generics),
        variables=tuple(v for h in hints for v in h.variables),
        names=next((h.names for h in hints if h.names), None),
        buffer=any(h.buffer for h in hints),
        later=tuple(later for h in hints for later in h.later),
        open=any(h.open for h in hints),
    )


# Reading a hint


def parse(hint: Any, scope: Scope, optional: bool = False) -> Hint:
    """A type expression ─► what it says of axes. One that says nothing is `NOTHING`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, str | typing.ForwardRef):
        text = hint if isinstance(hint, str) else hint.__forward_arg__
        return Hint(text=text, later=(Later(text, scope, optional),))
    if isinstance(hint, TypeVar):
        return Hint(text=hint.__name__, variables=(hint,), open=True)
    if origin is typing.Annotated:
        return _annotated(parse(args[0], scope, optional), hint.__metadata__)
    if origin in (typing.Union, types.UnionType):
        optional = optional or any(arg in (jax.Array, np.ndarray, Any) for arg in args)
        return merge(parse(arg, scope, optional) for arg in args)
    if origin in (typing.Final, typing.Required, typing.NotRequired):
        return parse(args[0], scope, optional)
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return Hint(text=array_text(hint), forms=(form(hint.dim_str, hint.dtype),))
    if isinstance(hint, type) and issubclass(hint, jaxtyping.PyTree):
        leaf = parse(getattr(hint, "leaftype", Any), scope, optional)
        return replace(leaf, below=leaf) if leaf is not NOTHING else NOTHING
    return _alias(hint, origin, args, scope, optional)


def _alias(hint: Any, origin: Any, args: tuple[Any, ...], scope: Scope, optional: bool) -> Hint:
    """Type aliases, new types, containers and generic classes."""
    aliased = getattr(origin or hint, "__value__", None)  # `type X = ...`
    if aliased is not None:
        params = getattr(origin or hint, "__type_params__", ())
        env = dict(zip(params, (parse(arg, scope, optional) for arg in args), strict=False))
        return parse(aliased, scope, optional).bind(env)
    if isinstance(hint, typing.NewType):
        return parse(hint.__supertype__, scope, optional)
    if not isinstance(origin, type) or origin in (type, abc.Callable):
        return NOTHING
    inner = [NOTHING if arg is ... else parse(arg, scope, optional) for arg in args]
    opened = any(h.open for h in inner)
    if all(h is NOTHING for h in inner):
        return NOTHING
    if issubclass(origin, tuple) and not (len(args) == 2 and args[1] is ...):
        return Hint(text=str(hint), elements=tuple(inner), open=opened)
    if issubclass(origin, abc.Mapping):
        return Hint(text=str(hint), element=inner[-1], open=opened)
    if issubclass(origin, abc.Iterable) and origin.__module__ in ("builtins", "collections", "collections.abc"):
        return Hint(text=str(hint), element=inner[0], open=opened)
    return Hint(text=str(hint), generics=((origin, tuple(inner)),), open=opened)


def _annotated(hint: Hint, marks: tuple[Any, ...]) -> Hint:
    for mark in marks:
        if isinstance(mark, Axes):
            dims = tuple(Dim(name, name or "_") for name in mark)
            hint = replace(hint, text=f'"{mark}"', forms=(Form(dims, plain=mark),))
        elif isinstance(mark, Names):
            hint = replace(hint, names=mark)
        elif mark is BUFFER:
            hint = replace(hint, buffer=True)
        elif isinstance(mark, PartitionSpec):
            forms = hint.forms or (form("..."),)
            hint = replace(hint, forms=tuple(f._replace(spec=mark) for f in forms))
    return hint


@lru_cache(maxsize=4096)
def form(dim_str: str, dtype: Any = None) -> Form:
    """A jaxtyping dimension string ─► its `Form`."""
    dims = tuple(dim(token) for token in dim_str.split())
    fixed = not any(d.variadic or d.broadcast for d in dims)
    return Form(dims, dtype, plain=Axes(*(d.name for d in dims)) if fixed else None)


def dim(token: str) -> Dim:
    """One token of a dimension string: modifiers, then a name, a size or an expression."""
    if token == "...":
        return Dim(None, token, variadic=True)
    name, equals, _ = token.partition("=")
    rest = name if equals and name.isidentifier() else token
    modifiers = ""
    while rest and rest[0] in "#*_?":
        modifiers, rest = modifiers + rest[0], rest[1:]
    if any(mark in rest for mark in "@:") and "{" not in rest:
        raise AxesError(
            f"`{token}` in a dimension string is no axis name: an annotation names axes, and rules say where they go"
        )
    return Dim(rest if rest.isidentifier() else None, token, "*" in modifiers, "#" in modifiers)


def array_text(hint: Any) -> str:
    """A jaxtyping hint as one writes it."""
    array = getattr(hint.array_type, "__name__", str(hint.array_type)).rpartition(".")[2]
    return f'{hint.dtype.__name__}[{array}, "{hint.dim_str}"]'


@lru_cache(maxsize=4096)
def dtype_fits(hint_dtype: Any, dtype: Any) -> bool:
    """Whether jaxtyping's `Float`, `Int`, ... takes an array of this dtype."""
    return hint_dtype is None or isinstance(jax.ShapeDtypeStruct((), dtype), hint_dtype[Any, "..."])


# Reading a class

_CLASSES: WeakKeyDictionary[type, Mapping[str, Hint]] = WeakKeyDictionary()


def class_hints(cls: type) -> Mapping[str, Hint]:
    """What a class's annotations say of each field, inherited ones in terms of the class's own type parameters.

    Read once for each class. One with a name that cannot be resolved yet is read again next time.
    """
    hints = _CLASSES.get(cls)
    if hints is None:
        hints = _read_class(cls)
        if not any(hint.later for hint in hints.values()):
            _CLASSES[cls] = hints
    return hints


def _read_class(cls: type) -> dict[str, Hint]:
    bindings = _bindings(cls)
    hints: dict[str, Hint] = {}
    for base in reversed(cls.__mro__):
        if base is object:
            continue
        scope = _scope(base)
        for name, annotation in inspect.get_annotations(base).items():
            hint = _written(annotation, scope)
            hints[name] = hint.bind(bindings.get(base, {}))
    return hints


def _scope(cls: type) -> Scope:
    parameters = {p.__name__: p for p in getattr(cls, "__type_params__", ())}
    return Scope(cls.__module__, {**vars(cls), **parameters, cls.__name__: cls})


def _written(annotation: Any, scope: Scope) -> Hint:
    """A field's annotation, looked up at once when it stands in quotes; left for later when that fails."""
    hint = parse(annotation, scope)
    if not isinstance(annotation, str):
        return hint
    try:
        return replace(hint.resolved(), text=annotation)
    except (NameError, AttributeError, SyntaxError, TypeError):
        return hint


def _bindings(cls: type) -> dict[type, dict[TypeVar, Hint]]:
    """For each generic base, what its type parameters are in this class (`class B(A[Float[Array, "p q"]])`)."""
    found: dict[type, dict[TypeVar, Hint]] = {}

    def visit(current: type, env: dict[TypeVar, Hint]) -> None:
        for base in getattr(current, "__orig_bases__", ()):
            origin = typing.get_origin(base)
            if not isinstance(origin, type) or origin is typing.Generic:
                continue
            scope = _scope(current)
            args = [parse(arg, scope).bind(env) for arg in typing.get_args(base)]
            inner = dict(zip(getattr(origin, "__parameters__", ()), args, strict=False))
            found.setdefault(origin, {}).update(inner)
            visit(origin, inner)

    visit(cls, {})
    return found
