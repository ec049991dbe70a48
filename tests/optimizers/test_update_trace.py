"""Traces of optimizers for single layers: what their inputs and outputs are, and depend on."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Float

import functree as ft
from functree.optimizers.update_trace import UpdateTrace, layer_type, trace_init, trace_update


class Block(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


class Net(eqx.Module):
    table: Float[Array, "vocab embed"]
    blocks: ft.Stacked[Block]
    nested: ft.Stacked[ft.Stacked[Block]]


def net(seed: int = 0) -> Net:
    random = np.random.default_rng(seed)

    def block(*stack: int) -> Block:
        return Block(
            jnp.asarray(random.normal(size=(*stack, 4, 5)), jnp.float32),
            jnp.asarray(random.normal(size=(*stack, 5)), jnp.float32),
        )

    nested = ft.Stacked(ft.Stacked(block(2, 3), "inner"), "outer")
    return Net(jnp.ones((6, 4)), ft.Stacked(block(3)), nested)


def update_of(tx: Any, state: Any, params: bool = True, **extra: Any) -> UpdateTrace:
    with jax.numpy_dtype_promotion("standard"):
        return trace_update(tx, net(1), state, net() if params else None, extra)


def test_the_inputs_and_outputs_of_adam():
    tx = optax.adam(1e-3)
    trace = update_of(tx, tx.init(net()))
    stacks = {
        "table": (),
        "blocks.layer.w": (3,),
        "blocks.layer.b": (3,),
        "nested.layer.layer.w": (2, 3),
        "nested.layer.layer.b": (2, 3),
    }
    shapes = {"table": (6, 4), "w": (4, 5), "b": (5,)}
    want = [("gradient", path, path, stack) for path, stack in stacks.items()]
    state = [("state", "0.count", None, ())]
    for moment in ("mu", "nu"):
        state += [("state", f"0.{moment}.{path}", path, stack) for path, stack in stacks.items()]
    want += state
    want += [("parameter", path, path, stack) for path, stack in stacks.items()]
    assert [written(place) for place in trace.inputs] == want
    updates = [("update", path, path, stack) for path, stack in stacks.items()]
    assert [written(place) for place in trace.outputs] == [*updates, *state]
    for place, type_, array in zip(trace.inputs, trace.program.in_avals, trace.arrays, strict=True):
        if place.owner is not None:
            assert type_.shape == shapes[place.owner[-1]]
        assert array.shape == (*place.stack, *type_.shape)
    # Each output depends on what belongs to its own parameter, and on the count.
    for place, depends in zip(trace.outputs, trace.depends, strict=True):
        owners = {trace.inputs[i].owner for i in depends}
        assert owners <= {place.owner, None}
        assert place.part != "update" or place.owner in owners


def written(place: Any) -> Any:
    path, owner = str(place.path), None if place.owner is None else str(place.owner)
    return place.part, path, owner, place.stack


def test_the_trace_computes_one_layer():
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    layer = Block(jnp.arange(20.0).reshape(4, 5), jnp.arange(5.0))
    stack = ft.Stacked(jax.tree.map(lambda x: jnp.stack([x, x + 1]), layer))
    init = trace_init(tx, stack)
    layers = jaxpr_as_fun(init.program)(layer.w, layer.b)
    state = init.build(
        [
            jnp.broadcast_to(x, (*place.stack, *x.shape))
            for place, x in zip(init.outputs, layers, strict=True)
        ]
    )
    assert state.v_row.layer.w.shape == (2, 4)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        trace = trace_update(tx, stack, state, stack, {})
        first = [
            x[0] if place.stack else x for place, x in zip(trace.inputs, trace.arrays, strict=True)
        ]
        updates, after = trace.build(jaxpr_as_fun(trace.program)(*first))
        want, want_after = tx.update(layer, tx.init(layer), layer)
    assert isinstance(updates, ft.Stacked) and isinstance(updates.layer, Block)
    np.testing.assert_allclose(updates.layer.w, want.w, rtol=1e-6)
    np.testing.assert_allclose(after.v_row.layer.w, want_after.v_row.w, rtol=1e-6)


def test_a_global_norm_depends_on_all_parameters():
    trace = update_of(optax.clip_by_global_norm(1.0), optax.EmptyState())
    for depends in trace.depends:
        assert {trace.inputs[i].owner for i in depends} == set(map(ft.Path, PATHS))


PATHS = [
    ("table",),
    *[("blocks", "layer", name) for name in "wb"],
    *[("nested", "layer", "layer", name) for name in "wb"],
]


def noise(key: Any) -> Any:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        own, after = jax.random.split(state["rng_key"])
        return jax.tree.map(lambda x: x + jax.random.normal(own, x.shape), updates), {
            "rng_key": after
        }

    return optax.GradientTransformation(lambda params: {"rng_key": key}, update)


def test_keys_that_are_there_once():
    for make in (jax.random.key, jax.random.PRNGKey):
        tx = noise(make(0))
        trace = update_of(tx, tx.init(net()))
        assert [str(place.path) for place in trace.inputs if place.is_key] == ["rng_key"]
    # A pair of numbers with another name is no key.
    init = optax.GradientTransformation(
        lambda params: {"pair": jnp.zeros(2, jnp.uint32), "key": jnp.zeros(3, jnp.uint32)},
        lambda updates, state, params=None: (updates, state),
    )
    assert not any(place.is_key for place in update_of(init, init.init(net())).inputs)


def test_extra_arguments_and_no_parameters():
    tx = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda updates, state, params=None, *, value, like: (
            jax.tree.map(lambda x, y: x * value + y, updates, like),
            state,
        ),
    )
    trace = update_of(tx, tx.init(net()), params=False, value=jnp.float32(2), like=net(2))
    parts = [place.part for place in trace.inputs]
    assert parts == ["gradient"] * 5 + ["extra"] * 6
    extra = [written(place)[1:] for place in trace.inputs if place.part == "extra"]
    assert extra[1] == ("like.blocks.layer.w", "blocks.layer.w", (3,))
    assert extra[-1] == ("value", None, ())


def test_masked_parameters_are_not_there():
    tx = optax.masked(optax.trace(0.9), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))
    trace = trace_init(tx, net())
    assert [str(place.path) for place in trace.outputs] == [
        f"inner_state.trace.{path}" for path in ("table", "blocks.layer.w", "nested.layer.layer.w")
    ]
    assert [place.stack for place in trace.outputs] == [(), (3,), (2, 3)]
    assert all(not depends for depends in trace.depends), "zeros depend on nothing"


def test_a_state_of_the_stack_as_a_whole_is_an_error():
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    with pytest.raises(ft.FunctreeError) as caught:
        update_of(tx, tx.init(net()))
    text = str(caught.value)
    assert "leaves of the optimizer's state cannot be updated by layers" in text
    assert "v_row.nested.layer.layer.b" in text
    assert "belongs to layers of a stack, and for these its shape is [2, 3, 1]" in text
    assert "make the state by the same optimizer: `ft.layerwise(tx).init`" in text


def test_types_of_layers_keep_their_shardings_on_explicit_axes():
    mesh = jax.make_mesh(
        (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    x = jax.device_put(jnp.ones((3, 4, 8)), jax.NamedSharding(mesh, ft.P(None, "data", "model")))
    found: Any = layer_type(x, 1)
    assert found.shape == (4, 8) and found.sharding.spec == ft.P("data", "model")
    plain = layer_type(np.ones((2, 3), np.float32), 1)
    assert plain.shape == (3,) and plain.dtype == jnp.float32 and plain.sharding is None
