"""This module types gradient functions with protocols, and describes their results.

With a protocol, a type checker can extract the type of the first parameter. A
`Callable[Concatenate[M, P], M]` would also make this possible. However, a `Callable` loses the name
of that parameter, and does not accept a lambda.
"""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from functree.layout.layout import LayoutTree

_P = ParamSpec("_P")
_Others = ParamSpec("_Others")
_M = TypeVar("_M")
_R = TypeVar("_R", covariant=True)


class Gradient(Protocol[_P]):
    """Function of the differentiated function's parameters that returns the gradient."""

    @overload
    def __call__(
        self: "Gradient[Concatenate[_M, _Others]]", *args: _P.args, **kwargs: _P.kwargs
    ) -> _M: ...
    @overload
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> Any: ...

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...


class GradientAndAux(Protocol[_P, _R]):
    """Function of the differentiated function's parameters that returns `(gradient, aux)`."""

    @overload
    def __call__(
        self: "GradientAndAux[Concatenate[_M, _Others], Any]", *args: _P.args, **kwargs: _P.kwargs
    ) -> tuple[_M, _R]: ...
    @overload
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> tuple[Any, _R]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...


class ValueAndGradient(Protocol[_P, _R]):
    """Function of the differentiated function's parameters that returns `(result, gradient)`."""

    @overload
    def __call__(
        self: "ValueAndGradient[Concatenate[_M, _Others], Any]", *args: _P.args, **kwargs: _P.kwargs
    ) -> tuple[_R, _M]: ...
    @overload
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> tuple[_R, Any]: ...

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]: ...


_F = TypeVar("_F", bound=Callable[..., Any])

# The description is stored as an attribute, since `functools.wraps` copies attributes to wrappers
# such as `ft.jit`.
_ATTRIBUTE = "__functree_gradient__"


class KnownGradient(NamedTuple):
    """Description of what a gradient function returns.

    Attributes:
        argnums: the positions of the differentiated arguments.
        layouts: the layout of each differentiated argument, or None if it has no layout.
        has_aux: whether the differentiated function returns `(value, aux)`.
        with_value: whether the value is returned with the gradient.
        several: whether the gradient is a tuple with one entry for each argument.
    """

    argnums: Sequence[int]
    layouts: Sequence[LayoutTree]
    has_aux: bool
    with_value: bool
    several: bool = False

    @property
    def aux_place(self) -> tuple[int, ...]:
        """The position of the aux in the result, as indices into nested tuples."""
        return (0, 1) if self.with_value else (1,)

    def place_of(self, position: int) -> tuple[int, ...]:
        """Return the position of an argument's gradient in the result, like `aux_place`."""
        place: tuple[int, ...] = ()
        if self.with_value:
            place = (1,)
        elif self.has_aux:
            place = (0,)
        if self.several and position in self.argnums:
            return (*place, list(self.argnums).index(position))
        return place


def known(fn: _F, gradient: KnownGradient) -> _F:
    """Attach a description to a gradient function, and return the function."""
    setattr(fn, _ATTRIBUTE, gradient)
    return fn


def known_gradient(fn: object) -> KnownGradient | None:
    """Return the description of a gradient function made by functree, or of a wrapper around one.

    For any other function, return None.

    Examples:
        >>> from functree.transforms.grad.gradient_types import known_gradient
        >>> known_gradient(ft.jit(ft.grad(lambda w: w**2))).with_value
        False
        >>> known_gradient(jax.grad(lambda w: w**2)) is None
        True
    """
    gradient = getattr(fn, _ATTRIBUTE, None)
    if isinstance(gradient, KnownGradient):
        return gradient
    return None
