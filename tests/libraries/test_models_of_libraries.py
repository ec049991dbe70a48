"""Models of libraries whose classes have no axis names, laid out from outside by `names=` and trained
by FSDP and tensor parallelism as without a mesh: a vision transformer of equimo, and a flow of
transformer-flows, a stack of stacks."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equimo.layers.attention import Attention
from equimo.layers.ffn import Mlp
from equimo.layers.posemb import LearnedPosEmbed
from equimo.models import VisionTransformer
from jax import Array
from jax.sharding import PartitionSpec as P

import functree as ft
from tests.lib.meshes import MESH, SIZES, assert_lies, lay

with warnings.catch_warnings():  # beartype's, of `typing.Callable` in its annotations
    warnings.simplefilter("ignore")
    from transformer_flows import transformer_flow as flows

TX = optax.adamw(1e-3)
FSDP = ft.FSDP("data", min_size=2**10)
TABLE = {"qkv": "model", "heads": "model", "hidden": "model", ...: None}

Loss = Callable[..., Array]


def two_steps(ts: Any, loss: Loss, batch: Any, layout: Any = None) -> tuple[Any, list[float]]:
    """The training state after two steps, and the loss of each."""

    @ft.jit(rules=layout, donate="ts")
    def step(ts: Any, *batch: Array) -> Any:
        value, gradients = ft.value_and_grad(loss)(ts.model, *batch)
        return ft.apply_gradients(ts, gradients), value

    ts, first = step(ts, *batch)
    ts, second = step(ts, *batch)
    assert len(step.compilations) == 1
    return ts, [float(first), float(second)]


def train_both(create: Any, loss: Loss, batch: Any, layout: Any) -> Any:
    """The sharded training state after two steps, whose losses are those without a mesh."""
    key = jax.random.key(0)
    _, expected = two_steps(create(key), loss, batch)
    sharded = [lay(x, "data") for x in batch]
    ts, losses = two_steps(ft.init(create, layout, MESH)(key), loss, sharded, layout)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert losses[1] < losses[0]
    return ts


# A vision transformer of equimo.


def vision_transformer(key: Array) -> VisionTransformer:
    sizes = {"img_size": 8, "patch_size": 4, "in_channels": 3, "num_classes": 8}
    return VisionTransformer(**sizes, dim=32, num_heads=4, depths=[1], key=key)


VISION_NAMES = {
    VisionTransformer: ft.names({"*_token*": "_ embed"}),
    LearnedPosEmbed: ft.names(weight="_ embed"),
    Attention: ft.names({"qkv.weight": "qkv embed", "proj.weight": "embed heads"}),
    Mlp: ft.names({"fc1.weight": "hidden embed", "fc2.weight": "embed hidden"}),
    **ft.equinox_names,
}


def test_equimo_is_trained_by_rules_and_fsdp():
    layout = ft.AxisRules(TABLE, names=VISION_NAMES) | FSDP
    plan = ft.plan(ft.abstract(vision_transformer)(jax.random.key(0)), layout, SIZES)
    block = "blocks.0.blocks.0"
    assert plan[f"{block}.attn.proj.weight"].spec == P("data", "model")
    assert plan[f"{block}.mlp.fc1.weight"].spec == P("model", "data")
    assert plan[f"{block}.mlp.fc2.weight"].spec == P("data", "model")
    assert plan["cls_token"].spec == P(None, None)  # smaller than `min_size`

    def create(key: Array) -> ft.TrainState:
        return ft.TrainState.create(vision_transformer(key), TX)

    def loss(model: VisionTransformer, images: Array, labels: Array) -> Array:
        logits = jax.vmap(model)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    images = jax.random.normal(jax.random.key(1), (8, 3, 8, 8))
    ts = train_both(create, loss, (images, jnp.arange(8)), layout)
    mlp = ts.opt_state[0].mu.blocks[0].blocks[0].mlp
    assert_lies(mlp.fc2.weight, "data", "model")


# A flow of transformer-flows: blocks made by `eqx.filter_vmap`, with layers made so in each. Its
# attention keeps a cache in an `eqx.nn.StateIndex`. Its annotations are of one block or layer.


def flow(key: Array) -> flows.TransformerFlow:
    sizes = {"n_channels": 1, "img_size": 4, "patch_size": 2, "channels": 32, "head_dim": 8}
    return flows.TransformerFlow(**sizes, n_blocks=2, layers_per_block=3, key=key)


FLOW_NAMES = {
    flows.CausalTransformerBlock: ft.names("blocks"),
    flows.AttentionBlock: ft.names("layers"),
    flows.Attention: ft.names(
        {
            "attention.output_proj.weight": "embed heads",
            "attention.*_proj.weight": "heads embed",
        }
    ),
    flows.MLP: ft.names(
        {
            "net.layers.0.weight": "hidden embed",
            "net.layers.0.bias": "hidden",
            "net.layers.2.weight": "embed hidden",
        }
    ),
    **ft.equinox_names,
}


def test_transformer_flows_is_trained_by_rules_and_fsdp():
    layout = ft.AxisRules(TABLE, names=FLOW_NAMES) | FSDP
    plan = ft.plan(ft.abstract(flow)(jax.random.key(0)), layout, SIZES)
    mlp = plan["blocks.attn_blocks.mlp.net.layers.0.weight"]
    assert str(mlp.axes) == "blocks layers hidden embed"
    assert mlp.spec == P(None, None, "model", "data")
    assert str(plan["blocks.proj_in.weight"].axes) == "blocks o i"  # the names of the library
    query = plan["blocks.attn_blocks.attention.attention.query_proj.weight"]
    assert query.spec == P(None, None, "model", "data")

    def create(key: Array) -> ft.TrainState:
        model, state = eqx.nn.make_with_state(flow)(key)
        return ft.TrainState.create(model, TX, state=state)

    def loss(model: flows.TransformerFlow, images: Array) -> Array:
        value, _ = flows.batch_loss_fn(model, jax.random.key(2), images, None)
        return value

    images = jax.random.normal(jax.random.key(1), (8, 1, 4, 4))
    ts = train_both(create, loss, (images,), layout)
    assert_lies(ts.model.blocks.attn_blocks.mlp.net.layers[0].weight, None, None, "model", "data")


def test_transformer_flows_without_make_with_state_is_refused():
    with pytest.raises(ft.StateError, match="make_with_state"):
        ft.TrainState.create(flow(jax.random.key(0)), TX)
