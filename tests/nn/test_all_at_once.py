"""Experts, a sequence in parts and a pipeline of stages in one training step, by three rules."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import functree as ft

STEPS = 20
SIZES = dict(
    layers=4, heads=4, kv_heads=2, head_dim=8, hidden=64, experts=4, top_k=2, max_seq=16
)  # fmt: skip
RULES = ft.AxisRules(
    {"batch": "expert", "experts": "expert", "seq": "context", "layers": "pipe", ...: None}
)
TX = optax.adamw(1e-2)


def make(config: ft.nn.TransformerConfig, key: jax.Array) -> ft.TrainState:
    with jax.numpy_dtype_promotion("standard"):
        return ft.TrainState.create(ft.nn.Transformer.create(config, key=key), TX)


def loss(model: ft.nn.Transformer, tokens: jax.Array) -> jax.Array:
    return ft.nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])


def train_step(ts: ft.TrainState, tokens: jax.Array) -> tuple[ft.TrainState, jax.Array]:
    value, gradients = ft.value_and_grad(loss)(ts.model, tokens)
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        return ft.apply_gradients(ts, gradients), value


def losses(ts: ft.TrainState, step: Any, tokens: jax.Array) -> list[float]:
    found: list[float] = []
    for _ in range(STEPS):
        ts, value = step(ts, tokens)
        found.append(float(value))
    return found


@pytest.mark.slow
def test_losses_are_those_of_one_device() -> None:
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 64)
    one = ft.nn.TransformerConfig(64, 32, **SIZES)
    expected = losses(make(one, jax.random.key(0)), ft.jit(train_step), tokens)
    assert expected[-1] < 0.1 * expected[0]
    mesh = ft.make_mesh(expert=2, context=2, pipe=2)
    config = ft.nn.TransformerConfig(64, 32, **SIZES, microbatches=2)
    ts = ft.init(make, RULES, mesh)(config, jax.random.key(0))
    step = ft.jit(train_step, rules=RULES, mesh=mesh, donate="ts")
    placed = ft.shard(tokens, ft.P("expert"), mesh)
    np.testing.assert_allclose(losses(ts, step, placed), expected, atol=1e-5)
    assert len(step.compilations) == 1
    moved = {axes for _, axes in ft.ledger(step, ts, placed).totals()}
    assert {("expert",), ("context",), ("pipe",)} <= moved
