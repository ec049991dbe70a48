"""A program in the trace of another function."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

import functree as ft
from functree.calls.body import Body
from tests.lib.meshes import EXPLICIT, assert_lies


def test_its_result_is_sharded_as_asked_on_explicit_axes():
    """`jax.jit(out_shardings=)` changes no type in a trace, so the result would be as `x`."""
    f = ft.jit(lambda x: 2 * x, out_shardings=P("data", "model"), mesh=EXPLICIT)
    x = ft.shard(jnp.ones((8, 4)), P(None, "data"), EXPLICIT)
    specs: list[P] = []

    def outer(x: Array) -> Array:
        y = f(x)
        specs.append(jax.typeof(y).sharding.spec)
        return y + 1

    assert_lies(jax.jit(outer)(x), "data", "model", mesh=EXPLICIT)
    assert specs == [P("data", "model")]


def test_a_trace_in_a_trace_makes_one_function_of_jax(monkeypatch: pytest.MonkeyPatch):
    made: list[object] = []
    jit = jax.jit

    def counted(fun: Any, **options: Any) -> Any:
        if isinstance(fun, Body):
            made.append(fun)
        return jit(fun, **options)

    inner = ft.jit(lambda x: x + 1)
    monkeypatch.setattr("functree.calls.program.jax.jit", counted)
    jit(lambda x: inner(x) * 2).trace(jnp.ones(3))
    assert len(made) == 1
