"""`as_filter` turns a value that a user writes as a filter into a `Filter`.

A glob, a path, a class or a function ─► a predicate over leaves. Other filters select arrays by a
property: axes, shape, dtype, or whether they are trained. `meant` suggests a correction for a
filter that matches nothing.
"""

import re
import types
import typing
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from functree.argument_checks import EXTENT, check_callback, is_number, shown
from functree.errors import USERS_ERRORS, Problem, RuleError, error_text
from functree.labels.leaves import Leaf
from functree.tree.arrays import Tree, value_text
from functree.tree.axes import is_axis_name
from functree.tree.globs import glob_pattern, literal_text, match_text, meant_glob
from functree.tree.interfaces import HoldsState
from functree.tree.paths import Keys, Path, tokens


class Filter:
    """Base class of filters, which are predicates over leaves.

    Filters are hashable and compare by value. Combine them with `&`, `|` and `~`.

    Examples:
        >>> ft.glob("**.bias") | ft.larger_than(100) & ~ft.has_axis("embed")
        glob('**.bias') | larger_than(100) & ~has_axis('embed')
    """

    __slots__ = ()

    parts: "tuple[Filter, ...]" = ()
    """The filters that this filter combines."""

    @abstractmethod
    def __call__(self, leaf: Leaf, /) -> bool:
        """Return whether the leaf matches."""

    def __and__(self, other: Any) -> "Filter":
        return _joined(Conjunction, self, other)

    def __rand__(self, other: Any) -> "Filter":
        return _joined(Conjunction, other, self)

    def __or__(self, other: Any) -> "Filter":
        return _joined(Disjunction, self, other)

    def __ror__(self, other: Any) -> "Filter":
        return _joined(Disjunction, other, self)

    def __invert__(self) -> "Filter":
        return Negation((self,))


