"""`field_hints` reads the axes in a class's annotations.

A class ─► the `Hint` of each of its fields: the axes of an array in the field, or of arrays below
it.
"""

import collections.abc as abc
import inspect
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import jax
import jaxtyping
import numpy as np
from jax.sharding import PartitionSpec

from functree.errors import FunctreeError
from functree.tree.axes import BUFFER, Axes, Names, OpenAxes


class Dim(NamedTuple):
    """A token of a jaxtyping dimension string.

    Attributes:
        name: the name of the axis, or None.
        token: the token as it is written.
        modifiers: the token's modifiers: `#` (broadcast), `*` (variadic), `_` (anonymous), `?`
            (size may differ between leaves).
        body: the rest of the token: a name, a size, or an expression. In `rows=4`, the body is the
            size.
    """

    name: str | None
    token: str
    modifiers: str = ""
    body: str = ""

    @property
    def variadic(self) -> bool:
        """Whether the token stands for any number of dimensions: `*b`, `...`."""
        return "*" in self.modifiers or self.body == "..."

    @property
    def broadcast(self) -> bool:
        """Whether the size may be 1: `#b`. With size 1, the dimension is never sharded."""
        return "#" in self.modifiers

    @property
    def anonymous(self) -> bool:
        """Whether the size is not compared with other dimensions: `_b`, `_`, `...`."""
        return "_" in self.modifiers or self.body in ("", "...")

    @property
    def by_leaf(self) -> bool:
        """Whether the size may differ between the leaves of a tree: `?b`."""
        return "?" in self.modifiers


class ArrayForm(NamedTuple):
    """One alternative of an array's annotation: dimensions, dtype and optional `PartitionSpec`."""

    dims: tuple[Dim, ...]
    dtype: Any = None  # jaxtyping's class (`Float`), or None for any dtype
    spec: PartitionSpec | None = None

    @property
    def wrong(self) -> str:
        """The reason why the dimension string is invalid, or an empty string."""
        for dim in self.dims:
            # In some libraries, `embed:data` or `embed@data` assigns mesh axes. jaxtyping reads
            # such a token as an expression, so the dimension would silently have no name. `{...}`
            # is an expression that may contain these characters.
            if ("@" in dim.token or ":" in dim.token) and "{" not in dim.token:
                return f"`{dim.token}` in a dimension string is not an axis name"
        return ""

    @property
    def plain(self) -> Axes | None:
        """The axes, if they are the same for all arrays that fit; otherwise None."""
        for dim in self.dims:
            if dim.variadic or dim.broadcast:
                return None
        return Axes(*[dim.name for dim in self.dims])

    def fits(self, ndim: int) -> bool:
        """Return whether an array of this rank fits."""
        if ndim == len(self.dims):
            return True
        # A variadic token stands for any number of dimensions, including zero.
        return ndim >= len(self.dims) - 1 and any(dim.variadic for dim in self.dims)

    def dims_for(self, ndim: int) -> list[Dim]:
        """Return one `Dim` for each dimension.

        A variadic token keeps its name only if it stands for exactly one dimension.
        """
        # Several dimensions with one name would repeat an axis, which no rule could shard.
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
    """Parse a jaxtyping dimension string."""
    return ArrayForm(tuple(map(dim, dim_str.split())), dtype)


@lru_cache(maxsize=4096)
def form_of_axes(axes: Axes | OpenAxes) -> ArrayForm:
    """Return the `ArrayForm` of an array whose axes are given as `Axes`."""
    if isinstance(axes, OpenAxes):
        before, after = form_of_axes(axes.before).dims, form_of_axes(axes.after).dims
        return ArrayForm((*before, dim("..."), *after))
    # Names are not parsed: an axis may be called `_pad`, which would parse as an anonymous token.
    return ArrayForm(tuple(Dim(name, name or "_", body=name or "") for name in axes))


