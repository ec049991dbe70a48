"""What scans is compiled once, if it is called outside of a program."""

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from tests.lib.checks import compilations

KEY = jax.random.key(0)
LAYERS = ft.stack(lambda key: ft.nn.MLP(4, 8, key=key), 3, KEY)
CONFIG = ft.nn.TransformerConfig(20, 8, layers=2, heads=2, kv_heads=1, head_dim=4, hidden=8)
MODEL = ft.nn.Transformer.create(CONFIG, key=KEY)
TOKENS = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
X = jnp.ones((6, 4))
NORMS = ft.stack(lambda _: ft.nn.BatchNorm(4), 3, KEY)
STATEFUL, STATE = ft.make_state(NORMS)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


ACCUMULATED = ft.accumulate(ft.value_and_grad(loss), 2)
CALLS: dict[str, Callable[[], Any]] = {
    "a stack": lambda: LAYERS(X),
    "a stack, with remat": lambda: LAYERS.scan(X, remat="dots"),
    "a stack with state": lambda: STATEFUL(X, state=STATE),
    "a stack, in jax.vmap": lambda: jax.vmap(LAYERS)(X),
    "a transformer": lambda: MODEL(TOKENS),
    "cross entropy": lambda: ft.nn.cross_entropy(MODEL, TOKENS, TOKENS, chunk=2),
    "accumulate": lambda: ACCUMULATED(jnp.ones((4, 3)), X),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_compiles_nothing(name: str):
    first = CALLS[name]()
    CALLS[name]()
    with compilations() as heard:
        for _ in range(3):
            found = CALLS[name]()
    assert not heard
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(first), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["a stack", "accumulate"])
def test_nothing_is_kept_for_a_call(name: str):
    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(3):
        CALLS[name]()
    before = objects()
    for _ in range(30):
        CALLS[name]()
    assert objects() - before < 30
