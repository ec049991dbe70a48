"""A class ─► the `Hint` of each of its fields: the axes that its annotation allows for an array
there, and for arrays below the field."""

import collections.abc as abc
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, filterfalse, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import jax
import jaxtyping
import numpy as np
from jax.sharding import PartitionSpec

from functree.errors import FunctreeError
from functree.tree.axes import BUFFER, Axes, Names, OpenAxes
from functree.tree.paths import Path


class Dim(NamedTuple):
    """One token of a jaxtyping dimension string.

    Attributes:
        name: the name of the axis, or None.
        token: the token as it is written.
        modifiers: those that the token has: `#` (broadcast), `*` (variadic), `_` (anonymous), `?`
            (may differ by leaf).
        body: the rest of the token: a name, a size, or an expression; for `rows=4` the size.
    """

    name: str | None
    token: str
    modifiers: str = ""
    body: str = ""

    @property
    def variadic(self) -> bool:
        """Whether it is for any number of dimensions: `*b`, `...`."""
        return "*" in self.modifiers or self.body == "..."

    @property
    def broadcast(self) -> bool:
        """Whether the size may be 1; then the dimension is never sharded: `#b`."""
        return "#" in self.modifiers

    @property
    def anonymous(self) -> bool:
        """Whether the size is not compared with that of other dimensions: `_b`, `_`, `...`."""
        return "_" in self.modifiers or self.body in ("", "...")

    @property
    def by_leaf(self) -> bool:
        """Whether it may have another size in each leaf of a tree: `?b`."""
        return "?" in self.modifiers


class ArrayForm(NamedTuple):
    """One alternative of an array's annotation: its dimensions, its dtypes, and its `PartitionSpec`
    if it has one."""

    dims: tuple[Dim, ...]
    dtype: Any = None  # jaxtyping's class (`Float`), None for any dtype
    spec: PartitionSpec | None = None
    plain: Axes | None = None  # the axes, if they are the same for every array that fits
    wrong: str = ""  # why the dimension string cannot be read

    def fits(self, ndim: int) -> bool:
        """Whether an array of this rank fits."""
        if ndim == len(self.dims):
            return True
        # A variadic token is for any number of dimensions, zero included.
        return ndim >= len(self.dims) - 1 and any(dim.variadic for dim in self.dims)

    def dims_for(self, ndim: int) -> list[Dim]:
        """One `Dim` for each dimension. A variadic token keeps its name if it is for exactly one
        dimension."""
        # A name for several dimensions would be one axis several times, which no rule could shard.
        span = ndim - len(self.dims) + 1
        out: list[Dim] = []
        for dim in self.dims:
            if not dim.variadic or span == 1:
                out.append(dim)
            else:
                out += [dim._replace(name=None)] * span
        return out


@lru_cache(maxsize=4096)
def array_form(dim_str: str, dtype: Any = None) -> ArrayForm:
    """A jaxtyping dimension string ─► its `ArrayForm`."""
    tokens = dim_str.split()
    dims = tuple(map(dim, tokens))
    plain, wrong = None, ""
    if not any(d.variadic or d.broadcast for d in dims):
        plain = Axes(*(d.name for d in dims))
    for token in tokens:
        # `embed:data` or `embed@data` would give mesh axes to an axis, as some libraries do.
        # jaxtyping reads it as an expression, so it must not pass without a name. `{...}` is an
        # expression, and may have these characters.
        if ("@" in token or ":" in token) and "{" not in token:
            wrong = f"`{token}` in a dimension string is not an axis name"
            break
    return ArrayForm(dims, dtype, plain=plain, wrong=wrong)


@lru_cache(maxsize=4096)
def form_of_axes(axes: Axes | OpenAxes) -> ArrayForm:
    """The `ArrayForm` of an array whose axes are given as `Axes`."""
    if isinstance(axes, OpenAxes):
        before, after = form_of_axes(axes.before).dims, form_of_axes(axes.after).dims
        return ArrayForm((*before, dim("..."), *after))
    # Names are not parsed: an axis may be called `_pad`, which as a token would be anonymous.
    return ArrayForm(tuple(Dim(name, name or "_", body=name or "") for name in axes), plain=axes)


