"""Filters by the properties of an array: its axes, shape and dtype, and whether it is trained."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from functree.argument_checks import EXTENT, is_number, shown
from functree.errors import RuleError
from functree.labels.filters import Filter
from functree.labels.leaf import Leaf
from functree.tree.axes import is_axis_name
from functree.tree.interfaces import HoldsState


@dataclass(frozen=True, repr=False)
class Predicate(Filter):
    """A filter that calls a function of the leaf.

    Attributes:
        text: the filter as a user writes it.
        test: a function of the leaf and of the values in `wanted`. Functions of a module, so that
            equal filters are equal by value.
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
    """Leaves that have this axis.

    Raises:
        RuleError: the argument is not the name of an axis.

    Examples:
        >>> ft.has_axis("embed")
        has_axis('embed')
    """
    if not is_axis_name(name):
        raise RuleError(
            f"`has_axis` takes the name of one axis, an identifier (not `_`), not {name!r}"
        )
    return Predicate(f"has_axis({name!r})", _has_axis, (name,))


def has_ndim(ndim: int) -> Filter:
    """Leaves with this number of dimensions.

    Raises:
        RuleError: the argument is not a number of dimensions.

    Examples:
        >>> ft.has_ndim(2)
        has_ndim(2)
    """
    if not EXTENT.fits(ndim):
        raise RuleError(f"`has_ndim` takes a number of dimensions, not {ndim!r}")
    return Predicate(f"has_ndim({ndim})", _has_ndim, (int(ndim),))


def has_dtype(dtype: Any) -> Filter:
    """Leaves of this dtype, or of a kind of dtypes such as `jnp.floating`.

    Raises:
        RuleError: the argument is not a dtype.

    Examples:
        >>> ft.has_dtype(jnp.floating)
        has_dtype(floating)
    """
    kind = _dtype(dtype)
    return Predicate(f"has_dtype({kind.__name__})", _has_dtype, (kind,))


def _dtype(written: Any) -> Any:
    """The numpy class of a dtype, or of a kind of dtypes (`jnp.floating`)."""
    # `"float32"`, `jnp.float32` and `np.dtype("float32")` have one class, so filters of them are
    # equal.
    if isinstance(written, type) and issubclass(written, np.generic):
        return written
    try:
        if written is not None:  # numpy reads None as float64
            return jnp.dtype(written).type
    except (TypeError, ValueError):
        pass
    raise RuleError(
        f"`has_dtype` takes a dtype, or a kind of them such as `jnp.floating`, not {written!r}"
    )


def larger_than(elements: int) -> Filter:
    """Leaves with more than this number of elements.

    Raises:
        RuleError: the argument is not a number.

    Examples:
        >>> ft.larger_than(2**20)
        larger_than(1048576)
    """
    if not is_number(elements) or elements < 0:
        raise RuleError(f"`larger_than` takes a number of elements, not {shown(elements)}")
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
"""Arrays of floating-point or complex numbers that are neither an `ft.Buffer` nor state.

Examples:
    >>> ~ft.is_trainable
    ~is_trainable
"""

is_buffer: Filter = Predicate("is_buffer", _buffer)
"""Arrays annotated as `ft.Buffer`.

Examples:
    >>> static, buffers, rest = ft.split(
    ...     {"w": jnp.ones(2)}, ft.is_buffer, ...
    ... )
    >>> buffers
    {'w': None}
"""


is_state: Filter = Predicate("is_state", _state)
"""Arrays in an `ft.State`, and the initial values of `ft.StateRef`s.

Examples:
    >>> model = {"count": ft.StateRef(0), "w": jnp.ones(2)}
    >>> static, state, rest = ft.split(model, ft.is_state, ...)
    >>> rest["count"].init is None, rest["w"].shape
    (True, (2,))
"""
