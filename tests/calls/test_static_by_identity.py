"""An object that is static by identity is no argument, at every door that compiles a function."""

import enum
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH

P = ft.P
X = jnp.arange(4.0)


class Trainer:
    """An ordinary class."""

    def __init__(self, rate: float = 2.0):
        self.rate = rate

    @ft.jit
    def jitted(self, x: Array) -> Array:
        return self.rate * x

    def plain(self, x: Array) -> Array:
        return self.rate * x

    def loss(self, x: Array, y: Array) -> Array:
        return jnp.sum(self.rate * x * y)

    def __call__(self, x: Array) -> Array:
        return self.rate * x


TRAINER = Trainer()


def apply(f: Any, x: Array) -> Array:
    return f(x)


DOORS: dict[str, Callable[[], Any]] = {
    "a jitted method": lambda: TRAINER.jitted(X),
    "lower": lambda: TRAINER.jitted.lower(X),
    "a bound method": lambda: ft.jit(TRAINER.plain)(X),
    "bound by a partial": lambda: ft.jit(functools.partial(Trainer.plain, TRAINER))(X),
    "the object": lambda: ft.jit(TRAINER),
    "in jax.vmap": lambda: ft.jit(jax.vmap(TRAINER.plain)),
    "an argument": lambda: ft.jit(lambda f, x: f.rate * x)(TRAINER, X),
    "among many": lambda: ft.jit(lambda *xs: xs[0] * xs[1].rate)(X, TRAINER),
    "a method as an argument": lambda: ft.jit(apply)(TRAINER.plain, X),
    "shard_map": lambda: ft.shard_map(TRAINER.plain, mesh=MESH, in_specs=P(), out_specs=P())(X),
    "accumulate": lambda: ft.accumulate(ft.grad(TRAINER.loss), 2)(X, X),
}


@pytest.mark.parametrize("door", DOORS)
def test_refused(door: str):
    with raises(
        "static and compared by identity",
        "Trainer",
        "does not define `__eq__`, so its arrays would be constants of the program, and later",
        "Try: make Trainer an `eqx.Module`, or close over the object in a lambda",
        "`ft.jit` also accepts the object as an argument named in `static_argnames=`",
    ):
        DOORS[door]()


def test_the_remedies():
    class Module(eqx.Module):
        rate: float

        @ft.jit
        def jitted(self, x: Array) -> Array:
            return self.rate * x

    for rate in (2.0, 3.0):
        np.testing.assert_array_equal(Module(rate).jitted(X), rate * X)
    np.testing.assert_array_equal(ft.jit(lambda x: TRAINER.plain(x))(X), 2 * X)
    static = ft.jit(lambda f, x: f.rate * x, static_argnames="f")
    np.testing.assert_array_equal(static(TRAINER, X), 2 * X)
    np.testing.assert_array_equal(static(Trainer(3.0), X), 3 * X)


class Compared:
    def __init__(self, rate: float):
        self.rate = rate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compared) and other.rate == self.rate

    def __hash__(self) -> int:
        return hash(self.rate)


class Color(enum.Enum):
    RED = 1


EXEMPT: dict[str, Any] = {
    "a function": apply,
    "a class": Trainer,
    "a member of an enum": Color.RED,
    "a partial": functools.partial(apply, jnp.sin),
    "a function of JAX": jnp.sin,
    "a jitted function": ft.jit(jnp.sin),
    "a cached function": functools.lru_cache(apply),
    "a device": jax.devices()[0],
    "with an __eq__": Compared(2.0),
    "a mesh": MESH,
    "a date": np.datetime64("2020-01-01"),
    "a leaf inside of a tree": [TRAINER, X],
}


@pytest.mark.parametrize("name", EXEMPT)
def test_exempt(name: str):
    found = ft.jit(lambda value, x: 2 * x)(EXEMPT[name], X)
    np.testing.assert_array_equal(found, 2 * X)
