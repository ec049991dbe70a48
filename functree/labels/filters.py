"""What a user writes for a filter ─► a `Filter`: a predicate over leaves, by path, class or
function; and what may be meant by one that matches nothing."""

import re
import types
import typing
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from functree.argument_checks import check_callback, shown
from functree.errors import USERS_ERRORS, RuleError, did_you_mean, error_text
from functree.labels.leaf import Leaf
from functree.tree.globs import glob_pattern, literal_text, match_text, meant_glob
from functree.tree.paths import Keys, Path, tokens


class Filter:
    """A predicate over leaves. Filters are hashable and equal by value, and are combined with `&`,
    `|` and `~`.

    Examples:
        >>> ft.glob("**.bias") | ft.larger_than(100) & ~ft.has_axis("embed")
        glob('**.bias') | larger_than(100) & ~has_axis('embed')
    """

    __slots__ = ()

    parts: "tuple[Filter, ...]" = ()
    """The filters that this one is made of."""

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
        return Negation((self,))


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
    """Leaves that its one part does not match; made by `~`."""

    parts: tuple[Filter, ...]

    def __call__(self, leaf: Leaf, /) -> bool:
        return not self.parts[0](leaf)

    def __repr__(self) -> str:
        return f"~{_operand(self.parts[0], Conjunction | Disjunction)}"


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
        path = pattern_path(leaf, first_key(self.pattern))
        if path is None:
            return False
        return glob_pattern(self.pattern).fullmatch(match_text(path)) is not None

    def __repr__(self) -> str:
        return f"glob({self.pattern!r})"


@lru_cache(maxsize=4096)
def first_key(pattern: str) -> Path:
    """The key with which a glob begins, as a path; empty if it begins with a wildcard, or is
    empty."""
    parts = list(tokens(pattern))
    if not parts or ("*" in parts[0] and parts[0][0] not in '"['):
        return Path()
    return Path.parse(parts[0])


def pattern_path(leaf: Leaf, first: Path) -> Path | None:
    """The path of a leaf that a pattern is matched with: a pattern that begins with a name above
    the leaf is matched with the path from there."""
    return leaf.named(first) or leaf.seen


@dataclass(frozen=True, repr=False)
class ExactPath(Filter):
    """The leaf at a path whose text is not a glob, because it has a key such as an Enum, which has
    no literal."""

    path: Path

    def __call__(self, leaf: Leaf, /) -> bool:
        return self.path == pattern_path(leaf, Path(self.path[:1]))

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
    """Leaves whose path matches a regular expression; made by `ft.regex`, or written as a compiled
    expression.

    Attributes:
        pattern: the expression.
        separator: the text between the keys of a path, in which the expression is found anywhere;
            None for a compiled expression, which matches the whole text of a path.
    """

    pattern: re.Pattern[str]
    separator: str | None = None

    def __call__(self, leaf: Leaf, /) -> bool:
        if leaf.seen is None:
            return False
        match = self.pattern.fullmatch if self.separator is None else self.pattern.search
        return match(self.text(leaf.seen)) is not None

    def text(self, path: Path) -> str:
        """The text of a path that the expression is for."""
        if self.separator is None:
            return str(path)
        # As other libraries join keys: a quoted key would never match their patterns.
        return self.separator.join(map(str, path))

    def __repr__(self) -> str:
        if self.separator is None:
            return repr(self.pattern)
        if self.separator == ".":
            return f"regex({self.pattern.pattern!r})"
        return f"regex({self.pattern.pattern!r}, separator={self.separator!r})"