def dim(token: str) -> Dim:
    """Parse one token of a dimension string: modifiers, then a name, a size or an expression."""
    modifiers, body = _modifiers(token)
    name = body
    # `rows=4` is a size with a name. Two signs (`a==b`) are an expression to jaxtyping, which gives
    # no name.
    if body.count("=") == 1:
        name, _, size = body.partition("=")
        more, body = _modifiers(size)  # the modifiers may stand on either side
        modifiers += more
    if not name.isidentifier():
        return Dim(None, token, modifiers, body)
    return Dim(name, token, modifiers, body)


def _modifiers(token: str) -> tuple[str, str]:
    """A token as its modifiers and the rest."""
    rest = token.lstrip("#*_?")
    return token[: len(token) - len(rest)], rest


def hint_text(hint: Any) -> str:
    """The source text of a jaxtyping annotation."""
    array = getattr(hint.array_type, "__name__", str(hint.array_type)).rpartition(".")[2]
    return f'{hint.dtype.__name__}[{array}, "{hint.dim_str}"]'


@lru_cache(maxsize=4096)
def dtype_fits(hint_dtype: Any, dtype: Any) -> bool:
    """Whether jaxtyping's `Float`, `Int`, ... accepts an array of this dtype."""
    # jaxtyping itself decides, by `isinstance` with an abstract array.
    return hint_dtype is None or isinstance(jax.ShapeDtypeStruct((), dtype), hint_dtype[Any, "..."])


Env = Mapping[TypeVar, "Hint"]  # the values of type variables
NO_ENV: Env = types.MappingProxyType({})


# An annotation in quotes is an expression that may raise anything. These errors make it an
# annotation that cannot be resolved, which is reported with the path of its leaf; others are not
# caught, since they are not about the annotation.
UNREADABLE = (
    *(NameError, AttributeError, LookupError, SyntaxError, TypeError, ValueError),
    *(ArithmeticError, ImportError, RecursionError, FunctreeError),
)


@dataclass(frozen=True, eq=False)
class Namespace:
    """Where the names of an annotation are looked up: the module and the class in which it is
    written."""

    module: str
    names: Mapping[str, Any] = field(default_factory=dict)

    def find(self, text: str) -> Any:
        """The value of an expression. Raises what the expression raises."""
        # The module is looked up now and not when the class is read: a name may be defined below
        # the class. It is copied, since `eval` adds `__builtins__` to its globals.
        module = sys.modules.get(self.module)
        known = dict(vars(module)) if module else {}
        return eval(text, known, dict(self.names))


class Reference(NamedTuple):
    """A part of an annotation that is resolved when a leaf needs it: a quoted name, a type
    variable, a type alias.

    Attributes:
        what: the text, the `TypeVar`, or the alias (`type X = ...`) with its arguments.
        namespace: where a text is looked up.
        optional: whether it may stay unknown, because the union that it is in also allows any
            array. The recursive alias `ArrayTree = Array | Iterable["ArrayTree"] | ...` of optax is
            one, and cannot be resolved from another module.
        env: the values of type variables.
        marks: the marks of an `Annotated` around it.
    """

    what: Any
    namespace: Namespace
    optional: bool
    env: Env = NO_ENV
    marks: tuple[Any, ...] = ()

    def resolve(self, strict: bool = True) -> "Hint":
        """The hint that it is replaced by. Raises NameError and others, as Python does."""
        try:
            return annotated(self._found().bind(self.env), self.marks)
        except NameError:
            if strict or not self.optional:
                raise
            return NOTHING

    def _found(self) -> "Hint":
        if isinstance(self.what, TypeVar):
            if self.what in self.env:
                return self.env[self.what]
            # A variable without a value may be anything that its constraints or its bound allow.
            bounds = self.what.__constraints__ or (self.what.__bound__,)
            return merge(parse(bound, self.namespace) for bound in bounds)
        if isinstance(self.what, str):
            return parse(self.namespace.find(self.what), self.namespace, self.optional)
        # An alias is resolved in its own module, which need not be that of the class; its arguments
        # are in the class'.
        alias = typing.get_origin(self.what) or self.what
        args = [parse(arg, self.namespace) for arg in typing.get_args(self.what)]
        env = dict(zip(alias.__type_params__, args, strict=False))
        return parse(alias.__value__, Namespace(alias.__module__), self.optional).bind(env)

    @property
    def is_variable(self) -> bool:
        """Whether it is a type variable, and not a name or an alias."""
        return isinstance(self.what, TypeVar)

    def bind(self, env: Env) -> "Reference":
        """The same with values for type variables. Values that it has already may contain these
        variables."""
        own = {variable: hint.bind(env) for variable, hint in self.env.items()}
        return self._replace(env={**env, **own})


