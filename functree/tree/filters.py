"""A predicate over the leaves of a tree, as a value: globs, regular expressions, classes, axes, shapes, callables."""

import re
import types
from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from functree.errors import RuleError
from functree.tree.globs import glob_regex, match_text
from functree.tree.leaf import Leaf
from functree.tree.paths import Path


class Filter:
    """A predicate over leaves: a value, hashable and equal by value, combined with `&`, `|` and `~`.

    Example:
        >>> ft.glob("**.bias") | ft.larger_than(100) & ~ft.has_axis("embed")
        glob('**.bias') | larger_than(100) & ~has_axis('embed')
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, leaf: Leaf, /) -> bool:
        """Whether the leaf matches."""

    def __and__(self, other: Any) -> "Filter":
        return All((self, as_filter(other)))

    def __rand__(self, other: Any) -> "Filter":
        return All((as_filter(other), self))

    def __or__(self, other: Any) -> "Filter":
        return Any_((self, as_filter(other)))

    def __ror__(self, other: Any) -> "Filter":
        return Any_((as_filter(other), self))

    def __invert__(self) -> "Filter":
        return Not(self)


@dataclass(frozen=True, repr=False)
class All(Filter):
    parts: tuple[Filter, ...]

    def __call__(self, leaf: Leaf, /) -> bool:
        return all(part(leaf) for part in self.parts)

    def __repr__(self) -> str:
        return " & ".join(f"({part!r})" if isinstance(part, Any_) else repr(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Any_(Filter):
    parts: tuple[Filter, ...]

    def __call__(self, leaf: Leaf, /) -> bool:
        return any(part(leaf) for part in self.parts)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@dataclass(frozen=True, repr=False)
class Not(Filter):
    part: Filter

    def __call__(self, leaf: Leaf, /) -> bool:
        return not self.part(leaf)

    def __repr__(self) -> str:
        return f"~({self.part!r})" if isinstance(self.part, All | Any_) else f"~{self.part!r}"


# Paths


@dataclass(frozen=True, repr=False)
class Glob(Filter):
    """A glob over the parts of a path; made by `ft.glob`."""

    pattern: str

    def __post_init__(self):
        glob_regex(self.pattern)  # a bad one is found here

    def __call__(self, leaf: Leaf, /) -> bool:
        matches = re.compile(glob_regex(self.pattern), re.DOTALL).fullmatch
        return any(matches(match_text(path)) for path in leaf.patterned)

    def __repr__(self) -> str:
        return f"glob({self.pattern!r})"


def glob(pattern: str) -> Filter:
    """Leaves whose path matches: `*` is any text within one part, `**` any number of parts.

    Args:
        pattern: parts joined by dots; a key that is not an identifier is quoted, and is literal then.

    Raises:
        RuleError: a part that cannot be read.

    Example:
        >>> [str(row.path) for row in ft.plan({"a": jnp.ones(2), "b": jnp.ones(2)}, {"a": ft.P(), "b": ft.P()}, {})]
        ['a', 'b']
        >>> ft.glob("**.bias")
        glob('**.bias')
    """
    return Glob(pattern)


@dataclass(frozen=True, repr=False)
class Regex(Filter):
    pattern: re.Pattern[str]

    def __call__(self, leaf: Leaf, /) -> bool:
        return any(self.pattern.fullmatch(str(path)) for path in leaf.patterned)

    def __repr__(self) -> str:
        return repr(self.pattern)


@dataclass(frozen=True, repr=False)
class Under(Filter):
    classes: tuple[type, ...]

    def __call__(self, leaf: Leaf, /) -> bool:
        return any(issubclass(cls, self.classes) for cls in leaf.within)

    def __repr__(self) -> str:
        return f"under({' | '.join(cls.__name__ for cls in self.classes)})"


def under(cls: "type | types.UnionType") -> Filter:
    """Leaves anywhere below an instance of a class, or of one of several (`Linear | Conv`).

    Raises:
        RuleError: not a class.

    Example:
        >>> ft.under(eqx.nn.Linear)
        under(Linear)
    """
    classes = cls.__args__ if isinstance(cls, types.UnionType) else (cls,)
    if not all(isinstance(c, type) for c in classes):
        raise RuleError(f"`under` takes a class, or several joined by `|`, not {cls!r}")
    return Under(tuple(classes))


@dataclass(frozen=True, repr=False)
class Where(Filter):
    function: Callable[[Path, Any], Any]

    def __call__(self, leaf: Leaf, /) -> bool:
        return any(self.function(path, leaf.value) for path in leaf.patterned)

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


# Axes, shapes, dtypes


@dataclass(frozen=True, repr=False)
class HasAxis(Filter):
    name: str

    def __call__(self, leaf: Leaf, /) -> bool:
        return self.name in leaf.axes

    def __repr__(self) -> str:
        return f"has_axis({self.name!r})"


@dataclass(frozen=True, repr=False)
class HasNdim(Filter):
    ndim: int

    def __call__(self, leaf: Leaf, /) -> bool:
        return len(leaf.shape) == self.ndim

    def __repr__(self) -> str:
        return f"has_ndim({self.ndim})"


@dataclass(frozen=True, repr=False)
class HasDtype(Filter):
    dtype: Any

    def __call__(self, leaf: Leaf, /) -> bool:
        return bool(jnp.issubdtype(leaf.value.dtype, self.dtype))

    def __repr__(self) -> str:
        return f"has_dtype({getattr(self.dtype, '__name__', self.dtype)})"


@dataclass(frozen=True, repr=False)
class LargerThan(Filter):
    elements: int

    def __call__(self, leaf: Leaf, /) -> bool:
        return leaf.value.size > self.elements

    def __repr__(self) -> str:
        return f"larger_than({self.elements})"


def has_axis(name: str) -> Filter:
    """Leaves that have this axis.

    Example:
        >>> ft.has_axis("embed")
        has_axis('embed')
    """
    return HasAxis(name)


def has_ndim(ndim: int) -> Filter:
    """Leaves with this number of dimensions.

    Example:
        >>> ft.has_ndim(2)
        has_ndim(2)
    """
    return HasNdim(ndim)


def has_dtype(dtype: Any) -> Filter:
    """Leaves of this dtype, or of a kind of dtypes such as `jnp.floating`.

    Example:
        >>> ft.has_dtype(jnp.floating)
        has_dtype(floating)
    """
    return HasDtype(dtype)


def larger_than(elements: int) -> Filter:
    """Leaves of more than this many elements.

    Example:
        >>> ft.larger_than(2**20)
        larger_than(1048576)
    """
    return LargerThan(elements)


@dataclass(frozen=True, repr=False)
class Mark(Filter):
    name: str
    test: Callable[[Leaf], bool]

    def __call__(self, leaf: Leaf, /) -> bool:
        return self.test(leaf)

    def __repr__(self) -> str:
        return self.name


def _trainable(leaf: Leaf) -> bool:
    return not leaf.buffer and bool(jnp.issubdtype(leaf.value.dtype, jnp.inexact))


def _buffer(leaf: Leaf) -> bool:
    return leaf.buffer


is_trainable: Filter = Mark("is_trainable", _trainable)
"""Inexact arrays that are not an `ft.Buffer`.

Example:
    >>> ~ft.is_trainable
    ~is_trainable
"""

is_buffer: Filter = Mark("is_buffer", _buffer)
"""Arrays annotated as `ft.Buffer`.

Example:
    >>> static, buffers, rest = ft.split({"w": jnp.ones(2)}, ft.is_buffer, ...)
    >>> buffers
    {'w': None}
"""


class Everything(Filter):
    """What `...` means."""

    def __call__(self, leaf: Leaf, /) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Everything)

    def __hash__(self) -> int:
        return hash(Everything)

    def __repr__(self) -> str:
        return "..."


def as_filter(written: Any) -> Filter:
    """What a user wrote for a filter ─► the filter. Raises RuleError where it means nothing."""
    match written:
        case Filter():
            return written
        case str():
            return Glob(written)
        case re.Pattern():
            return Regex(written)
        case type() | types.UnionType():
            return under(written)
        case types.EllipsisType():
            return Everything()
        case Path():
            return Glob(str(written))
    if callable(written) and isinstance(written, Hashable):
        return Where(written)
    raise RuleError(
        f"{written!r} is no filter: write a glob (`'**.bias'`), a compiled regular expression, a class, a callable "
        "(path, leaf), `...`, or one of functree's filters"
    )