def dim(token: str) -> Dim:
    """Parse one token of a dimension string: modifiers, then a name, a size or an expression."""
    modifiers, body = _modifiers(token)
    name = body
    # `rows=4` is a size with a name. jaxtyping reads two equals signs (`a==b`) as an expression,
    # which has no name.
    if body.count("=") == 1:
        name, _, size = body.partition("=")
        more, body = _modifiers(size)  # modifiers may be on either side
        modifiers += more
    if not name.isidentifier():
        return Dim(None, token, modifiers, body)
    return Dim(name, token, modifiers, body)


def _modifiers(token: str) -> tuple[str, str]:
    """Split a token into its modifiers and the rest."""
    rest = token.lstrip("#*_?")
    return token[: len(token) - len(rest)], rest


def hint_text(hint: Any) -> str:
    """Return the source text of a jaxtyping annotation."""
    array = getattr(hint.array_type, "__name__", str(hint.array_type)).rpartition(".")[2]
    return f'{hint.dtype.__name__}[{array}, "{hint.dim_str}"]'


@lru_cache(maxsize=4096)
def dtype_fits(hint_dtype: Any, dtype: Any) -> bool:
    """Return whether a jaxtyping class, such as `Float`, accepts an array with this dtype."""
    # jaxtyping decides, using `isinstance` with an abstract array.
    return hint_dtype is None or isinstance(jax.ShapeDtypeStruct((), dtype), hint_dtype[Any, "..."])


# A quoted annotation is an expression, which may raise any error. These errors mean that the
# annotation cannot be resolved, and are reported with the path of its leaf. Other errors propagate,
# since the annotation does not cause them.
UNREADABLE = (
    *(NameError, AttributeError, LookupError, SyntaxError, TypeError, ValueError),
    *(ArithmeticError, ImportError, RecursionError, FunctreeError),
)


Values = Mapping[TypeVar, "Reference"]  # the values of type variables


@dataclass(frozen=True, eq=False)
class Namespace:
    """The namespace in which the names of an annotation are looked up.

    Attributes:
        module: the module that contains the annotation.
        names: the names in the class that contains the annotation.
        values: the values of the annotation's type variables.
        optional: whether a name may stay unresolved, because its union also allows any array. An
            example is optax's recursive alias `ArrayTree = Array | Iterable["ArrayTree"] | ...`,
            which cannot be resolved from another module.
        spec: the spec in an `Annotated` around the annotation.
    """

    module: str
    names: Mapping[str, Any] = field(default_factory=dict)
    values: Values = field(default_factory=dict)
    optional: bool = False
    spec: PartitionSpec | None = None

    def find(self, text: str) -> Any:
        """Evaluate an expression. Its errors propagate."""
        # The module is looked up now, not when the class is read, since a name may be defined below
        # the class. Its namespace is copied, since `eval` adds `__builtins__` to its globals.
        module = sys.modules.get(self.module)
        known = dict(vars(module)) if module else {}
        return eval(text, known, dict(self.names))


class Reference(NamedTuple):
    """A type expression in an annotation, which is resolved when a leaf needs it.

    Attributes:
        what: the expression: a quoted text, an alias (`type X = ...`) with its arguments, or the
            argument of a generic class.
        namespace: the namespace in which its names are looked up.
    """

    what: Any
    namespace: Namespace

    def resolve(self) -> "Hint":
        """Return the referenced hint. Raise Python's error if the reference cannot be evaluated.

        An undefined name that may stay unresolved gives `NOTHING` instead.
        """
        outside = self.namespace
        try:
            if isinstance(self.what, str):
                return _with_spec(parse(outside.find(self.what), outside), outside)
            # An alias is resolved in its own module, which may differ from the class's module. Its
            # arguments are resolved in the class's module.
            alias = typing.get_origin(self.what) or self.what
            args = [Reference(arg, outside) for arg in typing.get_args(self.what)]
            values = dict(zip(alias.__type_params__, args, strict=False))
            inside = replace(outside, module=alias.__module__, names={}, values=values)
            return _with_spec(parse(alias.__value__, inside), inside)
        except NameError:
            if not outside.optional:
                raise
            return NOTHING


