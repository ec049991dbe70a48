"""One annotation of a field ─► a `Hint`: the axes that it allows for an array there, and for arrays
below the field."""

import collections.abc as abc
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jaxtyping
import numpy as np
from jax.sharding import PartitionSpec

from functree.errors import FunctreeError
from functree.labels.annotations.dimensions import ArrayForm, array_form, form_of_axes, hint_text
from functree.tree.axes import BUFFER, Axes, Names
from functree.tree.paths import Path

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
        known = sys.modules.get(self.module)
        return eval(text, dict(vars(known)) if known else {}, dict(self.names))


class Later(NamedTuple):
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
            return merge(
                parse(bound, self.namespace)
                for bound in self.what.__constraints__ or (self.what.__bound__,)
            )
        if isinstance(self.what, str):
            return parse(self.namespace.find(self.what), self.namespace, self.optional)
        # An alias is resolved in its own module, which need not be that of the class; its arguments
        # are in the class'.
        alias, args = typing.get_origin(self.what) or self.what, typing.get_args(self.what)
        env = dict(
            zip(alias.__type_params__, (parse(arg, self.namespace) for arg in args), strict=False)
        )
        return parse(alias.__value__, Namespace(alias.__module__), self.optional).bind(env)

    def bind(self, env: Env) -> "Later":
        """The same with values for type variables. Values that it has already may contain these
        variables."""
        return self._replace(env={**env, **{v: hint.bind(env) for v, hint in self.env.items()}})


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
        later: its parts that are not resolved yet.
        open: whether it, or a hint in it, has such parts.
    """

    text: str = ""
    forms: tuple[ArrayForm, ...] = ()
    element: "Hint | None" = None
    elements: "tuple[Hint, ...]" = ()
    below: "Hint | None" = None
    generics: "tuple[tuple[type, tuple[Hint, ...]], ...]" = ()
    names: Names | None = None
    buffer: bool = False
    later: tuple[Later, ...] = ()
    open: bool = False

    def child(self, index: int | None) -> "Hint":
        """The hint of an element of a container; `index` is None for the values of a mapping."""
        # If the annotation cannot be resolved, neither can that of an element: each leaf below
        # reports it.
        if self.later or self is NOTHING:
            return self
        if self.elements and index is not None and index < len(self.elements):
            found = self.elements[index]
        else:
            found = self.element or NOTHING
        if self.below is None:
            return found
        # `PyTree[X]` annotates the elements of the elements too, so it is passed on.
        if found is NOTHING:
            return self._under
        return replace(merge((found, self.below)), below=self.below)

    def at(self, path: Path) -> "Hint":
        """The hint at a path in the containers below the field."""
        hint = self
        for key in path:
            hint = hint.tried().child(key if isinstance(key, int) else None)
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
        if (
            self._only_later
            and len(self.later) == 1
            and not self.later[0].marks
            and self.later[0].what in env
        ):
            # It is a type variable and nothing else: no copy of the value, for the same reason.
            return env[self.later[0].what]
        return replace(
            self,
            element=self.element and self.element.bind(env),
            elements=tuple(h.bind(env) for h in self.elements),
            below=self.below and self.below.bind(env),
            generics=tuple((c, tuple(h.bind(env) for h in args)) for c, args in self.generics),
            later=tuple(later.bind(env) for later in self.later),
        )

    @property
    def _only_later(self) -> bool:
        """Whether the hint has no parts except those that are not resolved yet."""
        says = (
            self.forms
            or self.element
            or self.elements
            or self.below
            or self.generics
            or self.names
            or self.buffer
        )
        return not says

    @cached_property
    def settled(self) -> "Hint":
        """The resolved hint. Raises NameError and others."""
        # `cached_property` does not remember a failure: a name may be defined later.
        return self._settle(lambda later: True)

    def tried(self) -> "Hint":
        """The resolved hint; if that fails, without its optional parts; if that fails too, the hint
        itself."""
        try:
            return self.settled
        except UNREADABLE:
            try:
                return self._settle(lambda later: True, strict=False)
            except UNREADABLE:
                return self

    def looked_up(self) -> "Hint":
        """The hint with its quoted names resolved, if they are defined. Its type variables are
        kept."""
        try:
            return self._settle(lambda later: not isinstance(later.what, TypeVar))
        except UNREADABLE:
            return self

    def _settle(self, wanted: Callable[[Later], bool], strict: bool = True) -> "Hint":
        """The hint with some of its parts resolved, again and again: a quoted name may lead to
        another one."""
        hint, quoted = self, any(not isinstance(later.what, TypeVar) for later in self.later)
        for _ in range(_MAX_STEPS):
            now = [later for later in hint.later if wanted(later)]
            if not now:
                if quoted and hint is not NOTHING:
                    return replace(
                        hint, text=self.text
                    )  # messages show the annotation as it is written
                return hint
            left = replace(hint, later=tuple(later for later in hint.later if not wanted(later)))
            # If nothing else is left, `left` is an empty hint that is not `NOTHING`, and would
            # count as an alternative.
            kept = [left] if left.later or not left._only_later else []
            hint = merge([*kept, *(later.resolve(strict) for later in now)])
        raise RecursionError("it is defined by itself")


NOTHING = Hint()


def merge(hints: Iterable[Hint]) -> Hint:
    """The hint of a union of annotations."""
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
        elements=tuple(
            merge(h.elements[i] for h in hints if i < len(h.elements)) for i in range(longest)
        ),
        below=one([h.below for h in hints if h.below]),
        generics=tuple(pair for h in hints for pair in h.generics),
        names=next((h.names for h in hints if h.names), None),
        buffer=any(h.buffer for h in hints),
        later=tuple(later for h in hints for later in h.later),
        open=any(h.open for h in hints),
    )


# Reading a hint


def parse(hint: Any, namespace: Namespace, optional: bool = False) -> Hint:
    """A type expression ─► its hint. A type that says nothing about arrays has the hint
    `NOTHING`."""
    # Each case is one form of a type expression. The order matters for those that are also classes.
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, str | typing.ForwardRef):
        text = hint if isinstance(hint, str) else hint.__forward_arg__
        return _later(text, text, namespace, optional)
    if isinstance(hint, TypeVar):
        return _later(hint.__name__, hint, Namespace(hint.__module__), optional)
    # By name: the class is new in Python 3.12, and typing_extensions has another one for older
    # versions.
    if type(origin or hint).__name__ == "TypeAliasType":
        return _later(str(hint), hint, namespace, optional)
    if origin is typing.Annotated:
        return annotated(parse(args[0], namespace, optional), hint.__metadata__)
    if origin in (typing.Union, types.UnionType):
        # `Array | Iterable["ArrayTree"]`: the union allows any array, so a name in it that cannot
        # be resolved does not hide the axes of an array.
        optional = optional or any(arg in (jax.Array, np.ndarray, Any) for arg in args)
        return merge(parse(arg, namespace, optional) for arg in args)
    if origin in (typing.Final, typing.Required, typing.NotRequired):
        return parse(args[0], namespace, optional)
    if isinstance(hint, typing.NewType):
        return parse(hint.__supertype__, namespace, optional)
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return Hint(text=hint_text(hint), forms=(array_form(hint.dim_str, hint.dtype),))
    if isinstance(hint, type) and issubclass(hint, jaxtyping.PyTree):
        leaf = parse(getattr(hint, "leaftype", Any), namespace, optional)
        return replace(leaf, below=leaf) if leaf is not NOTHING else NOTHING
    return _parametrized(hint, origin, args, namespace, optional)


def _later(text: str, what: Any, namespace: Namespace, optional: bool) -> Hint:
    """The hint of a type expression that is resolved when a leaf needs it."""
    return Hint(text=text, later=(Later(what, namespace, optional),), open=True)


def _parametrized(
    hint: Any, origin: Any, args: tuple[Any, ...], namespace: Namespace, optional: bool
) -> Hint:
    """The hint of a container or a generic class with arguments."""
    # The arguments of `type[X]` and `Callable[[X], Y]` are not annotations of arrays in the value.
    if not isinstance(origin, type) or origin in (type, abc.Callable):
        return NOTHING
    inner = [NOTHING if arg is ... else parse(arg, namespace, optional) for arg in args]
    if all(h is NOTHING for h in inner):
        return NOTHING
    said = Hint(text=str(hint), open=any(h.open for h in inner))
    if origin.__module__ not in ("builtins", "collections", "collections.abc"):
        # A generic class: only its own annotations tell where its arguments are.
        return replace(said, generics=((origin, tuple(inner)),))
    if origin is tuple and not (len(args) == 2 and args[1] is ...):
        return replace(said, elements=tuple(inner))
    # The keys of a mapping are not leaves; its values are the last argument.
    return replace(said, element=inner[-1] if issubclass(origin, abc.Mapping) else inner[0])


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
    if not (
        hint.forms or hint.element or hint.elements or hint.below or hint.generics or hint.later
    ):
        # `Annotated[eqx.nn.Linear, P("data")]`: an array of any rank and dtype, at any depth.
        leaf = Hint(
            text=hint.text or f"Annotated[..., {spec}]",
            forms=(array_form("...")._replace(spec=spec),),
        )
        return replace(leaf, below=leaf, names=hint.names, buffer=hint.buffer)

    def inside(h: Hint) -> Hint:
        return _with_spec(h, spec)

    return replace(
        hint,
        forms=tuple(f._replace(spec=spec) for f in hint.forms),
        element=hint.element and inside(hint.element),
        elements=tuple(map(inside, hint.elements)),
        below=hint.below and inside(hint.below),
        generics=tuple((cls, tuple(map(inside, args))) for cls, args in hint.generics),
        later=tuple(later._replace(marks=(*later.marks, spec)) for later in hint.later),
    )
