"""A function ─► `KnownGradient`: what it returns, if it is a gradient function of functree."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from functree.layout.layout import LayoutTree

_F = TypeVar("_F", bound=Callable[..., Any])

# An attribute, so that wrappers by `functools.wraps`, such as `ft.jit`, have it too.
_ATTRIBUTE = "__functree_gradient__"


class KnownGradient(NamedTuple):
    """What a gradient function returns.

    Attributes:
        argnums: the positions of the arguments that are differentiated.
        layouts: the layout of each of them; None where none was given.
        has_aux: whether the differentiated function returns `(value, aux)`.
        with_value: whether the value is returned beside the gradient.
        several: whether the gradient is a tuple, with one for each argument.
    """

    argnums: Sequence[int]
    layouts: Sequence[LayoutTree]
    has_aux: bool
    with_value: bool
    several: bool = False

    @property
    def aux_place(self) -> tuple[int, ...]:
        """Where in the result the aux is, as indices of nested tuples."""
        return (0, 1) if self.with_value else (1,)

    def place_of(self, position: int) -> tuple[int, ...]:
        """Where in the result the gradient of the argument at a position is, as indices of nested
        tuples."""
        place: tuple[int, ...] = ()
        if self.with_value:
            place = (1,)
        elif self.has_aux:
            place = (0,)
        if self.several and position in self.argnums:
            return (*place, list(self.argnums).index(position))
        return place


def known(fn: _F, gradient: KnownGradient) -> _F:
    """The function, of which it is known from here on what it returns."""
    setattr(fn, _ATTRIBUTE, gradient)
    return fn


def known_gradient(fn: object) -> KnownGradient | None:
    """What a function returns; None if it is no gradient function of functree, or wraps none.

    Examples:
        >>> from functree.transforms.grad.known_gradient import known_gradient
        >>> known_gradient(ft.jit(ft.grad(lambda w: w**2))).with_value
        False
        >>> known_gradient(jax.grad(lambda w: w**2)) is None
        True
    """
    found = getattr(fn, _ATTRIBUTE, None)
    if isinstance(found, KnownGradient):
        return found
    return None
