"""Deleted arrays that a function uses but does not take as arguments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import functree as ft
from functree.calls.deleted_use import is_about_deleted
from tests.lib.checks import raises
from tests.lib.meshes import MESH, lay


def gone(placed: bool = True) -> jax.Array:
    array = lay(jnp.ones(8), "data") if placed else jnp.ones(8)
    array.delete()
    return array


TABLE = {"b": gone(False)}
X = jnp.ones(8)


class Layer:
    def __init__(self) -> None:
        self.b = gone()

    def __call__(self, x: Any) -> Any:
        return x + self.b


def adds(b: Any) -> Callable[[Any], Any]:
    return lambda x: x + b


def adds_within(b: Any) -> Callable[[Any], Any]:
    def outer(x: Any) -> Any:
        def inner(y: Any) -> Any:
            return y + b["w"][0]

        return inner(x)

    return outer


def adds_global(x: Any) -> Any:
    def inner(y: Any) -> Any:
        return y + TABLE["b"]

    return inner(x)


jitted = ft.jit(adds_global)


def calls_another(x: Any) -> Any:
    return jitted(x)


USES: dict[str, tuple[str, Callable[[], Callable[[Any], Any]]]] = {
    "sharded": ("b", lambda: adds(gone())),
    "on one device": ("b", lambda: adds(gone(False))),
    "in a tree": ("b.w.0", lambda: adds_within({"w": [gone()]})),
    "in a function that it calls": (
        "b",
        lambda: (lambda call: lambda x: call(x))(adds(gone())),
    ),
    "global": ("TABLE.b", lambda: adds_global),
    "in a global ft.jit": ("TABLE.b", lambda: calls_another),
    "returned": ("b", lambda: (lambda b: lambda x: (x, b))(gone())),
    "used while it is traced": ("b", lambda: (lambda b: lambda x: x + (b + b))(gone())),
}

DOORS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: ft.jit(f)(X),
    "lower": lambda f: ft.jit(f).lower(X),
    "init": lambda f: ft.init(f, P(), MESH)(X),
    "shard_map": lambda f: ft.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P(), shapes=None)(X),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("door", DOORS)
def test_it_is_named(door: str, use: str):
    path, make = USES[use]
    why = "is deleted, and the function closes over it"
    with raises(": 1 array is deleted\n\n  ", f"{path}   f32[8]\n      {why}\n\nTry: if it was"):
        DOORS[door](make())


@pytest.mark.parametrize("use", ["sharded", "global", "used while it is traced"])
def test_in_an_eager_gradient(use: str):
    path, make = USES[use]
    f = make()
    with raises("grad: 1 array is deleted\n\n", f"{path}   f32[8]\n      is deleted, and the"):
        ft.grad(lambda x: f(x).sum())(X)


def test_of_a_tree_that_is_held_each_one_is_named():
    """Others in it may be alive."""
    held = {"w": [gone(), gone()], "alive": jnp.ones(8)}
    with raises(": 2 arrays are deleted\n\n  b.w.0, b.w.1   f32[8]\n      is deleted, and the"):
        ft.jit(adds_within(held))(X)


def test_of_an_argument_of_a_gradient_each_one_is_named():
    given = {"a": gone(), "b": gone(), "alive": jnp.ones(8)}
    with raises("grad: 2 arguments are deleted\n\n  y.a, y.b   f32[8]\n      is deleted\n"):
        ft.grad(lambda x, y: (x * y["a"]).sum())(X, given)


def test_of_layers_that_are_stacked():
    b = gone()
    with raises("stack: 1 array is deleted\n\n  b   f32[8]"):
        ft.stack(lambda key: {"w": b + jax.random.normal(key, (8,))}, 2, jax.random.key(0))


def test_deleted_between_two_calls():
    """A compiled program has its value; another program needs it again."""
    b = jnp.ones(8)
    f = ft.jit(lambda x: x.astype(jnp.float32) + b)
    f(X)
    b.delete()
    assert float(f(X)[0]) == 2.0
    with raises("1 array is deleted\n\n  b   f32[8]"):
        f(jnp.ones(8, jnp.int32))


def test_without_jit():
    with jax.disable_jit(), raises("1 array is deleted\n\n  b   f32[8]"):
        ft.jit(adds(gone()))(X)


def test_other_errors_stay():
    def fails(x: Any) -> Any:
        raise RuntimeError("another one")

    with pytest.raises(RuntimeError, match=r"^another one"):
        ft.jit(fails)(X)

    # An object that is no tree for JAX: its array is not found.
    layer = Layer()
    with pytest.raises(RuntimeError, match=r"^Array has been deleted"):
        ft.jit(lambda x: layer(x))(X)


def test_the_message_of_jax():
    with pytest.raises(RuntimeError) as caught:
        gone() + 1
    assert is_about_deleted(caught.value) and not is_about_deleted(RuntimeError("deleted"))
