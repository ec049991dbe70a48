"""These filters select arrays by a property: axes, shape, dtype, or whether they are trained."""

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
