"""The types of gradient functions, for type checkers: a gradient has the type of what is
differentiated.

They are classes because a type checker can then take the type of the first parameter out of all
parameters. A `Callable[Concatenate[M, P], M]` would also do that, but it loses the name of the
first parameter, and a lambda does not fit it.
"""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

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