# Quoted names that lead to quoted names are resolved this often. More steps are a name that is
# defined by itself.
_MAX_STEPS = 32


@dataclass(frozen=True, eq=False)
class Hint:
    """All that an annotation says about arrays. The hint of a union has the parts of all its
    alternatives.

    Hints are compared by identity, which is fast: they are keys in the walk over a tree.

    Attributes:
        text: the annotation, for messages.
        forms: the alternatives for an array in the field itself.
        element: the hint of each element of a container: X in `list[X]`, `tuple[X, ...]`,
            `dict[str, X]`.
        elements: the hints of the elements of a `tuple[X, Y]`.
        below: the hint of an array at any depth: X in `PyTree[X]`.
        generics: the generic classes with their arguments: `Box[X]`.
        names: the `ft.names` in its `Annotated`.
        buffer: whether it is an `ft.Buffer`.
        references: its parts that are not resolved yet.
        open: whether it, or a hint in it, has such parts.
        typed_dict: whether it is a `TypedDict`, whose annotations are not read.
    """

    text: str = ""
    forms: tuple[ArrayForm, ...] = ()
    element: "Hint | None" = None
    elements: "tuple[Hint, ...]" = ()
    below: "Hint | None" = None
    generics: "tuple[tuple[type, tuple[Hint, ...]], ...]" = ()
    names: Names | None = None
    buffer: bool = False
    references: tuple[Reference, ...] = ()
    open: bool = False
    typed_dict: bool = False

    def child(self, index: int | None) -> "Hint":
        """The hint of an element of a container; `index` is None for the values of a mapping."""
        # If the annotation cannot be resolved, neither can that of an element: each leaf below
        # reports it.
        if self.references or self is NOTHING:
            return self
        found = self.element or NOTHING
        if index is not None and index < len(self.elements):
            found = self.elements[index]
        if self.below is None:
            return found
        # `PyTree[X]` annotates the elements of the elements too, so it is passed on.
        if found is NOTHING:
            return self._under
        return replace(merge((found, self.below)), below=self.below)

    def forms_for(self, ndim: int) -> list[ArrayForm]:
        """The alternatives for an array of this rank in the field itself."""
        return [form for form in self.forms if form.fits(ndim)]

    def at(self, path: Path) -> "Hint":
        """The hint at a path in the containers below the field."""
        hint = self
        for key in path:
            index = key if isinstance(key, int) else None
            hint = hint.tried().child(index)
        return hint.tried()

    @cached_property
    def _under(self) -> "Hint":
        # Cached, so that all elements of a container have one object for their hint: hints are
        # compared by identity.
        if self.below is None:
            return NOTHING
        return replace(self.below, below=self.below)

    def bind(self, env: Env) -> "Hint":
        """The hint with type variables replaced by their values."""
        if not self.open or not env:
            return self
        if self._is_empty and len(self.references) == 1:
            reference = self.references[0]
            # It is a type variable and nothing else: no copy of the value, for the same reason.
            if not reference.marks and reference.what in env:
                return env[reference.what]
        bound = self.with_inner(lambda hint: hint.bind(env))
        return replace(bound, references=tuple(one.bind(env) for one in self.references))

    def with_inner(self, change: "Callable[[Hint], Hint]") -> "Hint":
        """The hint with a function applied to each of the hints in it."""
        return replace(
            self,
            element=self.element and change(self.element),
            elements=tuple(map(change, self.elements)),
            below=self.below and change(self.below),
            generics=tuple((cls, tuple(map(change, args))) for cls, args in self.generics),
        )

    @property
    def is_about_arrays(self) -> bool:
        """Whether its resolved parts annotate arrays, in the field or below."""
        parts = (self.forms, self.element, self.elements, self.below, self.generics)
        return any(parts)

    @property
    def _is_empty(self) -> bool:
        """Whether the hint has no parts except those that are not resolved yet."""
        return not (self.is_about_arrays or self.names or self.buffer or self.typed_dict)

    @cached_property
    def settled(self) -> "Hint":
        """The resolved hint. Raises NameError and others."""
        # `cached_property` does not remember a failure: a name may be defined later.
        return self._settle(lambda reference: True)

    def tried(self) -> "Hint":
        """The resolved hint; if that fails, without its optional parts; if that fails too, the hint
        itself."""
        try:
            return self.settled
        except UNREADABLE:
            try:
                return self._settle(lambda reference: True, strict=False)
            except UNREADABLE:
                return self

    def looked_up(self) -> "Hint":
        """The hint with its quoted names resolved, if they are defined. Its type variables are
        kept."""
        try:
            return self._settle(lambda reference: not reference.is_variable)
        except UNREADABLE:
            return self

    def _settle(self, wanted: Callable[[Reference], bool], strict: bool = True) -> "Hint":
        """The hint with some of its parts resolved, again and again: a quoted name may lead to
        another one."""
        hint = self
        for _ in range(_MAX_STEPS):
            if not any(map(wanted, hint.references)):
                return hint._with_text_of(self)
            kept = replace(hint, references=tuple(filterfalse(wanted, hint.references)))
            parts = [one.resolve(strict) for one in filter(wanted, hint.references)]
            # An empty hint that is not `NOTHING` would count as an alternative.
            if kept.references or not kept._is_empty:
                parts.insert(0, kept)
            hint = merge(parts)
        raise RecursionError("it is defined by itself")

    def _with_text_of(self, written: "Hint") -> "Hint":
        """The hint that another one is resolved to: messages show the annotation as it is
        written."""
        # The value of a type variable keeps its own text, and its identity.
        if self is NOTHING or all(one.is_variable for one in written.references):
            return self
        return replace(self, text=written.text)


