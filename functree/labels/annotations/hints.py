"""`field_hints` reads the axes in a class's annotations, and `leaf_axes` applies them to an array.

A class ─► the `Hint` of each of its fields: the axes of an array in the field, or of arrays below
it. An array and its hint ─► its axes, or the reason why they cannot be determined.
"""

import collections.abc as abc
import inspect
import sys
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import jax
import jaxtyping
import numpy as np
from jax.sharding import PartitionSpec

from functree.errors import FunctreeError, count
from functree.tree.arrays import DType
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


def _no_class() -> None:
    return None


@dataclass(frozen=True, eq=False)
class Namespace:
    """The namespace in which the names of an annotation are looked up.

    Attributes:
        module: the module that contains the annotation.
        owner: a weak reference to the class that contains the annotation, or a function that
            returns None.
        values: the values of the annotation's type variables.
        optional: whether a name may stay unresolved, because its union also allows any array. An
            example is optax's recursive alias `ArrayTree = Array | Iterable["ArrayTree"] | ...`,
            which cannot be resolved from another module.
        spec: the spec in an `Annotated` around the annotation.
    """

    module: str
    owner: Callable[[], type | None] = _no_class
    values: "Mapping[TypeVar, Reference]" = field(default_factory=dict)
    optional: bool = False
    spec: PartitionSpec | None = None

    def find(self, text: str) -> Any:
        """Evaluate an expression, which may use the names in the module and in the class.

        Its errors propagate.
        """
        # The module is looked up now, not when the class is read, since a name may be defined below
        # the class. Its namespace is copied, since `eval` adds `__builtins__` to its globals.
        module, cls = sys.modules.get(self.module), self.owner()
        known = dict(vars(module)) if module else {}
        names: dict[str, Any] = {}
        if cls is not None:
            # Python keeps the parameters of `class Box[T]` only in `__type_params__`.
            parameters = {p.__name__: p for p in getattr(cls, "__type_params__", ())}
            names = {**vars(cls), **parameters, cls.__name__: cls}
        return eval(text, known, names)


class Reference(NamedTuple):
    """A type expression in an annotation, with the namespace of its names."""

    what: Any
    namespace: Namespace


