"""One annotation of a class ─► a `Hint`: the axis names that it allows, for an array there and for what lies below."""

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
from functree.tree.annotations.dimensions import ArrayForm, array_form, form_of_axes, hint_text
from functree.tree.axes import BUFFER, Axes, Names
from functree.tree.paths import Path

Env = Mapping[TypeVar, "Hint"]
NO_ENV: Env = types.MappingProxyType({})


# An annotation in quotes is a program, and may fail as one.
UNREADABLE = (
    *(NameError, AttributeError, LookupError, SyntaxError, TypeError, ValueError),
    *(ArithmeticError, ImportError, RecursionError, FunctreeError),
)


@dataclass(frozen=True, eq=False)
class Namespace:
    """Where the names of an annotation are looked up: the module and the class that wrote it."""

    module: str
    names: Mapping[str, Any] = field(default_factory=dict)

    def find(self, text: str) -> Any:
        known = sys.modules.get(self.module)
        return eval(text, dict(vars(known)) if known else {}, dict(self.names))


class Later(NamedTuple):
    """What is looked up when a leaf needs it: a name in quotes, a type variable, a `type X = ...`."""

    what: Any
    namespace: Namespace
    optional: bool  # the other half of a recursive alias of arrays, as optax's: nothing is lost where it stays unknown
    env: Env = NO_ENV
    marks: tuple[Any, ...] = ()  # of an `Annotated` around it

    def resolve(self, strict: bool = True) -> "Hint":
        """What it says. Raises NameError and the like, as Python does."""
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
            return merge(parse(bound, self.namespace) for bound in self.what.__constraints__ or (self.what.__bound__,))
        if isinstance(self.what, str):
            return parse(self.namespace.find(self.what), self.namespace, self.optional)
        alias, args = typing.get_origin(self.what) or self.what, typing.get_args(self.what)
        env = dict(zip(alias.__type_params__, (parse(arg, self.namespace) for arg in args), strict=False))
        return parse(alias.__value__, Namespace(alias.__module__), self.optional).bind(env)

    def bind(self, env: Env) -> "Later":
        return self._replace(env={**env, **{v: hint.bind(env) for v, hint in self.env.items()}})


_MAX_STEPS = 32  # of quoted names that stand for quoted names: more are a circle


@dataclass(frozen=True, eq=False)
class Hint:
    """All that an annotation says. A union says what each of its alternatives says."""

    text: str = ""
    forms: tuple[ArrayForm, ...] = ()
    element: "Hint | None" = None  # list[X], tuple[X, ...], dict[str, X]
    elements: "tuple[Hint, ...]" = ()  # tuple[X, Y]
    below: "Hint | None" = None  # PyTree[X]: at any depth
    generics: "tuple[tuple[type, tuple[Hint, ...]], ...]" = ()  # Box[X]
    names: Names | None = None
    buffer: bool = False
    later: tuple[Later, ...] = ()
    open: bool = False  # has something for later somewhere

    def child(self, index: int | None) -> "Hint":
        """What it says of a container's element; `index` is None in a mapping."""
        if self.later or self is NOTHING:
            return self
        if self.elements and index is not None and index < len(self.elements):
            found = self.elements[index]
        else:
            found = self.element or NOTHING
        if self.below is None:
            return found
        return self._under if found is NOTHING else replace(merge((found, self.below)), below=self.below)

    def at(self, path: Path) -> "Hint":
        """What it says of a place in the containers below it."""
        hint = self
        for key in path:
            hint = hint.tried().child(key if isinstance(key, int) else None)
        return hint.tried()

    @cached_property
    def _under(self) -> "Hint":
        return NOTHING if self.below is None else replace(self.below, below=self.below)

    def bind(self, env: Env) -> "Hint":
        """The hint with type variables replaced."""
        if not self.open or not env:
            return self
        if self._only_later and len(self.later) == 1 and not self.later[0].marks and self.later[0].what in env:
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
        says = self.forms or self.element or self.elements or self.below or self.generics or self.names or self.buffer
        return not says

    @cached_property
    def settled(self) -> "Hint":
        """The hint with what is for later looked up. Raises NameError and the like; a failure is not remembered."""
        return self._settle(lambda later: True)

    def tried(self) -> "Hint":
        """`settled`; without what may stay unknown, where that fails, or else the hint itself."""
        try:
            return self.settled
        except UNREADABLE:
            try:
                return self._settle(lambda later: True, strict=False)
            except UNREADABLE:
                return self

    def looked_up(self) -> "Hint":
        """The hint with its quoted names looked up, as far as they are known, and its type variables left."""
        try:
            return self._settle(lambda later: not isinstance(later.what, TypeVar))
        except UNREADABLE:
            return self

    def _settle(self, wanted: Callable[[Later], bool], strict: bool = True) -> "Hint":
        hint, quoted = self, any(not isinstance(later.what, TypeVar) for later in self.later)
        for _ in range(_MAX_STEPS):
            now = [later for later in hint.later if wanted(later)]
            if not now:
                return replace(hint, text=self.text) if quoted and hint is not NOTHING else hint
            left = replace(hint, later=tuple(later for later in hint.later if not wanted(later)))
            kept = [left] if left.later or not left._only_later else []
            hint = merge([*kept, *(later.resolve(strict) for later in now)])
        raise NameError("it stands for itself")


