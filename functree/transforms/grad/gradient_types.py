"""What a gradient function returns: for type checkers its type, the type of what is differentiated,
and for other transforms a `KnownGradient`.

The types are classes because a type checker can then take the type of the first parameter out of
all parameters. A `Callable[Concatenate[M, P], M]` would also do that, but it loses the name of the
first parameter, and a lambda does not fit it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from functree.layout.layout import LayoutTree

_P = ParamSpec("_P")
_Others = ParamSpec("_Others")
_M = TypeVar("_M")
_R = TypeVar("_R", covariant=True)


class Gradient(Protocol[_P]):
    """A function of the same parameters that returns the gradient."""

    @overload
    def __call__(
        self: "Gradient[Concatenate[_M, _Others]]", *args: _P.args, **kwargs: _P.kwargs
    ) -> _M: ...
    @overload
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> Any: ...

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...


class GradientAndAux(Protocol[_P, _R]):
    """A function of the same parameters that returns `(gradient, aux)`."""

    @overload
    def __call__(
        self: "GradientAndAux[Concatenate[_M, _Others], Any]", *args: _P.args, **kwargs: _P.kwargs
    ) -> tuple[_M, _R]: ...
    @overload
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> tuple[Any, _R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...


class ValueAndGradient(Protocol[_P, _R]):
    """A function of the same parameters that returns `(result, gradient)`."""

    @overload
    def __call__(
        self: "ValueAndGradient[Concatenate[_M, _Others], Any]", *args: _P.args, **kwargs: _P.kwargs
    ) -> tuple[_R, _M]: ...
    @overload
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> tuple[_R, Any]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...


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
        >>> from functree.transforms.grad.gradient_types import known_gradient
        >>> known_gradient(ft.jit(ft.grad(lambda w: w**2))).with_value
        False
        >>> known_gradient(jax.grad(lambda w: w**2)) is None
        True
    """
    found = getattr(fn, _ATTRIBUTE, None)
    if isinstance(found, KnownGradient):
        return found
    return None