@dataclass(frozen=True, repr=False)
class Conjunction(Filter):
    """Filter that matches a leaf if all its parts match the leaf. `&` creates it."""

    parts: tuple[Filter, ...]

    def __call__(self, leaf: Leaf, /) -> bool:
        return all(part(leaf) for part in self.parts)

    def __repr__(self) -> str:
        # `&` binds more tightly than `|`, as in Python.
        return " & ".join(_operand(part, Disjunction) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Disjunction(Filter):
    """Filter that matches a leaf if at least one of its parts matches the leaf. `|` creates it."""

    parts: tuple[Filter, ...]

    def __call__(self, leaf: Leaf, /) -> bool:
        return any(part(leaf) for part in self.parts)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@dataclass(frozen=True, repr=False)
class Negation(Filter):
    """Filter that matches a leaf if its single part does not match the leaf. `~` creates it."""

    parts: tuple[Filter, ...]

    def __call__(self, leaf: Leaf, /) -> bool:
        return not self.parts[0](leaf)

    def __repr__(self) -> str:
        return f"~{_operand(self.parts[0], Conjunction | Disjunction)}"


def _operand(part: Filter, weaker: "type | types.UnionType") -> str:
    """Return a filter's text as an operand, in parentheses if it is an instance of `weaker`."""
    text = repr(part)
    return f"({text})" if isinstance(part, weaker) else text


def _joined(kind: "type[Conjunction] | type[Disjunction]", *operands: Any) -> Filter:
    """Join several filters into one.

    `a & b & c` is one filter with three parts, with or without parentheses.
    """
    parts: list[Filter] = []
    for written in operands:
        if written is ...:
            raise RuleError(
                "`...` cannot be combined with other filters: "
                "use it alone, as the last filter of an ordered list"
            )
        part = as_filter(written)
        if isinstance(part, kind):
            parts += part.parts
        else:
            parts.append(part)
    return kind(tuple(parts))


@dataclass(frozen=True, repr=False)
class Glob(Filter):
    """Filter for leaves whose path matches a glob. `ft.glob` creates it."""

    pattern: str

    def __post_init__(self) -> None:
        # An invalid glob raises an error here, before any tree is read.
        glob_pattern(self.pattern)

    def __call__(self, leaf: Leaf, /) -> bool:
        # If the pattern begins with a name above the leaf, so does the path that it must match.
        path = leaf.named(first_key(self.pattern)) or leaf.seen
        if path is None:
            return False
        return glob_pattern(self.pattern).fullmatch(match_text(path)) is not None

    def __repr__(self) -> str:
        return f"glob({self.pattern!r})"


@lru_cache(maxsize=4096)
def first_key(pattern: str) -> Path:
    """Return the first key of a glob as a path.

    The path is empty if the glob is empty or begins with a wildcard.
    """
    parts = list(tokens(pattern))
    if not parts or ("*" in parts[0] and parts[0][0] not in '"['):
        return Path()
    return Path.parse(parts[0])


def glob(pattern: str) -> Filter:
    """Select leaves whose path matches a glob.

    `*` matches any text within one part, and `**` matches any number of parts. Keys must not
    contain the control characters U+001E and U+001F.

    Args:
        pattern: parts joined by dots. Quote each string key that is not an identifier. Wildcards in
            quotes are literal.

    Raises:
        RuleError: if `pattern` is not a string.
        RuleError: if a part of the pattern cannot be parsed.

    Examples:
        >>> layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        >>> static, biases, rest = ft.split(layer, ft.glob("**.bias"), ...)
        >>> biases.weight is None, rest.bias is None
        (True, True)
    """
    if not isinstance(pattern, str):
        raise RuleError(
            f"glob: the pattern must be a string such as `'**.bias'`, not {shown(pattern)}"
        )
    return Glob(pattern)


@dataclass(frozen=True, repr=False)
class Regex(Filter):
    """Filter for leaves whose path matches a regular expression.

    `ft.regex` creates it, and `as_filter` creates it from a compiled expression.

    Attributes:
        pattern: the expression.
        separator: the text that joins the keys of a path. The joined text is searched for the
            expression. Without a separator, as for a compiled expression, the expression must match
            the whole path.
    """

    pattern: re.Pattern[str]
    separator: str | None = None

    def __call__(self, leaf: Leaf, /) -> bool:
        if leaf.seen is None:
            return False
        if self.separator is None:
            return self.pattern.fullmatch(str(leaf.seen)) is not None
        # Other libraries do not quote keys, so a quoted key would never match their patterns.
        return self.pattern.search(self.separator.join(map(str, leaf.seen))) is not None

    def __repr__(self) -> str:
        if self.separator is None:
            return repr(self.pattern)
        if self.separator == ".":
            return f"regex({self.pattern.pattern!r})"
        return f"regex({self.pattern.pattern!r}, separator={self.separator!r})"


def regex(pattern: str, separator: str = ".") -> Filter:
    """Select leaves whose path contains a match of a regular expression, as in `re.search`.

    The partition rules of EasyLM, EasyDeL and similar libraries contain such expressions. To use
    them, pass `separator="/"`. Expressions from big_vision must match the whole path, so
    write `^(?:...)$` around them. A compiled expression (`re.compile`) is also a filter, and must
    match the whole path.

    Args:
        pattern: the regular expression.
        separator: the text that joins the keys of a path.

    Raises:
        RuleError: if an argument is not a string.
        RuleError: if `pattern` is not a valid regular expression.

    Examples:
        >>> layout = ft.StateSharding(
        ...     {
        ...         ft.regex("attention/(wq|wk)/kernel", "/"): ft.P("data"),
        ...         ...: ft.P(),
        ...     }
        ... )
        >>> model = {"attention": {"wq": {"kernel": jnp.ones((4, 8))}}}
        >>> ft.plan(model, layout, {"data": 2}).specs
        {'attention': {'wq': {'kernel': P('data', None)}}}
    """
    if not isinstance(pattern, str) or not isinstance(separator, str):
        raise RuleError(
            "regex: the pattern and the separator must be strings, not "
            f"{shown(pattern)} and {shown(separator)}"
        )
    try:
        return Regex(re.compile(pattern), separator)
    except re.error as error:
        raise RuleError(f"regex({pattern!r}): invalid regular expression: {error}") from error


@dataclass(frozen=True, repr=False)
class ClassFilter(Filter):
    """Filter for leaves below an instance of one of its classes. `ft.under` creates it."""

    classes: tuple[type, ...]

    def __call__(self, leaf: Leaf, /) -> bool:
        return leaf.is_below(self.classes)

    def __repr__(self) -> str:
        return f"under({' | '.join(cls.__name__ for cls in self.classes)})"


def under(cls: "type | types.UnionType") -> Filter:
    """Select leaves at any depth below an instance of a class.

    Args:
        cls: the class, or several classes joined by `|`, such as `Linear | Conv`.

    Raises:
        RuleError: if `cls` is neither a class nor classes joined by `|`.

    Examples:
        >>> ft.under(eqx.nn.Linear)
        under(Linear)
    """
    classes: tuple[Any, ...] = (cls,)
    if typing.get_origin(cls) in (types.UnionType, typing.Union):
        classes = typing.get_args(cls)
    if not all(isinstance(c, type) for c in classes):
        raise RuleError(
            "a class filter must be a class without type arguments, or such classes joined by `|`, "
            f"not {cls!r}"
        )
    return ClassFilter(classes)


@dataclass(frozen=True, repr=False)
class FunctionFilter(Filter):
    """Filter that calls a function `(path, leaf) -> bool`."""

    function: Callable[[Path, Any], Any]

    def __call__(self, leaf: Leaf, /) -> bool:
        return leaf.seen is not None and call_filter(self.function, leaf.seen, leaf.value)

    def __repr__(self) -> str:
        return _name(self.function)


def call_filter(function: Callable[[Path, Any], object], path: Path, value: Tree) -> bool:
    """Call a filter function with the path of an array or a node, and the array or node itself.

    Raises:
        RuleError: if the function raises an error. Its own error does not name the path.
    """
    try:
        return bool(function(path, value))
    except USERS_ERRORS as error:
        name = _name(function)
        remedy = "write a function of a path and the value at this path, which returns a bool: "
        remedy += "`lambda path, value: ...`"
        why = f"{name} raised {error_text(error)}"
        problem = Problem(path, getattr(value, "shape", None), value_text(value), why, remedy)
        raise RuleError(f"the filter function {name} failed", [problem]) from error


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", repr(function))


@dataclass(frozen=True, repr=False)
class Everything(Filter):
    """Filter for all leaves, written as `...`."""

    def __call__(self, leaf: Leaf, /) -> bool:
        return True

    def __repr__(self) -> str:
        return "..."


def patterns(item: Filter) -> Iterator[Filter]:
    """Return the globs and regular expressions in a filter."""
    return (part for part in naming(item) if not isinstance(part, ClassFilter))


def naming(item: Filter) -> Iterator[Filter]:
    """Yield the patterns and class filters in a filter.

    Unlike filters for a property, they refer to one particular tree.
    """
    for part in atoms(item):
        if isinstance(part, Glob | Regex | ClassFilter):
            yield part


def atoms(item: Filter) -> Iterator[Filter]:
    """Yield the innermost parts of a filter, which do not combine other filters."""
    if not item.parts:
        yield item
    for part in item.parts:
        yield from atoms(part)


def first_name(pattern: Filter) -> Path:
    """Return the first key of a glob as a path; for other filters, an empty path."""
    return first_key(pattern.pattern) if isinstance(pattern, Glob) else Path()


def names(item: Filter, leaf: Leaf) -> bool:
    """Return whether a pattern in a filter begins with a name above a leaf and matches the leaf.

    Such a name refers to an argument, a field of a training state, or a key above a training state.
    """
    if not leaf.roots:
        return False
    for pattern in patterns(item):
        if leaf.named(first_name(pattern)) is not None and pattern(leaf):
            return True
    return False


class FirstMatch:
    """Callable that returns the index of the first filter that matches a leaf, or None.

    If a leaf has no path that filters match, only `...` and patterns that begin with a name above
    the leaf match it.
    """

    def __init__(self, filters: Sequence[Filter]):
        # Globs without wildcards go into a dict, since a tree of specs has one such glob per leaf.
        self._literals: dict[str, int] = {}
        # All other filters. A glob comes with its regular expression, the text that a match must
        # end with, and its first key.
        self._others: list[tuple[int, Filter, re.Pattern[str] | None, str, Path]] = []
        for i, item in enumerate(filters):
            literal, expression, end = None, None, ""
            if isinstance(item, Glob):
                literal, expression = literal_text(item.pattern), glob_pattern(item.pattern)
                end = literal_text(".".join(list(tokens(item.pattern))[-1:])) or ""
            if literal is None:
                self._others.append((i, item, expression, end, first_name(item)))
            else:
                self._literals.setdefault(literal, i)  # the first of two equal globs decides

    def __call__(self, leaf: Leaf) -> int | None:
        seen = None if leaf.seen is None else match_text(leaf.seen)
        least = None if seen is None else self._literals.get(seen)
        # The texts of the paths from names above the leaf. Most leaves have no such names.
        named: dict[Keys, str] = {}
        if leaf.roots:
            named = {root.path[:1]: match_text(root.path) for root in reversed(leaf.roots)}
            texts = list(named.values())
            if seen is not None and (leaf.seen or ())[:1] not in named:
                texts.append(seen)
            found = [self._literals[text] for text in texts if text in self._literals]
            least = min(found, default=None)
        for i, item, expression, end, first in self._others:
            if least is not None and i > least:
                break
            # This runs for each leaf and filter, so it compares the last key first, which rules out
            # most globs.
            if expression is not None:
                text = named.get(first, seen) if named else seen
                fits = text is not None and text.endswith(end) and expression.fullmatch(text)
            elif seen is not None or isinstance(item, Everything):
                fits = item(leaf)
            else:
                fits = names(item, leaf) and item(leaf)
            if fits:
                return i
        return least


FilterLike = (
    Filter
    | str
    | re.Pattern[str]
    | type
    | types.UnionType
    | types.EllipsisType
    | Path
    | Callable[[Path, Any], Any]
)
"""The values that a user can write as a filter."""


def as_filter(written: Any) -> Filter:
    """Convert a user's value to a `Filter`. Raise RuleError if it cannot be converted."""
    match written:
        case Filter():
            return written
        case str():
            return Glob(written)
        case re.Pattern() if isinstance(written.pattern, str):
            return Regex(written)
        case type() | types.UnionType():
            return under(written)
        case types.EllipsisType():
            return Everything()
        case Path():
            return Glob(str(written))
    # `typing.Union[A, B]` and `Box[int]` are not instances of the classes above.
    if typing.get_origin(written) is not None:
        return under(written)
    # Layouts contain filters and are cache keys, so a function must be hashable.
    if callable(written) and isinstance(written, Hashable):
        check_callback(written, "a filter")
        return FunctionFilter(written)
    raise RuleError(
        f"{written!r} is not a filter: write a glob (`'**.bias'`), a compiled regular "
        "expression, a class, a hashable callable `(path, leaf) -> bool`, `...`, "
        "or one of functree's filters"
    )


def meant(item: Filter, leaves: Iterable[Leaf]) -> str:
    """Return `; did you mean ...?` with a similar glob that matches one of the leaves.

    For a class filter, the text instead names a class of the tree with the same name. The text is
    empty if nothing is similar, or if the filter is neither a glob nor a class.
    """
    if isinstance(item, ClassFilter):
        return _of_that_name(item, leaves)
    if not isinstance(item, Glob):
        return ""
    paths: dict[Path, None] = {}
    for leaf in leaves:
        if leaf.seen is not None:
            paths[leaf.seen] = None
        if first_name(item):  # a glob that begins with a wildcard matches no path from a root
            paths.update(dict.fromkeys(root.path for root in leaf.roots))
    return meant_glob(item.pattern, paths)


def _of_that_name(item: ClassFilter, leaves: Iterable[Leaf]) -> str:
    """Return the end of a message if the tree has a different class with the same name."""
    names = {cls.__name__ for cls in item.classes}
    for leaf in leaves:
        for cls in leaf.within:
            if cls.__name__ in names:
                # A notebook's cell that runs again defines its classes again.
                return (
                    f"; the tree contains instances of another class, `{cls.__module__}."
                    f"{cls.__qualname__}`: use this class or, if you defined it again, rebuild the "
                    "tree"
                )
    return ""


def check_wrt(wrt: FilterLike, leaves: Sequence[Leaf], whose: str) -> None:
    """Check that each pattern in a filter matches a leaf.

    Without this check, a misspelled pattern in `~ft.glob(...)` would train parameters that should
    be frozen. Filters for a class or a property may match no leaf, since one filter may serve many
    models.

    Args:
        wrt: the filter.
        leaves: all leaves of the differentiated arguments or of the trained model.
        whose: the owner of the leaves, for the error, such as `argument 0`.

    Raises:
        RuleError: if a pattern matches no leaf.
    """
    for pattern in patterns(as_filter(wrt)):
        if not any(map(pattern, leaves)):
            near = meant(pattern, leaves)
            raise RuleError(f"wrt={wrt!r}: {pattern!r} matches no leaf of {whose}{near}")


# Filters for a property


@dataclass(frozen=True, repr=False)
class Predicate(Filter):
    """Filter that calls a function of the leaf.

    Attributes:
        text: the text of the filter, as a user writes it.
        test: a function of the leaf and the values in `wanted`. It is a module-level function, so
            that filters compare by value.
        wanted: the arguments of the filter.
    """

    text: str
    test: Callable[..., bool]
    wanted: tuple[Any, ...] = ()

    def __call__(self, leaf: Leaf, /) -> bool:
        return self.test(leaf, *self.wanted)

    def __repr__(self) -> str:
        return self.text


def has_axis(name: str) -> Filter:
    """Select leaves with an axis of this name.

    Raises:
        RuleError: if `name` is not an axis name.

    Examples:
        >>> ft.has_axis("embed")
        has_axis('embed')
    """
    if not is_axis_name(name):
        raise RuleError(f"has_axis({name!r}): the axis must be an identifier other than `_`")
    return Predicate(f"has_axis({name!r})", _has_axis, (name,))


def has_ndim(ndim: int) -> Filter:
    """Select leaves with this number of dimensions.

    Raises:
        RuleError: if `ndim` is not a non-negative integer.

    Examples:
        >>> ft.has_ndim(2)
        has_ndim(2)
    """
    if not EXTENT.fits(ndim):
        raise RuleError(
            f"has_ndim({ndim!r}): the number of dimensions must be a non-negative integer"
        )
    return Predicate(f"has_ndim({ndim})", _has_ndim, (int(ndim),))


def has_dtype(dtype: Any) -> Filter:
    """Select leaves with this dtype, or with a kind of dtype such as `jnp.floating`.

    Raises:
        RuleError: if `dtype` is neither a dtype nor a kind of dtype.

    Examples:
        >>> ft.has_dtype(jnp.floating)
        has_dtype(floating)
    """
    kind = _dtype(dtype)
    return Predicate(f"has_dtype({kind.__name__})", _has_dtype, (kind,))


def _dtype(written: Any) -> Any:
    """Return the NumPy class of a dtype, or of a kind of dtype such as `jnp.floating`."""
    # `"float32"`, `jnp.float32` and `np.dtype("float32")` have the same class, so their filters are
    # equal.
    if isinstance(written, type) and issubclass(written, np.generic):
        return written
    try:
        if written is not None:  # NumPy reads None as float64
            return jnp.dtype(written).type
    except (TypeError, ValueError):
        pass
    raise RuleError(
        f"has_dtype({written!r}): the argument must be a dtype, or a kind of dtype such as "
        "`jnp.floating`"
    )


def larger_than(elements: int) -> Filter:
    """Select leaves with more than this number of elements.

    Raises:
        RuleError: if `elements` is not a finite, non-negative number.

    Examples:
        >>> ft.larger_than(2**20)
        larger_than(1048576)
    """
    if not is_number(elements) or elements < 0:
        raise RuleError(
            f"larger_than({shown(elements)}): the number of elements must be a finite, "
            "non-negative number"
        )
    return Predicate(f"larger_than({elements})", _larger_than, (elements,))


def _has_axis(leaf: Leaf, name: str) -> bool:
    return name in leaf.axes


def _has_ndim(leaf: Leaf, ndim: int) -> bool:
    return len(leaf.shape) == ndim


def _has_dtype(leaf: Leaf, dtype: Any) -> bool:
    return bool(jnp.issubdtype(leaf.value.dtype, dtype))


def _larger_than(leaf: Leaf, elements: float) -> bool:
    return leaf.value.size > elements


def _trainable(leaf: Leaf) -> bool:
    return not leaf.buffer and not _state(leaf) and _has_dtype(leaf, jnp.inexact)


def _state(leaf: Leaf) -> bool:
    return leaf.is_below(HoldsState)


def _buffer(leaf: Leaf) -> bool:
    return leaf.buffer


is_trainable: Filter = Predicate("is_trainable", _trainable)
"""Filter for floating-point and complex arrays that are neither buffers nor state.

Examples:
    >>> ~ft.is_trainable
    ~is_trainable
"""

is_buffer: Filter = Predicate("is_buffer", _buffer)
"""Filter for arrays annotated as `ft.Buffer`.

Examples:
    >>> static, buffers, rest = ft.split(
    ...     {"w": jnp.ones(2)}, ft.is_buffer, ...
    ... )
    >>> buffers
    {'w': None}
"""


is_state: Filter = Predicate("is_state", _state)
"""Filter for arrays in an `ft.State` and for the initial values of `ft.StateRef`s.

Examples:
    >>> model = {"count": ft.StateRef(0), "w": jnp.ones(2)}
    >>> static, state, rest = ft.split(model, ft.is_state, ...)
    >>> rest["count"].init is None, rest["w"].shape
    (True, (2,))
"""
