"""A decorator made with `functools.wraps` may supply an argument of its function, or take one more.
Each door takes such a function; a call that lacks an argument names the function."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jaxtyping import Float

import functree as ft
from tests.lib.meshes import MESH

P = ft.P
X = jnp.arange(8.0)
RULES = ft.AxisRules({"batch": "data"})


def named(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Supplies the argument `scale` by its name."""

    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, scale=3.0, **kwargs)

    return wrapper


def first(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Supplies the first argument."""

    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fun(3.0, *args, **kwargs)

    return wrapper


def with_option(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Takes an argument more."""

    @functools.wraps(fun)
    def wrapper(x: Any, scale: Any, extra: Any = 1.0) -> Any:
        return fun(x, scale) * extra

    return wrapper


def last(x: Float[Array, "batch"], scale: Any) -> Array:
    return scale * x


def begins(scale: Any, x: Any) -> Array:
    return scale * x


# How each is called with X.
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "the last": (named(last), lambda f: f(X)),
    "the first": (first(begins), lambda f: f(X)),
    "one more": (with_option(last), lambda f: f(X, 1.5, extra=2.0)),
}  # fmt: skip


DOORS: dict[str, Callable[[Any], Any]] = {
    "jit": ft.jit,
    "shard_map": lambda f: ft.shard_map(f, mesh=MESH, in_specs=P("data"), out_specs=P("data")),
    "init": lambda f: ft.init(f, P("data"), MESH),
    "typed": ft.typed,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("fun", FUNCTIONS)
def test_it_is_supplied(door: str, fun: str):
    function, call = FUNCTIONS[fun]
    np.testing.assert_allclose(call(DOORS[door](function)), 3 * X)


def lacks(w: Any, x: Any, scale: Any) -> Array:
    return jnp.sum(scale * w * x)


# For a function of X, a call.
CALLS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: ft.jit(f)(X),
    "shard_map": lambda f: ft.shard_map(f, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(X),
    "typed": lambda f: ft.typed(f)(X),
    "grad": lambda f: ft.grad(f)(X),
    "accumulate": lambda f: ft.accumulate(ft.grad(lacks), 2, batch="x")(X, X),
    "explore": lambda f: ft.explore(f, (X,), meshes=[{"data": 8}], layouts={"rules": RULES}),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_lacks_an_argument_names_the_function(call: str):
    with pytest.raises(
        TypeError, match=r"(last|lacks)(: missing a|\(\) missing 1) required .*'scale'"
    ):
        CALLS[call](last)