# The maximum number of steps from one quoted name to the next. More steps mean that a name is
# defined in terms of itself.
_MAX_STEPS = 32


@dataclass(frozen=True, eq=False)
class Hint:
    """The parsed form of an annotation: everything that it specifies about arrays.

    The hint of a union combines the parts of all alternatives. Hints are compared by identity,
    which is fast: the walk over a tree uses them as keys.

    Attributes:
        text: the annotation, for messages.
        forms: the annotated forms of an array, if the field itself may hold an array.
        element: the hint of each element of a container: X in `list[X]`, `tuple[X, ...]`,
            `dict[str, X]`.
        elements: the hints of the elements of a `tuple[X, Y]`.
        below: the hint of an array at any depth: X in `PyTree[X]`.
        generics: the generic classes with their arguments: `Box[X]`.
        names: the `ft.names` in the annotation's `Annotated`.
        buffer: whether the annotation is an `ft.Buffer`.
        references: the parts that are not resolved yet.
    """

    text: str = ""
    forms: tuple[ArrayForm, ...] = ()
    element: "Hint | None" = None
    elements: "tuple[Hint, ...]" = ()
    below: "Hint | None" = None
    generics: tuple[tuple[type, tuple[Reference, ...]], ...] = ()
    names: Names | None = None
    buffer: bool = False
    references: tuple[Reference, ...] = ()

    def child(self, index: int | None) -> "Hint":
        """Return the hint of an element of a container.

        Args:
            index: the index of the element; None for the values of a mapping.
        """
        # If the annotation cannot be resolved, each leaf below reports it.
        if self.references or self is NOTHING:
            return self
        element = self.element or NOTHING
        if index is not None and index < len(self.elements):
            element = self.elements[index]
        if self.below is None:
            return element
        # `PyTree[X]` annotates all levels below, so X is passed on.
        if element is NOTHING:
            return self._under
        return replace(merge((element, self.below)), below=self.below)

    @cached_property
    def _under(self) -> "Hint":
        # Hints are compared by identity. The cache lets all elements of a container share one hint.
        if self.below is None:
            return NOTHING
        return replace(self.below, below=self.below)

    @property
    def is_about_arrays(self) -> bool:
        """Whether the resolved parts annotate arrays, in the field or below it."""
        parts = (self.forms, self.element, self.elements, self.below, self.generics)
        return any(parts)

    @cached_property
    def settled(self) -> "Hint":
        """The resolved hint. Reading it raises Python's error if a name cannot be resolved."""
        # `cached_property` does not cache a failure, and a name may be defined later.
        hint = self
        # One reference may lead to another.
        for _ in range(_MAX_STEPS):
            if not hint.references:
                # Messages show the annotation as it is written.
                return hint if hint in (self, NOTHING) else replace(hint, text=self.text)
            parts = [reference.resolve() for reference in hint.references]
            kept = replace(hint, references=())
            # An empty hint that is not `NOTHING` would count as an alternative.
            if kept.is_about_arrays or kept.names or kept.buffer:
                parts.insert(0, kept)
            hint = merge(parts)
        raise RecursionError("it is defined in terms of itself")

    def tried(self) -> "Hint":
        """Return the resolved hint, or the hint itself if a name cannot be resolved."""
        try:
            return self.settled
        except UNREADABLE:
            return self


NOTHING = Hint()


def merge(hints: Iterable[Hint]) -> Hint:
    """Return the hint of a union of annotations."""
    distinct = dict.fromkeys(hints)
    distinct.pop(NOTHING, None)
    if not distinct:
        return NOTHING
    if len(distinct) == 1:
        return next(iter(distinct))

    def each(attribute: str) -> Iterable[Any]:
        """Return the values of an attribute, for the hints that have one."""
        return filter(None, map(attrgetter(attribute), distinct))

    def merged(attribute: str) -> Hint | None:
        return merge(each(attribute)) if any(each(attribute)) else None

    return Hint(
        text=" | ".join(dict.fromkeys(each("text"))),
        forms=tuple(dict.fromkeys(chain(*each("forms")))),
        element=merged("element"),
        # Merge the first elements of all hints, then the second ones, and so on.
        elements=tuple(map(merge, zip_longest(*each("elements"), fillvalue=NOTHING))),
        below=merged("below"),
        generics=tuple(chain(*each("generics"))),
        names=next(iter(each("names")), None),
        buffer=any(each("buffer")),
        references=tuple(chain(*each("references"))),
    )