@dataclass(eq=False)
class Hint:
    """The parsed form of an annotation: everything that it specifies about arrays.

    Only the outermost level is parsed, with all alternatives of a union. The parts below it are
    parsed when a walk over a tree reaches a value for them, so an annotation may contain itself.
    Hints are compared by identity, which is fast: the walk uses them as keys. They are not changed
    after `parse` has returned them.

    Attributes:
        texts: the alternatives as they are written, for messages.
        forms: the annotated forms of an array, if the field itself may hold an array.
        parts: the annotations of the parts of a value, by key. A key is an index for
            `tuple[X, Y]`, and None for all elements of `list[X]`, `tuple[X, ...]` or
            `dict[str, X]`. The key `...` stands for arrays at any depth without another annotation,
            as in `PyTree[X]`. For a class, the keys are the names of its fields.
        generics: the generic classes with their arguments: `Box[X]`.
        names: the `ft.names` in the annotation's `Annotated`.
        buffer: whether the annotation is an `ft.Buffer`.
        around: the namespace of a type without axes that has a spec around it.
        error: the reason why the annotation cannot be resolved, or an empty string.
        unresolved: the annotation that cannot be resolved.
        parsed: the hints of the parts that have been parsed, and the fields of classes.
    """

    texts: dict[str, None] = field(default_factory=dict)
    forms: list[ArrayForm] = field(default_factory=list)
    parts: dict[Hashable, list[Reference]] = field(default_factory=dict)
    generics: list[Reference] = field(default_factory=list)
    names: Names | None = None
    buffer: bool = False
    around: Namespace | None = None
    error: str = ""
    unresolved: Reference | None = None
    parsed: "dict[Hashable, Hint]" = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The annotation, for messages."""
        return " | ".join(self.texts)

    def child(self, key: Hashable) -> "Hint":
        """Return the hint of a part: of an element by its index, or of a field by its name."""
        # If the annotation cannot be resolved, each leaf below reports it.
        if self.error:
            return self
        if key not in self.parts:
            key = None
        hint = self.parsed.get(key)
        if hint is None:
            below = () if key is ... else self.parts.get(..., ())
            hint = parse(*self.parts.get(key, ()), below=below)
            # A failure is not cached, since a name may be defined later.
            if not hint.error:
                self.parsed[key] = hint
        return hint


NOTHING = Hint()


def parse(*references: Reference, below: Sequence[Reference] = ()) -> Hint:
    """Parse an annotation, or several as a union.

    The hint is `NOTHING` for types that specify no arrays.

    Args:
        *references: the annotations.
        below: annotations of arrays at any depth, as in `PyTree[X]`.
    """
    hint = Hint()
    for reference in (*references, *below):
        _add(hint, *reference)
    if hint.around is not None and not hint.forms:
        # `Annotated[eqx.nn.Linear, P("data")]`: arrays of any rank and dtype, at any depth.
        _add_at_any_depth(hint, OpenAxes(Axes(), Axes()), hint.around)
    if not any((hint.forms, hint.parts, hint.generics, hint.names, hint.buffer, hint.error)):
        return NOTHING
    if below:
        hint.parts.setdefault(..., []).extend(below)
    return hint


def _add(hint: Hint, what: Any, namespace: Namespace, text: str = "") -> None:
    """Add everything that a type expression specifies to a hint.

    Args:
        hint: the hint.
        what: the expression.
        namespace: the namespace of its names.
        text: the name that stands for the expression in the annotation; empty if there is none.
    """
    # Each case is one form of type expression. The order matters for forms that are also classes.
    origin, args = typing.get_origin(what), typing.get_args(what)
    # The class is compared by name, since it is new in Python 3.12, and typing_extensions has its
    # own class for older versions.
    is_alias = type(origin or what).__name__ == "TypeAliasType"
    if is_alias or isinstance(what, str | typing.ForwardRef):
        _add_named(hint, what, namespace, text)
    elif isinstance(what, TypeVar):
        if what in namespace.values:
            value, inside = namespace.values[what]
            if namespace.spec is not None:
                inside = replace(inside, spec=namespace.spec)
            _add(hint, value, inside, text)
    elif origin is typing.Annotated:
        _add_annotated(hint, args[0], what.__metadata__, namespace, text)
    elif origin in (typing.Union, types.UnionType):
        # `Array | Iterable["ArrayTree"]`: the union allows any array, so an unresolved name in it
        # hides no axes.
        if any(array in args for array in (jax.Array, np.ndarray, Any)):
            namespace = replace(namespace, optional=True)
        for arg in args:
            _add(hint, arg, namespace, text)
    elif isinstance(what, Axes | OpenAxes):
        hint.texts[text or f'"{what}"'] = None
        hint.forms.append(form_of_axes(what)._replace(spec=namespace.spec))
    elif isinstance(what, type) and issubclass(what, jaxtyping.AbstractArray):
        hint.texts[text or hint_text(what)] = None
        form = array_form(what.dim_str, what.dtype)
        hint.forms.append(form._replace(spec=namespace.spec))
    elif isinstance(what, type) and issubclass(what, jaxtyping.PyTree):
        _add_at_any_depth(hint, getattr(what, "leaftype", Any), namespace, text)
    # The arguments of `type[X]` and `Callable[[X], Y]` are not annotations of arrays in the value.
    elif args and isinstance(origin, type) and origin not in (type, abc.Callable):
        hint.texts[text or str(what)] = None
        _add_arguments(hint, origin, what, namespace)
    elif namespace.spec is not None:
        hint.around = namespace


def _add_named(hint: Hint, what: Any, namespace: Namespace, text: str) -> None:
    """Add a quoted expression, or an alias (`type X = ...`)."""
    written: str = getattr(what, "__forward_arg__", str(what))
    text = text or written
    hint.texts[text] = None
    inside = namespace
    try:
        if isinstance(what, str | typing.ForwardRef):
            found = namespace.find(written)
        else:
            # An alias is resolved in its own module, which may differ from the class's module. Its
            # arguments are resolved in the class's module.
            alias = typing.get_origin(what) or what
            args = [Reference(arg, namespace) for arg in typing.get_args(what)]
            values = dict(zip(alias.__type_params__, args, strict=False))
            inside = replace(namespace, module=alias.__module__, owner=_no_class, values=values)
            found = alias.__value__
        _add(hint, found, inside, text)
    except UNREADABLE as error:
        if isinstance(error, NameError) and namespace.optional:
            return
        hint.error = str(error) or type(error).__name__
        hint.unresolved = Reference(what, namespace)


def _add_annotated(
    hint: Hint, inner: Any, marks: Iterable[Any], namespace: Namespace, text: str
) -> None:
    """Add an `Annotated`, whose marks are axes, names, a spec, or a buffer mark."""
    axes: Axes | None = None
    # Python joins nested `Annotated`s, so the outermost mark is the last.
    for mark in reversed(tuple(marks)):
        if isinstance(mark, PartitionSpec) and namespace.spec is None:
            namespace = replace(namespace, spec=mark)
        elif isinstance(mark, Names):
            hint.names = hint.names or mark
        elif isinstance(mark, Axes):
            axes = axes or mark
        elif mark is BUFFER:
            hint.buffer = True
    if axes is None:
        _add(hint, inner, namespace, text)
    else:
        hint.buffer |= parse(Reference(inner, namespace)).buffer
        _add_at_any_depth(hint, axes, namespace, text)


def _add_at_any_depth(hint: Hint, what: Any, namespace: Namespace, text: str = "") -> None:
    """Add what an expression specifies about the value itself, and about arrays below it."""
    hint.parts.setdefault(..., []).append(Reference(what, namespace))
    _add(hint, what, namespace, text)


def _add_arguments(hint: Hint, origin: type, what: Any, namespace: Namespace) -> None:
    """Add the arguments of a container, or of a generic class."""
    args = typing.get_args(what)
    if origin.__module__ not in ("builtins", "collections", "collections.abc"):
        # Only a generic class's own annotations show where its arguments apply.
        hint.generics.append(Reference(what, namespace))
        return
    arguments: dict[Hashable, Any] = dict(enumerate(args))
    if origin is not tuple or args[1:] == (...,):
        # The keys of a mapping are not leaves. The type of its values is the last argument.
        arguments = {None: args[-1 if issubclass(origin, abc.Mapping) else 0]}
    for key, argument in arguments.items():
        hint.parts.setdefault(key, []).append(Reference(argument, namespace))


_FIELDS: "WeakKeyDictionary[type, Hint]" = WeakKeyDictionary()


def field_hints(cls: type, hint: Hint = NOTHING) -> Hint:
    """Return the hints of a class's annotated fields, as the parts of one hint.

    Args:
        cls: a class. It is read only once if `hint` gives no values to its type parameters.
        hint: the annotation of an instance. It may give values to the type parameters of the class
            or of a base class: `Box[X]`.
    """
    known: MutableMapping[Any, Hint] = hint.parsed if hint.generics or hint.error else _FIELDS
    fields = known.get(cls)
    if fields is None:
        fields = known[cls] = _read(cls, hint)
    return fields


def _read(cls: type, hint: Hint) -> Hint:
    """Read the annotations of a class and its bases."""
    # The values of the type parameters of these classes. A parameter that a subclass passes to its
    # base (`class Sub(Box[U])`) has no value from an annotation `Box[X]`.
    values: dict[type, dict[TypeVar, Reference]] = {}
    # If the annotation cannot be resolved, the values are unknown, too. Each leaf that depends on
    # them then reports the annotation.
    if hint.unresolved is not None:
        values[cls] = dict.fromkeys(_parameters(cls), hint.unresolved)
    for generic, namespace in hint.generics:
        args = [Reference(arg, namespace) for arg in typing.get_args(generic)]
        origin: Any = typing.get_origin(generic)
        values[origin] = dict(zip(_parameters(origin), args, strict=False))
    fields = Hint()
    # Subclasses come first, so that a subclass's annotation of the same field wins. `object`, the
    # last class, has no annotations.
    for owner in cls.__mro__[:-1]:
        # Each annotation is read in the module of the class that contains it.
        namespace = Namespace(owner.__module__, ref(owner), values.get(owner, {}))
        for name, annotation in inspect.get_annotations(owner).items():
            fields.parts.setdefault(name, [Reference(annotation, namespace)])
        # A class may give values to a base's parameters, as in `class B(A[Float[Array, "p q"]])`.
        for base in vars(owner).get("__orig_bases__", ()):
            origin = typing.get_origin(base)
            for parameter, argument in zip(
                _parameters(origin), typing.get_args(base), strict=False
            ):
                # The annotation may give values that the class leaves open.
                used = (argument,) if isinstance(argument, TypeVar) else _parameters(argument)
                value = Reference(argument, namespace)
                known = all(variable in namespace.values for variable in used)
                if known and parse(value) is not NOTHING:
                    values.setdefault(origin, {})[parameter] = value
    return fields


def _parameters(cls: Any) -> tuple[TypeVar, ...]:
    return getattr(cls, "__parameters__", ())


# The axes of an array


class LeafAxes(NamedTuple):
    """The axes of one array: the attributes of `Leaf` from `axes` to `forms`."""

    axes: Axes
    annotated: bool = False
    unnamed: tuple[str, ...] = ()
    spec: PartitionSpec | None = None
    misfit: tuple[str, str] | None = None
    forms: tuple[ArrayForm, ...] = ()


Shape = tuple[int, ...]


def _misfit(shape: Shape, stack: tuple[str, ...], why: str, remedy: str) -> LeafAxes:
    """Return the axes of an array whose annotation does not apply."""
    return LeafAxes(_unknown(shape, stack), True, misfit=(why, remedy))


def leaf_axes(
    shape: Shape, dtype: DType, hint: Hint, given: Axes | OpenAxes | None, stack: tuple[str, ...]
) -> LeafAxes:
    """Return the axes of an array.

    The axes of its stacks come first, followed by its other axes. The other axes are `given`, or
    come from its annotation.
    """
    ndim = len(shape) - len(stack)
    fitting = [form for form in hint.forms if form.fits(ndim)]
    if given is not None:
        form = form_of_axes(given)
        if not form.fits(ndim):
            return _wrong_rank(shape, f'"{given}"', stack, [len(form.dims)])
        # Names from outside replace the annotation's names, but not its dtypes and specs.
        fitting = [form._replace(dtype=f.dtype, spec=f.spec) for f in fitting] or [form]
        return _chosen(shape, dtype, hint, fitting, stack)
    if hint.error:
        why = f"its annotation `{hint.text}` cannot be resolved: {hint.error}"
        remedy = (
            "write an annotation that Python can evaluate: define or import its names in the "
            "class's module, not in a function or under `TYPE_CHECKING`"
        )
        return _misfit(shape, stack, why, remedy)
    if not hint.forms:
        # A stack of scalars has only the axes of the stack, so all its axes are named.
        return LeafAxes(_unknown(shape, stack), bool(stack) and ndim == 0)
    for form in hint.forms:
        if form.wrong:
            remedy = "write only axis names in the annotation, and choose mesh axes with rules"
            return _misfit(shape, stack, f"{form.wrong}: `{hint.text}`", remedy)
    if not fitting:
        ranks = sorted({len(form.dims) for form in hint.forms})
        return _wrong_rank(shape, hint.text, stack, ranks)
    return _chosen(shape, dtype, hint, fitting, stack)


def _chosen(
    shape: Shape, dtype: DType, hint: Hint, fitting: Sequence[ArrayForm], stack: tuple[str, ...]
) -> LeafAxes:
    """Choose among the alternatives with the right rank, by dtype if their axes or specs differ."""
    options = _different(fitting, shape, stack)
    if len(options) > 1:
        # Dtypes are compared only here, since a single alternative names the axes of an array of
        # any dtype, such as the int8 weights of a quantized model.
        of_dtype = [form for form in fitting if dtype_fits(form.dtype, dtype)]
        options = _different(of_dtype, shape, stack) or options
    if len(options) == 1:
        return options[0]._replace(forms=tuple(fitting))
    texts = " or ".join(f'"{option.axes}"' for option in options)
    why = f"its annotation `{hint.text}` allows {texts} for an array of this rank and dtype"
    remedy = (
        "give the alternatives different ranks or dtypes, or name the axes with "
        "`Annotated[Array, ft.Axes(...)]`"
    )
    return _misfit(shape, stack, why, remedy)


def _different(forms: Sequence[ArrayForm], shape: Shape, stack: tuple[str, ...]) -> list[LeafAxes]:
    """Return the distinct axes and specs that some alternatives give to an array.

    `Float[Array, "a"] | Int[Array, "a"]` is not ambiguous.
    """
    different: dict[tuple[Axes, PartitionSpec | None], LeafAxes] = {}
    for form in forms:
        option = _by_form(form, shape, stack)
        different[option.axes, option.spec] = option
    return list(different.values())


def _by_form(form: ArrayForm, shape: Shape, stack: tuple[str, ...]) -> LeafAxes:
    """Return the axes that one alternative of an annotation gives to an array."""
    names: list[str | None] = list(stack)
    unnamed = [""] * len(stack)
    dims = form.dims_for(len(shape) - len(stack))
    for dim, size in zip(dims, shape[len(stack) :], strict=True):
        # A broadcast dimension (`#b` with size 1) cannot be sharded, so it has no name here.
        name = None if dim.broadcast and size == 1 else dim.name
        names.append(name)
        unnamed.append("" if name else dim.token)
    spec = form.spec
    if spec is not None and stack:
        # The annotation describes one layer, but the array also has the stacks' leading dimensions.
        spec = PartitionSpec(*[None] * len(stack), *spec)
    if not any(unnamed):
        unnamed = []
    return LeafAxes(Axes(*names), True, tuple(unnamed), spec)


def _unknown(shape: Shape, stack: tuple[str, ...]) -> Axes:
    """Return the axes of an array if only the axes of its stacks are known."""
    ndim = len(shape)
    # The axes are truncated, since a misfit may have fewer dimensions than its stacks.
    return Axes(*(*stack, *[None] * ndim)[:ndim])


# The usual reason for too many dimensions is `eqx.filter_vmap` of a constructor.
STACK = (
    "if the array holds several layers (made with `vmap` or `scan`), wrap their module in "
    "`ft.Stacked` or create it with `ft.stack`, or name the axis of the stack for the module's "
    'class (`names={cls: ft.names("layers")}`)'
)


def _wrong_rank(shape: Shape, hint: str, stack: tuple[str, ...], ranks: Sequence[int]) -> LeafAxes:
    have = len(shape)
    after = ""
    if stack:
        after = f" after the axes `{' '.join(stack)}` of its stack"
    why = f"has {count(have, 'dimension')}, but `{hint}` has {' or '.join(map(str, ranks))}{after}"
    remedy = "change the annotation or the array"
    if have > max(ranks) + len(stack):
        remedy = (
            f"{STACK}; otherwise {remedy} (or the axes of its `StateRef`), name its dimensions in "
            "the layout (`names={cls: ft.names(...)}`), or lay it out with a spec (`P(...)`)"
        )
    return _misfit(shape, stack, why, remedy)