NOTHING = Hint()


def merge(hints: Iterable[Hint]) -> Hint:
    """The hint of a union of annotations."""
    distinct = dict.fromkeys(hints)
    distinct.pop(NOTHING, None)
    if not distinct:
        return NOTHING
    if len(distinct) == 1:
        return next(iter(distinct))

    def each(attribute: str) -> Iterable[Any]:
        """The values of an attribute, of the hints that have one."""
        return filter(None, map(attrgetter(attribute), distinct))

    def merged(attribute: str) -> Hint | None:
        return merge(each(attribute)) if any(each(attribute)) else None

    return Hint(
        text=" | ".join(dict.fromkeys(each("text"))),
        forms=tuple(dict.fromkeys(chain(*each("forms")))),
        element=merged("element"),
        # The first elements of all hints as one hint, then the second ones, and so on.
        elements=tuple(map(merge, zip_longest(*each("elements"), fillvalue=NOTHING))),
        below=merged("below"),
        generics=tuple(chain(*each("generics"))),
        names=next(iter(each("names")), None),
        buffer=any(each("buffer")),
        references=tuple(chain(*each("references"))),
        open=any(each("open")),
        typed_dict=any(each("typed_dict")),
    )


# Reading a hint


def parse(hint: Any, namespace: Namespace, optional: bool = False) -> Hint:
    """A type expression ─► its hint. A type that says nothing about arrays has the hint
    `NOTHING`."""
    # Each case is one form of a type expression. The order matters for those that are also classes.
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, str | typing.ForwardRef):
        text = hint if isinstance(hint, str) else hint.__forward_arg__
        return _reference(text, text, namespace, optional)
    if isinstance(hint, TypeVar):
        return _reference(hint.__name__, hint, Namespace(hint.__module__), optional)
    # By name: the class is new in Python 3.12, and typing_extensions has another one for older
    # versions.
    if type(origin or hint).__name__ == "TypeAliasType":
        return _reference(str(hint), hint, namespace, optional)
    if origin is typing.Annotated:
        return annotated(parse(args[0], namespace, optional), hint.__metadata__)
    if origin in (typing.Union, types.UnionType):
        # `Array | Iterable["ArrayTree"]`: the union allows any array, so a name in it that cannot
        # be resolved does not hide the axes of an array.
        optional = optional or any(array in args for array in (jax.Array, np.ndarray, Any))
        return merge(parse(arg, namespace, optional) for arg in args)
    if origin in (typing.Final, typing.Required, typing.NotRequired):
        return parse(args[0], namespace, optional)
    if isinstance(hint, typing.NewType):
        return parse(hint.__supertype__, namespace, optional)
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return Hint(text=hint_text(hint), forms=(array_form(hint.dim_str, hint.dtype),))
    if isinstance(hint, type) and issubclass(hint, jaxtyping.PyTree):
        leaf = parse(getattr(hint, "leaftype", Any), namespace, optional)
        return NOTHING if leaf is NOTHING else replace(leaf, below=leaf)
    if typing.is_typeddict(hint):
        return Hint(text=hint.__name__, typed_dict=True)
    return _parametrized(hint, origin, args, namespace, optional)


