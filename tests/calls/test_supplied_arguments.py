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


def passing(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Passes on what it gets."""

    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

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
    "the last, by name": (named(last), lambda f: f(x=X)),
    "the first": (first(begins), lambda f: f(X)),
    "passed on": (passing(last), lambda f: f(X, scale=3.0)),
    "one more": (with_option(last), lambda f: f(X, 1.5, extra=2.0)),
    "in a partial": (functools.partial(named(last)), lambda f: f(X)),
}  # fmt: skip


def gradient(make: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A door that differentiates the squared sum."""

    def call(fun: Any, how: Any) -> Any:
        @functools.wraps(getattr(fun, "func", fun))
        def loss(*args: Any, **kwargs: Any) -> Array:
            return jnp.sum(fun(*args, **kwargs) ** 2)

        return how(make(loss))

    return call


OUT = np.asarray(3 * X)
GRADIENT = np.asarray(18 * X)
# What it gives for a function and a way to call it, and the value.
DOORS: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "jit": (lambda f, how: how(ft.jit(f)), OUT),
    "lower": (lambda f, how: how(ft.jit(f).eval_shape).shape, X.shape),
    "shard_map": (lambda f, how: how(ft.shard_map(f, mesh=MESH, in_specs=P("data"), out_specs=P("data"))), OUT),
    "init": (lambda f, how: how(ft.init(f, P("data"), MESH)), OUT),
    "typed": (lambda f, how: how(ft.typed(f)), OUT),
    "jit of grad": (gradient(lambda f: ft.jit(ft.grad(f), rules=RULES, mesh=MESH)), GRADIENT),
    "ledger": (lambda f, how: how(lambda *xs, **named: ft.ledger(ft.jit(f), *xs, **named)).totals(), {}),
}  # fmt: skip


# What is differentiated is passed by position, and to a loss with the parameters of `last`.
CASES = [
    (door, fun)
    for door in DOORS
    for fun in FUNCTIONS
    if not ("grad" in door and fun in ("the last, by name", "one more"))
]


@pytest.mark.parametrize(("door", "fun"), CASES)
def test_it_is_supplied(door: str, fun: str):
    (call, wanted), (function, how) = DOORS[door], FUNCTIONS[fun]
    found = call(function, how)
    if isinstance(wanted, np.ndarray):
        np.testing.assert_allclose(found, wanted)
    else:
        assert found == wanted


def lacks(w: Any, x: Any, scale: Any) -> Array:
    return jnp.sum(scale * w * x)


# For a function of X, a call.
CALLS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: ft.jit(f)(X),
    "lower": lambda f: ft.jit(f).lower(X),
    "shard_map": lambda f: ft.shard_map(f, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(X),
    "init": lambda f: ft.init(f, P("data"), MESH)(X),
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
