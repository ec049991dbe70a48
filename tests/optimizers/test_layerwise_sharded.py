"""`ft.layerwise` on meshes and in training: how its state is laid out, saved, and what is
computed."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jaxtyping import Array, Float

import functree as ft
from functree.labels.leaves import arrays_by_path
from tests.lib.meshes import EXPLICIT, MESH, SIZES, assert_lies

P = ft.P
LAYERS, EMBED, HIDDEN = 3, 8, 16


class Layer(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    scale: Float[Array, "embed"]

    @classmethod
    def create(cls, key: Array) -> "Layer":
        keys = jax.random.split(key)
        up = jax.random.normal(keys[0], (EMBED, HIDDEN)) / EMBED**0.5
        down = jax.random.normal(keys[1], (HIDDEN, EMBED)) / HIDDEN**0.5
        return cls(up, down, jnp.ones(EMBED))


class Model(eqx.Module):
    layers: Any
    head: Float[Array, "embed out"]


def create(key: Array) -> Model:
    keys = jax.random.split(key)
    layers = ft.stack(Layer.create, LAYERS, keys[0])
    return Model(layers, jax.random.normal(keys[1], (EMBED, 4)) / EMBED**0.5)


def unstacked(model: Model) -> Model:
    return Model(list(model.layers), model.head)


RULES = ft.AxisRules({"hidden": "model", ...: None})
LAYOUT = RULES | ft.FSDP("data", min_size=0)
MODEL = create(jax.random.key(0))
GRADIENT = create(jax.random.key(1))
# Of each state that is not simply the parameter's: the specs of what belongs to `layers.layer.up`,
# P(None, "data", "model"), and to `layers.layer.scale`, P(None, "data").
SHARDED: dict[str, tuple[Any, dict[str, P]]] = {
    "adafactor": (
        optax.adafactor(0.1, min_dim_size_to_factor=4),
        {
            "0.v_row.layers.layer.up": P(None, "data"),
            "0.v_col.layers.layer.up": P(None, "model"),
            "0.v.layers.layer.up": P(None, None),
            "0.v.layers.layer.scale": P(None, "data"),
        },
    ),
    "novograd": (
        optax.novograd(0.1),
        {"0.mu.layers.layer.up": P(None, "data", "model"), "0.nu.layers.layer.up": P(None)},
    ),
}


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_by_fsdp_and_tensor_parallelism(name: str):
    optimizer, specs = SHARDED[name]
    tx = ft.layerwise(optimizer)
    plan = ft.plan_optimizer(tx, MODEL, LAYOUT, SIZES)
    assert {path: plan[path].spec for path in specs} == specs
    model, gradient = ft.shard(MODEL, LAYOUT, MESH), ft.shard(GRADIENT, LAYOUT, MESH)
    state = ft.init_optimizer(tx, model, LAYOUT, MESH)
    for row, array in zip(plan, jax.tree.leaves(state), strict=True):
        assert row.shape == array.shape
        assert_lies(array, *row.spec)

    def update(tx: Any, gradient: Any, state: Any, model: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return tx.update(gradient, state, model)

    shardings = ft.plan_optimizer(tx, MODEL, LAYOUT, MESH).shardings
    run = jax.jit(lambda *args: update(tx, *args), out_shardings=(None, shardings))
    updates, after = run(gradient, state, model)
    lists = unstacked(MODEL)
    want, _ = jax.jit(lambda *args: update(optimizer, *args))(
        unstacked(GRADIENT), optimizer.init(lists), lists
    )
    for have, wanted in zip(
        jax.tree.leaves(unstacked(updates)), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(have, wanted, rtol=2e-5, atol=2e-6)
    assert all(
        x.sharding == y.sharding for x, y in zip(*map(jax.tree.leaves, (after, state)), strict=True)
    )


@pytest.mark.parametrize("name", SHARDED)
def test_without_a_layout_a_state_on_explicit_axes_is_sharded_as_planned(name: str):
    tx = ft.layerwise(SHARDED[name][0])
    ts = ft.TrainState.create(ft.shard(MODEL, LAYOUT, EXPLICIT), tx)
    plan = ft.plan_optimizer(tx, MODEL, LAYOUT, EXPLICIT)
    for row, array in zip(plan, jax.tree.leaves(ts.opt_state), strict=True):
        assert_lies(array, *row.spec, mesh=EXPLICIT)


def test_without_a_layout_a_step_places_the_state():
    model = ft.shard(MODEL, LAYOUT, MESH)
    ts = ft.TrainState.create(model, ft.layerwise(optax.novograd(0.1)))
    with jax.numpy_dtype_promotion("standard"):
        ts = ft.jit(ft.apply_gradients, rules=LAYOUT)(ts, model)
    assert_lies(ts.opt_state[0].mu.layers.layer.up, None, "data", "model")


@pytest.mark.parametrize("mesh", [MESH, EXPLICIT], ids=["auto", "explicit"])
def test_without_a_layout_the_state_is_sharded_like_the_parameters(mesh: Any):
    model = ft.shard(MODEL, LAYOUT, mesh)
    for name in ("novograd", "adafactor"):
        optimizer, _ = SHARDED[name]
        ts = ft.TrainState.create(model, ft.layerwise(optimizer))
        parameters, alike = arrays_by_path(model), 0
        own = [path for path in parameters if path[-1] in ("up", "down")]
        for path, array in arrays_by_path(ts.opt_state).items():
            assert array.sharding.device_set == model.head.sharding.device_set
            for parameter in own:
                like = parameters[parameter]
                if path[-len(parameter) :] == parameter and array.shape == like.shape:
                    assert array.sharding.is_equivalent_to(like.sharding, array.ndim)
                    alike += 1
        assert alike == (2 if name == "novograd" else 0), "mu alone"


def test_on_explicit_axes_types_keep_their_shardings():
    model = ft.shard(MODEL, LAYOUT, EXPLICIT)
    tx = ft.layerwise(
        optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=4), optax.scale(0.1))
    )

    def update(model: Any) -> Any:
        return tx.update(model, tx.init(model), model)

    with jax.set_mesh(EXPLICIT), jax.numpy_dtype_promotion("standard"):
        updates, state = jax.eval_shape(update, model)
    assert updates.layers.layer.up.sharding.spec == P(None, "data", "model")
    assert updates.layers.layer.scale.sharding.spec == P(None, "data")
    assert state[0].v_row.layers.layer.up.shape == (LAYERS, EMBED)


def test_inside_shard_map():
    """Each device updates its own rows, as if they were all."""
    tx = ft.layerwise(optax.scale_by_trust_ratio())

    def update(up: Array) -> Array:
        stack = ft.Stacked({"up": up})
        return tx.update(stack, tx.init(stack), stack)[0].layer["up"]

    up = MODEL.layers.layer.up
    mapped = jax.shard_map(update, mesh=MESH, in_specs=P(None, "data"), out_specs=P(None, "data"))
    want = [update(rows) for rows in jnp.split(up, 2, axis=1)]
    np.testing.assert_allclose(jax.jit(mapped)(up), jnp.concatenate(want, axis=1), rtol=1e-6)


def test_state_beside_arrays_on_one_device():
    """The state of an array on one device is there, or on the mesh."""
    params = {
        "stack": ft.shard(jnp.ones((8, 4, 4)), P("data"), MESH),
        "one": np.ones((4, 4), np.float32),
    }
    for tx in (optax.sgd(0.1), optax.adam(0.1), optax.adafactor(0.1)):
        found = jax.tree.leaves(ft.layerwise(tx).init(params))
        of_stack = [x for x in found if x.shape == (8, 4, 4)]
        assert all(x.sharding.spec == P("data", None, None) for x in of_stack)
        assert len(of_stack) == sum(x.shape == (4, 4) for x in found)