# Reading a hint


def parse(hint: Any, namespace: Namespace) -> Hint:
    """Parse a type expression. The hint is `NOTHING` for a type that specifies no arrays."""
    # Each case is one form of type expression. The order matters for forms that are also classes.
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, str | typing.ForwardRef):
        text = hint if isinstance(hint, str) else hint.__forward_arg__
        return Hint(text=text, references=(Reference(text, namespace),))
    if isinstance(hint, TypeVar):
        if hint in namespace.values:
            value, outside = namespace.values[hint]
            inside = replace(outside, spec=namespace.spec or outside.spec)
            return _with_spec(parse(value, inside), inside)
        return NOTHING
    # The class is compared by name, since it is new in Python 3.12, and typing_extensions has its
    # own class for older versions.
    if type(origin or hint).__name__ == "TypeAliasType":
        return Hint(text=str(hint), references=(Reference(hint, namespace),))
    if origin is typing.Annotated:
        return _annotated(args[0], hint.__metadata__, namespace)
    if origin in (typing.Union, types.UnionType):
        # `Array | Iterable["ArrayTree"]`: the union allows any array, so an unresolved name in it
        # hides no axes.
        if any(array in args for array in (jax.Array, np.ndarray, Any)):
            namespace = replace(namespace, optional=True)
        return merge(parse(arg, namespace) for arg in args)
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        form = array_form(hint.dim_str, hint.dtype)._replace(spec=namespace.spec)
        return Hint(text=hint_text(hint), forms=(form,))
    if isinstance(hint, type) and issubclass(hint, jaxtyping.PyTree):
        leaf = parse(getattr(hint, "leaftype", Any), namespace)
        return NOTHING if leaf is NOTHING else replace(leaf, below=leaf)
    return _parametrized(hint, origin, args, namespace)


def _parametrized(hint: Any, origin: Any, args: tuple[Any, ...], namespace: Namespace) -> Hint:
    """Return the hint of a container or a generic class with arguments."""
    # The arguments of `type[X]` and `Callable[[X], Y]` are not annotations of arrays in the value.
    if not isinstance(origin, type) or origin in (type, abc.Callable):
        return NOTHING
    inner = tuple(_with_spec(parse(arg, namespace), namespace) for arg in args)
    together = merge(inner)
    if together is NOTHING:
        return NOTHING
    parsed = Hint(text=str(hint))
    if origin.__module__ not in ("builtins", "collections", "collections.abc"):
        # Only a generic class's own annotations show where its arguments apply.
        return replace(parsed, generics=((origin, tuple(Reference(a, namespace) for a in args)),))
    if origin is tuple and args[1:] != (...,):
        return replace(parsed, elements=inner)
    # The keys of a mapping are not leaves. The type of its values is the last argument.
    values = -1 if issubclass(origin, abc.Mapping) else 0
    return replace(parsed, element=inner[values])


def _annotated(inner: Any, marks: Iterable[Any], namespace: Namespace) -> Hint:
    """Return the hint of an `Annotated`, whose marks are axes, names, a spec, or a buffer mark."""
    for mark in marks:
        # A spec in an `Annotated` around this one wins.
        if isinstance(mark, PartitionSpec) and namespace.spec is None:
            namespace = replace(namespace, spec=mark)
    hint = parse(inner, namespace)
    for mark in marks:
        if isinstance(mark, Names):
            hint = replace(hint, names=mark)
        elif mark is BUFFER:
            hint = replace(hint, buffer=True)
        elif isinstance(mark, Axes):
            form = form_of_axes(mark)._replace(spec=namespace.spec)
            hint = _at_any_depth(Hint(text=f'"{mark}"', forms=(form,)), hint)
    return _with_spec(hint, namespace)


