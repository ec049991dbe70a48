"""What a user writes for a filter ─► a `Filter`: a predicate over leaves, by path, class or
function."""

import re
import types
import typing
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from functree.argument_checks import check_callback, shown
from functree.errors import USERS_ERRORS, RuleError, error_text
from functree.labels.leaf import Leaf
from functree.tree.globs import glob_pattern, match_text
from functree.tree.paths import Path, tokens


class Filter:
    """A predicate over leaves. Filters are hashable and equal by value, and are combined with `&`,
    `|` and `~`.

    Examples:
        >>> ft.glob("**.bias") | ft.larger_than(100) & ~ft.has_axis("embed")
        glob('**.bias') | larger_than(100) & ~has_axis('embed')
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, leaf: Leaf, /) -> bool:
        """Whether the leaf matches."""

    def __and__(self, other: Any) -> "Filter":
        return _joined(Conjunction, self, other)

    def __rand__(self, other: Any) -> "Filter":
        return _joined(Conjunction, other, self)

    def __or__(self, other: Any) -> "Filter":
        return _joined(Disjunction, self, other)

    def __ror__(self, other: Any) -> "Filter":
        return _joined(Disjunction, other, self)

    def __invert__(self) -> "Filter":
        return Negation(self)


@dataclass(frozen=True, repr=False)
class Conjunction(Filter):
    """Leaves that all parts match; made by `&`."""

    parts: tuple[Filter, ...]

    def __call__(self, leaf: Leaf, /) -> bool:
        return all(part(leaf) for part in self.parts)

    def __repr__(self) -> str:
        # `&` binds more tightly than `|`, as in Python.
        return " & ".join(_operand(part, Disjunction) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Disjunction(Filter):
    """Leaves that at least one part matches; made by `|`."""

    parts: tuple[Filter, ...]

    def __call__(self, leaf: Leaf, /) -> bool:
        return any(part(leaf) for part in self.parts)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@dataclass(frozen=True, repr=False)
class Negation(Filter):
    """Leaves that the part does not match; made by `~`."""

    part: Filter

    def __call__(self, leaf: Leaf, /) -> bool:
        return not self.part(leaf)

    def __repr__(self) -> str:
        return f"~{_operand(self.part, Conjunction | Disjunction)}"


def _operand(part: Filter, weaker: "type | types.UnionType") -> str:
    """A filter as an operand: in brackets if it is of a class whose operator binds less tightly."""
    text = repr(part)
    return f"({text})" if isinstance(part, weaker) else text


def _joined(kind: "type[Conjunction] | type[Disjunction]", *operands: Any) -> Filter:
    """Several filters as one. `a & b & c`, with brackets or without, is one filter of three
    parts."""
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
    """A glob over the parts of a path; made by `ft.glob`."""

    pattern: str

    def __post_init__(self) -> None:
        # Raises here for an invalid glob, and not only when a tree is read.
        glob_pattern(self.pattern)

    def __call__(self, leaf: Leaf, /) -> bool:
        matches = glob_pattern(self.pattern).fullmatch
        return any(map(matches, map(match_text, leaf.patterned)))

    def __repr__(self) -> str:
        return f"glob({self.pattern!r})"


@dataclass(frozen=True, repr=False)
class ExactPath(Filter):
    """The leaf at a path whose text is not a glob, because it has a key such as an Enum, which has
    no literal."""

    path: Path

    def __call__(self, leaf: Leaf, /) -> bool:
        return self.path in leaf.patterned

    def __repr__(self) -> str:
        return f"Path({tuple(self.path)!r})"


def path_glob(path: Path) -> "str | Path":
    """The glob that matches only this path; the path itself if its text cannot be read."""
    text = str(path)
    try:
        glob_pattern(text)
    except RuleError:
        return path
    return text


def glob(pattern: str) -> Filter:
    """Leaves whose path matches a glob: `*` matches any text within one part, `**` any number of
    parts.

    Args:
        pattern: parts joined by dots; a key that is not an identifier is quoted, and has no
            wildcards then.

    Raises:
        RuleError: a part cannot be read.

    Examples:
        >>> layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        >>> static, biases, rest = ft.split(layer, ft.glob("**.bias"), ...)
        >>> biases.weight is None, rest.bias is None
        (True, True)
    """
    if not isinstance(pattern, str):
        raise RuleError(f"`glob` takes a text such as `'**.bias'`, not {shown(pattern)}")
    return Glob(pattern)


@dataclass(frozen=True, repr=False)
class Regex(Filter):
    """Leaves whose path as text matches a compiled regular expression, from its beginning to its
    end."""

    pattern: re.Pattern[str]

    def __call__(self, leaf: Leaf, /) -> bool:
        return any(map(self.pattern.fullmatch, map(str, leaf.patterned)))

    def __repr__(self) -> str:
        return repr(self.pattern)


@dataclass(frozen=True, repr=False)
class ClassFilter(Filter):
    """Leaves below an instance of some classes; made by `ft.under`."""

    classes: tuple[type, ...]

    def __call__(self, leaf: Leaf, /) -> bool:
        return leaf.is_below(self.classes)

    def __repr__(self) -> str:
        return f"under({' | '.join(cls.__name__ for cls in self.classes)})"


def under(cls: "type | types.UnionType") -> Filter:
    """Leaves anywhere below an instance of a class, or of one of several classes (`Linear | Conv`).

    Raises:
        RuleError: the argument is not a class.

    Examples:
        >>> ft.under(eqx.nn.Linear)
        under(Linear)
    """
    classes: tuple[Any, ...] = (cls,)
    if typing.get_origin(cls) in (types.UnionType, typing.Union):
        classes = typing.get_args(cls)
    if not all(isinstance(c, type) for c in classes):
        hint = bare_class(classes)
        raise RuleError(
            f"a filter by class takes a class, or several joined by `|`, not {cls!r}{hint}"
        )
    return ClassFilter(classes)


def bare_class(classes: Iterable[Any]) -> str:
    """The end of an error about classes with arguments, such as `Box[int]`; empty if there is
    none."""
    for cls in classes:
        origin = typing.get_origin(cls)
        if isinstance(origin, type):
            return (
                f"; write `{origin.__name__}`: "
                "the arguments of a class are not known of its instances"
            )
    return ""


@dataclass(frozen=True, repr=False)
class FunctionFilter(Filter):
    """Leaves for which a function `(path, leaf) -> bool` is true."""

    function: Callable[[Path, Any], Any]

    def __call__(self, leaf: Leaf, /) -> bool:
        return any(self.is_true(path, leaf) for path in leaf.patterned)

    def is_true(self, path: Path, leaf: Leaf) -> bool:
        """Whether the function is true of one path of a leaf. Raises RuleError if it fails."""
        try:
            return bool(self.function(path, leaf.value))
        except USERS_ERRORS as error:
            # What it says of its own arguments would name neither the leaf nor the filter.
            why = f"{self!r} raised {error_text(error)}"
            remedy = "a filter function takes the path and the array of a leaf, and returns a bool"
            problem = leaf.problem(why, f"{remedy}: `lambda path, leaf: ...`")
            raise RuleError(f"the filter function {self!r} failed", [problem]) from error

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


class Everything(Filter):
    """All leaves; written as `...`."""

    def __call__(self, leaf: Leaf, /) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Everything)

    def __hash__(self) -> int:
        return hash(Everything)

    def __repr__(self) -> str:
        return "..."


def patterns(item: Filter) -> Iterator[Filter]:
    """The globs, paths and regular expressions in a filter."""
    return (part for part in naming(item) if not isinstance(part, ClassFilter))


def naming(item: Filter) -> Iterator[Filter]:
    """The parts of a filter that name something of one tree: patterns and classes, and not
    properties such as axes."""
    match item:
        case Glob() | ExactPath() | Regex() | ClassFilter():
            yield item
        case Conjunction() | Disjunction():
            for part in item.parts:
                yield from naming(part)
        case Negation():
            yield from naming(item.part)


def negated_patterns(item: Filter) -> Iterator[Filter]:
    """The patterns in a filter that say what it does not match."""
    match item:
        case Negation():
            yield from patterns(item.part)
        case Conjunction() | Disjunction():
            for part in item.parts:
                yield from negated_patterns(part)


def may_name(item: Filter, field: str) -> bool:
    """Whether a filter may name a field, such as `opt_state`; see `names_field`."""
    match item:
        case Glob():
            return any(_writes(part, field) for part in tokens(item.pattern))
        case ExactPath():
            return field in item.path
        case Regex():
            return field in item.pattern.pattern
        case FunctionFilter():
            return True
        case Conjunction() | Disjunction():
            return any(may_name(part, field) for part in item.parts)
        case Negation():
            return may_name(item.part, field)
    return False


def names_field(item: Filter, leaf: Leaf) -> bool:
    """Whether a filter, or one that it is made of, matches a leaf by naming the field that the leaf
    is in: the first key of the last of its paths.

    A pattern names the field if it is written there: `opt_state.**` and `**.opt_state.*.mu.**` do,
    `**.bias` does not. A function names it if it is true of the path, and not of the path below.
    """
    path = leaf.patterned[-1]
    match item:
        case Glob() | ExactPath() | Regex():
            return may_name(item, path[0]) and item(leaf)
        case FunctionFilter():
            # Of this path alone: the function may be true of another one, such as the whole path.
            below = Path(path[1:])
            # Below a field that is a leaf itself there is no path.
            return item.is_true(path, leaf) and not (below and item.is_true(below, leaf))
        case Conjunction() | Disjunction():
            return any(names_field(part, leaf) for part in item.parts)
        case Negation():
            return names_field(item.part, leaf)
    return False


def _writes(part: str, field: str) -> bool:
    """Whether a part of a glob is text that matches a field, and not only wildcards."""
    if not part.strip("*"):
        return False
    return glob_pattern(part).fullmatch(match_text(Path((field,)))) is not None


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
"""What a user can write for a filter."""


def as_filter(written: Any) -> Filter:
    """What a user wrote for a filter ─► the filter. Raises RuleError for anything that is not a
    filter."""
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
            pattern = path_glob(written)
            return Glob(pattern) if isinstance(pattern, str) else ExactPath(pattern)
    # `typing.Union[A, B]` and `Box[int]` are not instances of the classes above.
    if typing.get_origin(written) is not None:
        return under(written)
    # Filters are compared by value, and a layout with a filter is a key of caches. So a function
    # has to be hashable.
    if callable(written) and isinstance(written, Hashable):
        check_callback(written, "a filter")
        return FunctionFilter(written)
    raise RuleError(
        f"{written!r} is not a filter: write a glob (`'**.bias'`), a compiled regular "
        "expression, a class, a callable `(path, leaf) -> bool` that can be hashed, `...`, "
        "or one of functree's filters"
    )
