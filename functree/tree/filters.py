"""A predicate over the leaves of a tree, as a value: globs, regular expressions, classes, axes, shapes, callables."""

import re
import types
import typing
from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from functree.errors import RuleError
from functree.tree.globs import glob_pattern, match_text
from functree.tree.leaf import Leaf
from functree.tree.paths import Path


class Filter:
    """A predicate over leaves: a value, hashable and equal by value, combined with `&`, `|` and `~`.

    Examples:
        >>> ft.glob("**.bias") | ft.larger_than(100) & ~ft.has_axis("embed")
        glob('**.bias') | larger_than(100) & ~has_axis('embed')
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, leaf: Leaf, /) -> bool:
        """Whether the leaf matches."""

    def __and__(self, other: Any) -> "Filter":
        return _joined(All, self, other)

    def __rand__(self, other: Any) -> "Filter":
        return _joined(All, other, self)

    def __or__(self, other: Any) -> "Filter":
        return _joined(Any_, self, other)

    def __ror__(self, other: Any) -> "Filter":
        return _joined(Any_, other, self)

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


def _joined(kind: "type[All] | type[Any_]", *operands: Any) -> Filter:
    """`a & b & c` is one filter of three parts, wherever the brackets stand."""
    parts: list[Filter] = []
    for written in operands:
        if written is ...:
            raise RuleError("`...` is no part of a filter: it stands alone, as the last filter of an ordered list")
        part = as_filter(written)
        parts += part.parts if isinstance(part, kind) else (part,)
    return kind(tuple(parts))


@dataclass(frozen=True, repr=False)
class Glob(Filter):
    """A glob over the parts of a path; made by `ft.glob`."""

    pattern: str

    def __post_init__(self) -> None:
        glob_pattern(self.pattern)  # a bad one is found here

    def __call__(self, leaf: Leaf, /) -> bool:
        matches = glob_pattern(self.pattern).fullmatch
        return any(matches(match_text(path)) for path in leaf.patterned)

    def __repr__(self) -> str:
        return f"glob({self.pattern!r})"


def glob(pattern: str) -> Filter:
    """Leaves whose path matches: `*` is any text within one part, `**` any number of parts.

    Args:
        pattern: parts joined by dots; a key that is not an identifier is quoted, and is literal then.

    Raises:
        RuleError: a part that cannot be read.

    Examples:
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

    Examples:
        >>> ft.under(eqx.nn.Linear)
        under(Linear)
    """
    union = typing.get_origin(cls) in (types.UnionType, typing.Union)
    classes: tuple[Any, ...] = typing.get_args(cls) if union else (cls,)
    if not all(isinstance(c, type) for c in classes):
        raise RuleError(f"`under` takes a class, or several joined by `|`, not {cls!r}")
    return Under(classes)


@dataclass(frozen=True, repr=False)
class Where(Filter):
    function: Callable[[Path, Any], Any]

    def __call__(self, leaf: Leaf, /) -> bool:
        return any(self.function(path, leaf.value) for path in leaf.patterned)

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


# Axes, shapes, dtypes


@dataclass(frozen=True, repr=False)
class Asks(Filter):
    """A question about a leaf, as it is written, and what it asks for."""

    text: str
    test: Callable[..., bool]
    wanted: tuple[Any, ...] = ()

    def __call__(self, leaf: Leaf, /) -> bool:
        return self.test(leaf, *self.wanted)

    def __repr__(self) -> str:
        return self.text


def has_axis(name: str) -> Filter:
    """Leaves that have this axis.

    Raises:
        RuleError: not the name of an axis.

    Examples:
        >>> ft.has_axis("embed")
        has_axis('embed')
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise RuleError(f"`has_axis` takes the name of one axis, an identifier, not {name!r}")
    return Asks(f"has_axis({name!r})", _has_axis, (name,))


def has_ndim(ndim: int) -> Filter:
    """Leaves with this number of dimensions.

    Raises:
        RuleError: not a number of dimensions.

    Examples:
        >>> ft.has_ndim(2)
        has_ndim(2)
    """
    if type(ndim) is not int or ndim < 0:
        raise RuleError(f"`has_ndim` takes a number of dimensions, not {ndim!r}")
    return Asks(f"has_ndim({ndim})", _has_ndim, (ndim,))


def has_dtype(dtype: Any) -> Filter:
    """Leaves of this dtype, or of a kind of dtypes such as `jnp.floating`.

    Raises:
        RuleError: not a dtype.

    Examples:
        >>> ft.has_dtype(jnp.floating)
        has_dtype(floating)
    """
    kind = _dtype(dtype)
    return Asks(f"has_dtype({kind.__name__})", _has_dtype, (kind,))


def _dtype(written: Any) -> Any:
    """One object for each dtype, however it is written; kinds of dtypes (`jnp.floating`) as they are."""
    if isinstance(written, type) and issubclass(written, np.generic):
        return written
    try:
        if written is not None:  # numpy takes None for float64
            return jnp.dtype(written).type
    except TypeError:
        pass
    raise RuleError(f"`has_dtype` takes a dtype, or a kind of them such as `jnp.floating`, not {written!r}")


def larger_than(elements: int) -> Filter:
    """Leaves of more than this many elements.

    Raises:
        RuleError: not a number.

    Examples:
        >>> ft.larger_than(2**20)
        larger_than(1048576)
    """
    if isinstance(elements, bool) or not isinstance(elements, int | float):
        raise RuleError(f"`larger_than` takes a number of elements, not {elements!r}")
    return Asks(f"larger_than({elements})", _larger_than, (elements,))


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
    return any(hasattr(cls, "__holds_state__") for cls in leaf.within)


def _buffer(leaf: Leaf) -> bool:
    return leaf.buffer


is_trainable: Filter = Asks("is_trainable", _trainable)
"""Inexact arrays that are neither an `ft.Buffer` nor state.

Examples:
    >>> ~ft.is_trainable
    ~is_trainable
"""

is_buffer: Filter = Asks("is_buffer", _buffer)
"""Arrays annotated as `ft.Buffer`.

Examples:
    >>> static, buffers, rest = ft.split({"w": jnp.ones(2)}, ft.is_buffer, ...)
    >>> buffers
    {'w': None}
"""


is_state: Filter = Asks("is_state", _state)
"""Arrays in an `ft.State`, and the values that `ft.StateRef`s begin with.

Examples:
    >>> static, state, rest = ft.split({"count": ft.StateRef(0), "w": jnp.ones(2)}, ft.is_state, ...)
    >>> rest["count"].init is None, rest["w"].shape
    (True, (2,))
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
        case re.Pattern() if isinstance(written.pattern, str):
            return Regex(written)
        case type() | types.UnionType():
            return under(written)
        case types.EllipsisType():
            return Everything()
        case Path():
            return Glob(str(written))
    if typing.get_origin(written) is not None:
        return under(written)
    if callable(written) and isinstance(written, Hashable):
        return Where(written)
    raise RuleError(
        f"{written!r} is no filter: write a glob (`'**.bias'`), a compiled regular expression, a class, a callable "
        "`(path, leaf) -> bool` that can be hashed, `...`, or one of functree's filters"
    )