def _with_spec(hint: Hint, namespace: Namespace) -> Hint:
    """Apply the spec around an annotation to arrays at any depth, if it annotates no arrays."""
    if namespace.spec is None or hint.is_about_arrays or hint.references:
        return hint
    # `Annotated[eqx.nn.Linear, P("data")]`: arrays of any rank and dtype, at any depth.
    form = array_form("...")._replace(spec=namespace.spec)
    text = hint.text or f"Annotated[..., {namespace.spec}]"
    return _at_any_depth(Hint(text=text, forms=(form,)), hint)


def _at_any_depth(leaf: Hint, hint: Hint) -> Hint:
    """Return a hint for arrays at any depth, with the names and the mark of another hint."""
    return replace(leaf, below=leaf, names=hint.names, buffer=hint.buffer)


_FIELDS: WeakKeyDictionary[type, Mapping[str, Hint]] = WeakKeyDictionary()


def field_hints(cls: type, hint: Hint = NOTHING) -> Mapping[str, Hint]:
    """Return the hint of each annotated field of a class, by name.

    Args:
        cls: a class. It is read only once if `hint` gives no values to its type parameters. An
            unresolved name is looked up again when a leaf needs it.
        hint: the annotation of an instance. It may give values to the type parameters of the class
            or of a base class: `Box[X]`.
    """
    values: dict[type, dict[TypeVar, Reference]] = {}
    # If the annotation cannot be resolved, the values are unknown, too. Each leaf that depends on
    # them then reports the annotation.
    if hint.references:
        values[cls] = dict.fromkeys(_parameters(cls), hint.references[0])
    for origin, args in hint.generics:
        values[origin] = dict(zip(_parameters(origin), args, strict=False))
    if any(values.values()):
        return _read(cls, values)
    hints = _FIELDS.get(cls)
    if hints is None:
        hints = _FIELDS[cls] = _read(cls, values)
    return hints


def _read(cls: type, values: dict[type, dict[TypeVar, Reference]]) -> Mapping[str, Hint]:
    """Read the annotations of a class and its bases.

    Args:
        cls: the class.
        values: the values of the type parameters of these classes, as far as an annotation of an
            instance gives them. A parameter that a subclass passes to its base
            (`class Sub(Box[U])`) has no value from an annotation `Box[X]`.
    """
    classes = cls.__mro__[:-1]  # `object`, the last class, has no annotations
    for owner in classes:
        namespace = _namespace(owner, values.get(owner, {}))
        # A class may give values to a base's parameters, as in `class B(A[Float[Array, "p q"]])`.
        for base in vars(owner).get("__orig_bases__", ()):
            origin: Any = typing.get_origin(base)
            for parameter, argument in zip(
                _parameters(origin), typing.get_args(base), strict=False
            ):
                # The annotation may give values that the class leaves open.
                if parse(argument, namespace) is not NOTHING:
                    value = Reference(argument, namespace)
                    values.setdefault(origin, {})[parameter] = value
    hints: dict[str, Hint] = {}
    # Base classes come first, so that a subclass's annotation of the same field wins. Each
    # annotation is read in the module of the class that contains it.
    for owner in reversed(classes):
        namespace = _namespace(owner, values.get(owner, {}))
        for name, annotation in inspect.get_annotations(owner).items():
            hint = parse(annotation, namespace).tried()
            hints.pop(name, None)
            if hint is not NOTHING:
                hints[name] = hint
    return hints


def _namespace(cls: type, values: Values) -> Namespace:
    """Return the names that a class's annotations may use.

    These are the class's own name, and the names in its module and its body.
    """
    # Python keeps the parameters of `class Box[T]` only in `__type_params__`.
    parameters = {p.__name__: p for p in getattr(cls, "__type_params__", ())}
    return Namespace(cls.__module__, {**vars(cls), **parameters, cls.__name__: cls}, values)


def _parameters(cls: Any) -> tuple[TypeVar, ...]:
    return getattr(cls, "__parameters__", ())