def _reference(text: str, what: Any, namespace: Namespace, optional: bool) -> Hint:
    """The hint of a type expression that is resolved when a leaf needs it."""
    return Hint(text=text, references=(Reference(what, namespace, optional),), open=True)


def _parametrized(
    hint: Any, origin: Any, args: tuple[Any, ...], namespace: Namespace, optional: bool
) -> Hint:
    """The hint of a container or a generic class with arguments."""
    # The arguments of `type[X]` and `Callable[[X], Y]` are not annotations of arrays in the value.
    if not isinstance(origin, type) or origin in (type, abc.Callable):
        return NOTHING
    inner = tuple(parse(arg, namespace, optional) for arg in args)
    together = merge(inner)
    if together is NOTHING:
        return NOTHING
    said = Hint(text=str(hint), open=together.open)
    if origin.__module__ not in ("builtins", "collections", "collections.abc"):
        # A generic class: only its own annotations tell where its arguments are.
        return replace(said, generics=((origin, inner),))
    if origin is tuple and args[1:] != (...,):
        return replace(said, elements=inner)
    # The keys of a mapping are not leaves; its values are the last argument.
    values = -1 if issubclass(origin, abc.Mapping) else 0
    return replace(said, element=inner[values])


def annotated(hint: Hint, marks: Iterable[Any]) -> Hint:
    """A hint with the marks of an `Annotated`: axes, names, a spec, or that it is a buffer."""
    # Specs last, in whatever order they are written: `ft.Axes` replaces the forms that a spec is
    # put into.
    for mark in sorted(marks, key=lambda mark: isinstance(mark, PartitionSpec)):
        if isinstance(mark, Names):
            hint = replace(hint, names=mark)
        elif mark is BUFFER:
            hint = replace(hint, buffer=True)
        elif isinstance(mark, Axes):
            leaf = Hint(text=f'"{mark}"', forms=(form_of_axes(mark),))
            hint = replace(leaf, below=leaf, names=hint.names, buffer=hint.buffer)
        elif isinstance(mark, PartitionSpec):
            hint = _with_spec(hint, mark)
    return hint


def _with_spec(hint: Hint, spec: PartitionSpec) -> Hint:
    """The hint with a spec for all arrays that it annotates. If it annotates none, the spec is for
    all arrays below."""
    if not (hint.is_about_arrays or hint.references):
        # `Annotated[eqx.nn.Linear, P("data")]`: an array of any rank and dtype, at any depth.
        form = array_form("...")._replace(spec=spec)
        leaf = Hint(text=hint.text or f"Annotated[..., {spec}]", forms=(form,))
        return replace(leaf, below=leaf, names=hint.names, buffer=hint.buffer)
    return replace(
        hint.with_inner(lambda inner: _with_spec(inner, spec)),
        forms=tuple(form._replace(spec=spec) for form in hint.forms),
        references=tuple(one._replace(marks=(*one.marks, spec)) for one in hint.references),
    )


