"""flowjax: its own step of training under `ft.jit`, and a flow that is trained sharded."""

from typing import Any

import equinox as eqx
import jax
import optax
import paramax
from flowjax.distributions import StandardNormal, Transformed
from flowjax.flows import masked_autoregressive_flow
from flowjax.train.losses import MaximumLikelihoodLoss
from flowjax.train.train_utils import step as flowjax_step
from jax import Array

import functree as ft
from tests.libraries.alike import assert_parts, jit_alike, train_alike


def flow() -> Transformed:
    base, sizes = StandardNormal((2,)), {"flow_layers": 1, "nn_width": 8, "nn_depth": 1}
    return masked_autoregressive_flow(jax.random.key(0), base_dist=base, **sizes)


def batch() -> Array:
    return jax.random.normal(jax.random.key(1), (8, 2))


def test_its_own_step_takes_and_returns_flows():
    tx, loss = optax.sgd(1e-2, momentum=0.9), MaximumLikelihoodLoss()
    params, static = eqx.partition(
        flow(), eqx.is_inexact_array, is_leaf=lambda x: isinstance(x, paramax.NonTrainable)
    )

    def run(params: Any, static: Any, state: Any, x: Array) -> Any:
        step = flowjax_step.__wrapped__  # without its own `eqx.filter_jit`
        return step(params, static, x, optimizer=tx, opt_state=state, loss_fn=loss)

    jit_alike(run, params, static, tx.init(params), batch())
    assert_parts(flow())


def test_a_flow_is_trained_sharded():
    def loss(model: Any, x: Array) -> Array:
        return -paramax.unwrap(model).log_prob(x).mean()

    layout = ft.FSDP("model", min_size=16)
    ts = train_alike(flow(), loss, optax.sgd(1e-2), batch(), layout)
    sharded = [x for x in jax.tree.leaves(ts.model) if eqx.is_array(x) and x.size >= 16]
    assert sharded
    assert all(not x.sharding.is_fully_replicated for x in sharded)