NOTHING = Hint()


def merge(hints: Iterable[Hint]) -> Hint:
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
        names=next((h.names for h in hints if h.names), None),
        buffer=any(h.buffer for h in hints),
        later=tuple(later for h in hints for later in h.later),
        open=any(h.open for h in hints),
    )


# Reading a hint


def parse(hint: Any, namespace: Namespace, optional: bool = False) -> Hint:
    """A type expression ─► what it says of axes. One that says nothing is `NOTHING`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, str | typing.ForwardRef):
        text = hint if isinstance(hint, str) else hint.__forward_arg__
        return _later(text, text, namespace, optional)
    if isinstance(hint, TypeVar):
        return _later(hint.__name__, hint, Namespace(hint.__module__), optional)
    if type(origin or hint).__name__ == "TypeAliasType":  # Python 3.12's, or the one of typing_extensions
        return _later(str(hint), hint, namespace, optional)
    if origin is typing.Annotated:
        return annotated(parse(args[0], namespace, optional), hint.__metadata__)
    if origin in (typing.Union, types.UnionType):
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
    return Hint(text=text, later=(Later(what, namespace, optional),), open=True)


def _parametrized(hint: Any, origin: Any, args: tuple[Any, ...], namespace: Namespace, optional: bool) -> Hint:
    """Containers and generic classes."""
    if not isinstance(origin, type) or origin in (type, abc.Callable):
        return NOTHING
    inner = [NOTHING if arg is ... else parse(arg, namespace, optional) for arg in args]
    if all(h is NOTHING for h in inner):
        return NOTHING
    said = Hint(text=str(hint), open=any(h.open for h in inner))
    if origin.__module__ not in ("builtins", "collections", "collections.abc"):
        return replace(said, generics=((origin, tuple(inner)),))
    if origin is tuple and not (len(args) == 2 and args[1] is ...):
        return replace(said, elements=tuple(inner))
    return replace(said, element=inner[-1] if issubclass(origin, abc.Mapping) else inner[0])


def annotated(hint: Hint, marks: Iterable[Any]) -> Hint:
    """What `Annotated` adds to a hint: axes, names, a spec, that it is a buffer."""
    for mark in sorted(marks, key=lambda mark: isinstance(mark, PartitionSpec)):  # a spec is one for the axes given
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
    """The hint with a spec for the arrays that it speaks of; where it speaks of none, for all that are there."""
    if not (hint.forms or hint.element or hint.elements or hint.below or hint.generics or hint.later):
        leaf = Hint(text=hint.text or f"Annotated[..., {spec}]", forms=(array_form("...")._replace(spec=spec),))
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