class ClassHints(NamedTuple):
    """The hints of a class.

    Attributes:
        fields: the hint of each field that has one.
        bases: for each generic base class, the values that its type parameters have in this class.
    """

    fields: Mapping[str, Hint]
    bases: Mapping[type, Env]

    def env(self, cls: type, hint: Hint) -> Env:
        """The values of the type parameters of the class, for an instance whose annotation is
        `hint`."""
        parameters: tuple[TypeVar, ...] = getattr(cls, "__parameters__", ())
        if hint.references:
            # The annotation cannot be resolved, so the parameters are unknown too. Each leaf that
            # depends on one of them then reports the annotation that cannot be resolved.
            return dict.fromkeys(parameters, hint)
        for origin, args in hint.generics:
            if origin is not cls and not issubclass(cls, origin):
                continue
            given: Env = dict(zip(getattr(origin, "__parameters__", ()), args, strict=False))
            if origin is cls:
                return given
            # The annotation is `Box[X]`, and the value is an instance of a subclass of `Box`: the
            # subclass' parameters are the type variables in the arguments that it gives to `Box`.
            handed = self.bases.get(origin, {})
            values: dict[TypeVar, Hint] = {}
            for parameter, arg in given.items():
                if parameter in handed:
                    values |= _solved(handed[parameter], arg)
                else:
                    values[parameter] = arg
            return values
        return NO_ENV


_CLASSES: WeakKeyDictionary[type, ClassHints] = WeakKeyDictionary()


def class_hints(cls: type) -> ClassHints:
    """The hints of a class, read once. A name that cannot be resolved yet is looked up again when a
    leaf needs it."""
    found = _CLASSES.get(cls)
    if found is None:
        found = _CLASSES[cls] = _read(cls)
    return found


def _read(cls: type) -> ClassHints:
    bases = _bases(cls)
    hints: dict[str, Hint] = {}
    # Base classes first, so that a field that a subclass annotates again has the annotation of the
    # subclass. Each annotation is read in the module of the class that wrote it. The last class of
    # the order is `object`.
    for base in reversed(cls.__mro__[:-1]):
        namespace = _namespace(base)
        for name, annotation in inspect.get_annotations(base).items():
            hint = parse(annotation, namespace).looked_up().bind(bases.get(base, {}))
            hints.pop(name, None)
            if hint is not NOTHING:
                hints[name] = hint
    return ClassHints(hints, bases)


def _namespace(cls: type) -> Namespace:
    """The names that the annotations of a class may use: those of its module and its body, and its
    own name."""
    # Python keeps the parameters of `class Box[T]` in `__type_params__` only.
    parameters = {p.__name__: p for p in getattr(cls, "__type_params__", ())}
    return Namespace(cls.__module__, {**vars(cls), **parameters, cls.__name__: cls})


def _solved(pattern: Hint, value: Hint) -> dict[TypeVar, Hint]:
    """The values of the type variables in a pattern, such as `list[U]`, for which it says the same
    as another hint."""
    value = value.tried()
    variables = (one.what for one in pattern.references if one.is_variable)
    found: dict[TypeVar, Hint] = dict.fromkeys(variables, value)
    pairs: list[tuple[Hint | None, Hint | None]] = [
        (pattern.element, value.element),
        (pattern.below, value.below),
    ]
    pairs += zip(pattern.elements, value.elements, strict=False)
    for (cls, arguments), (other, values) in zip(pattern.generics, value.generics, strict=False):
        if cls is other:
            pairs += zip(arguments, values, strict=False)
    for ours, its in pairs:
        if ours is not None and its is not None:
            found |= _solved(ours, its)
    return found


def _bases(cls: type) -> dict[type, dict[TypeVar, Hint]]:
    """For each generic base, the values of its type parameters in this class (`class
    B(A[Float[Array, "p q"]])`)."""
    found: dict[type, dict[TypeVar, Hint]] = {}
    _add_bases(cls, {}, found)
    return found


def _add_bases(cls: type, env: Env, found: dict[type, dict[TypeVar, Hint]]) -> None:
    """Add the values for each generic base of a class whose own type parameters have the values
    `env`."""
    # `__orig_bases__` has the bases with their arguments. It is looked up in the class itself,
    # since a subclass without generic bases of its own would inherit the attribute.
    for base in vars(cls).get("__orig_bases__", cls.__bases__):
        origin: Any = typing.get_origin(base) or base
        if not isinstance(origin, type) or origin in (typing.Generic, typing.Protocol, object):
            continue
        args = [parse(arg, _namespace(cls)).bind(env) for arg in typing.get_args(base)]
        inner: dict[TypeVar, Hint] = dict(
            zip(getattr(origin, "__parameters__", ()), args, strict=False)
        )
        found.setdefault(origin, {}).update(inner)
        _add_bases(origin, inner, found)