def regex(pattern: str, separator: str = ".") -> Filter:
    """Leaves in whose path a regular expression is found, as `re.search` finds it.

    The tables of EasyLM, EasyDeL and similar libraries are lists of such expressions, with
    `separator="/"`. Those of big_vision match the whole path: write `^(?:...)$`. A compiled
    expression (`re.compile`) is a filter too, which matches the whole path.

    Args:
        pattern: the regular expression.
        separator: the text between the keys of a path.

    Raises:
        RuleError: the pattern is not a regular expression, or an argument is not a text.

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
            "`regex` takes a regular expression and a separator as texts, not "
            f"{shown(pattern)} and {shown(separator)}"
        )
    try:
        return Regex(re.compile(pattern), separator)
    except re.error as error:
        raise RuleError(f"regex({pattern!r}): not a regular expression: {error}") from error


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
        if leaf.seen is None:
            return False
        try:
            return bool(self.function(leaf.seen, leaf.value))
        except USERS_ERRORS as error:
            # What it says of its own arguments would name neither the leaf nor the filter.
            why = f"{self!r} raised {error_text(error)}"
            remedy = "a filter function takes the path and the array of a leaf, and returns a bool"
            problem = leaf.problem(why, f"{remedy}: `lambda path, leaf: ...`")
            raise RuleError(f"the filter function {self!r} failed", [problem]) from error

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


@dataclass(frozen=True, repr=False)
class Everything(Filter):
    """All leaves; written as `...`."""

    def __call__(self, leaf: Leaf, /) -> bool:
        return True

    def __repr__(self) -> str:
        return "..."


def patterns(item: Filter) -> Iterator[Filter]:
    """The globs, paths and regular expressions in a filter."""
    return (part for part in naming(item) if not isinstance(part, ClassFilter))


def naming(item: Filter) -> Iterator[Filter]:
    """The parts of a filter that name something of one tree: patterns and classes, and not
    properties such as axes."""
    for part in atoms(item):
        if isinstance(part, Glob | ExactPath | Regex | ClassFilter):
            yield part


def atoms(item: Filter) -> Iterator[Filter]:
    """The filters in a filter that are not made of others."""
    if not item.parts:
        yield item
    for part in item.parts:
        yield from atoms(part)


def negated_patterns(item: Filter) -> Iterator[Filter]:
    """The patterns in a filter that say what it does not match."""
    for part in item.parts:
        yield from patterns(part) if isinstance(item, Negation) else negated_patterns(part)


def first_name(pattern: Filter) -> Path:
    """The key with which a glob or a path begins, as a path; empty for anything else."""
    match pattern:
        case Glob():
            return first_key(pattern.pattern)
        case ExactPath():
            return Path(pattern.path[:1])
    return Path()


def names(item: Filter, leaf: Leaf) -> bool:
    """Whether a pattern in a filter matches a leaf by a name above it: an argument, a field of a
    training state, or a key above one."""
    if not leaf.roots:
        return False
    for pattern in patterns(item):
        if leaf.named(first_name(pattern)) is not None and pattern(leaf):
            return True
    return False


class FirstMatch:
    """A function from a leaf to the index of the first of some filters that matches it; None if
    there is none.

    A leaf without a path is matched by a pattern that names it, and by `...`.
    """

    def __init__(self, filters: Sequence[Filter]):
        # Globs without wildcards are looked up: the specs of a tree are as many globs as leaves.
        self._literals: dict[str, int] = {}
        # The others; for a glob its regular expression, the text with which a match ends, and the
        # key with which it begins.
        self._others: list[tuple[int, Filter, re.Pattern[str] | None, str, Path]] = []
        for i, item in enumerate(filters):
            literal = literal_text(item.pattern) if isinstance(item, Glob) else None
            if literal is None:
                expression, end = None, ""
                if isinstance(item, Glob):
                    expression, last = glob_pattern(item.pattern), list(tokens(item.pattern))[-1:]
                    end = literal_text(".".join(last)) or ""
                self._others.append((i, item, expression, end, first_name(item)))
            else:
                self._literals.setdefault(literal, i)  # of two equal globs, the first one decides

    def __call__(self, leaf: Leaf) -> int | None:
        seen = None if leaf.seen is None else match_text(leaf.seen)
        least = None if seen is None else self._literals.get(seen)
        # The path from each name above the leaf. Most leaves have no such names.
        named: dict[Keys, str] = {}
        if leaf.roots:
            for root in leaf.roots:
                named.setdefault(root.path[:1], match_text(root.path))
            texts = list(named.values())
            if seen is not None and leaf.named((leaf.seen or ())[:1]) is None:
                texts.append(seen)
            found = [self._literals[text] for text in texts if text in self._literals]
            least = min(found, default=None)
        for i, item, expression, end, first in self._others:
            if least is not None and i > least:
                break
            # This runs for each leaf and filter, and most globs are refused by their last key.
            if expression is not None:
                text = named.get(first, seen)
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


def meant(item: Filter, leaves: Iterable[Leaf]) -> str:
    """The text `; did you mean ...?` with a pattern or path that matches one of the leaves; empty
    if none is near, and for a filter that is no pattern."""
    paths: dict[Path, None] = {}
    for leaf in leaves:
        if leaf.seen is not None:
            paths[leaf.seen] = None
        if first_name(item):  # a glob that begins with a wildcard sees no other path
            paths.update(dict.fromkeys(root.path for root in leaf.roots))
    match item:
        case Glob():
            return meant_glob(item.pattern, paths)
        case Regex():
            return did_you_mean(item.pattern.pattern, map(item.text, paths))
        case ExactPath():
            return did_you_mean(item.path, paths)
        case ClassFilter():
            return _of_that_name(item, leaves)
    return ""


def _of_that_name(item: ClassFilter, leaves: Iterable[Leaf]) -> str:
    """The end of a message about classes, if the tree has another class of one of their names."""
    within = {cls for leaf in leaves for cls in leaf.within}
    for cls in item.classes:
        for other in within:
            if other.__name__ != cls.__name__:
                continue
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                return f"; the tree has the class `{other.__module__}.{other.__qualname__}`"
            return (
                f"; the tree has an earlier class `{cls.__name__}`: after its definition has run "
                "again, make the tree again, or write a pattern for its paths"
            )
    return ""


def check_wrt(wrt: FilterLike, leaves: Sequence[Leaf], whose: str) -> None:
    """Check that each pattern in a filter matches a leaf.

    With a misspelled pattern in `~ft.glob(...)`, parameters that should be frozen would be trained.
    A class or a property may match no leaf, because such filters are written for many models.

    Args:
        wrt: the filter.
        leaves: all leaves of what is differentiated or trained.
        whose: a text for what the leaves are of, for the error.

    Raises:
        RuleError: a pattern matches no leaf.
    """
    for pattern in patterns(as_filter(wrt)):
        if not any(map(pattern, leaves)):
            near = meant(pattern, leaves)
            raise RuleError(f"wrt={wrt!r}: {pattern!r} matches no leaf of {whose}{near}")
