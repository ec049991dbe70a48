"""Models of libraries whose classes have no axis names, laid out from outside by `names=` and trained
by FSDP and tensor parallelism as without a mesh: a vision transformer of equimo, the protein model
of esm2quinox, whose layers are a stack, and a flow of transformer-flows, a stack of stacks. The weights of timm's vision transformer are loaded into
equimo's."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import esm2quinox
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
from safetensors.numpy import save_file

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


# Weights of a vision transformer as timm names and shapes them, in that of equimo: blocks in a list
# of lists, one vector for the class token, and a bias of the convolution with two dimensions more.

DEPTHS, DIM, HEADS, PATCH, CLASSES = [2, 2], 32, 4, 4, 8
TIMM_NAMES = {
    "cls_token": "cls_token",
    "global_pos_embed.weight": "pos_embed",
    "blocks.{i}.blocks.{j}.prenorm.*": "blocks.{2*i+j}.norm1.*",
    "blocks.{i}.blocks.{j}.norm.*": "blocks.{2*i+j}.norm2.*",
    "blocks.{i}.blocks.{j}.**": "blocks.{2*i+j}.**",
    "**": "**",  # `patch_embed.proj`, `norm`, `head`
}


def timm_weights() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, DIM),
        "pos_embed": (1, 5, DIM),
        "patch_embed.proj.weight": (DIM, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (DIM,),
        "head.weight": (CLASSES, DIM),
        "head.bias": (CLASSES,),
    }
    norms = ["norm"]
    for i in range(sum(DEPTHS)):
        block = f"blocks.{i}"
        norms += [f"{block}.norm1", f"{block}.norm2"]
        linears = {
            "attn.qkv": (3 * DIM, DIM),
            "attn.proj": (DIM, DIM),
            "mlp.fc1": (4 * DIM, DIM),
            "mlp.fc2": (DIM, 4 * DIM),
        }
        for name, (out, size) in linears.items():
            shapes |= {f"{block}.{name}.weight": (out, size), f"{block}.{name}.bias": (out,)}
    for norm in norms:
        shapes |= {f"{norm}.weight": (DIM,), f"{norm}.bias": (DIM,)}
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def timm_like(key: Array) -> VisionTransformer:
    sizes = {"img_size": 8, "patch_size": PATCH, "in_channels": 3, "num_classes": CLASSES}
    options = {"reg_tokens": 0, "act_layer": "exactgelu", "eps": 1e-6, "global_pool": "token"}
    return VisionTransformer(**sizes, **options, dim=DIM, num_heads=HEADS, depths=DEPTHS, key=key)


def test_weights_of_timm_are_loaded_into_equimo(tmp_path: Path):
    weights = timm_weights()
    save_file(weights, tmp_path / "model.safetensors")
    layout = ft.AxisRules(TABLE, names=VISION_NAMES) | ft.FSDP("data", min_size=2**5, otherwise=P())
    like = ft.abstract(timm_like)(jax.random.key(0))
    model = ft.load_tensors(tmp_path, like, TIMM_NAMES, layout, MESH)
    block = model.blocks[1].blocks[0]
    assert_lies(block.attn.qkv.weight, "model", "data")
    assert_lies(block.mlp.fc2.weight, "data", "model")
    assert_lies(model.patch_embed.proj.weight, "data", None, None, None)
    np.testing.assert_array_equal(block.attn.qkv.weight, weights["blocks.2.attn.qkv.weight"])
    np.testing.assert_array_equal(model.cls_token, weights["cls_token"][0])
    bias = weights["patch_embed.proj.bias"]
    np.testing.assert_array_equal(model.patch_embed.proj.bias, bias[:, None, None])


@pytest.mark.usefixtures("compiles_anew")
def test_the_ledger_has_the_lines_of_equimo_and_the_call():
    layout = ft.AxisRules(TABLE, names=VISION_NAMES) | FSDP

    def loss(model: VisionTransformer, images: Array) -> Array:
        return (jax.vmap(model)(images) ** 2).mean()

    model = ft.abstract(vision_transformer)(jax.random.key(0))
    images = jax.ShapeDtypeStruct((8, 3, 8, 8), "float32")
    gradient = ft.value_and_grad(loss, layout=layout)
    ledger = ft.ledger(gradient, model, images, in_shardings=(layout, P("data")), mesh=MESH)
    backward = [one for one in ledger.collectives if one.phase == "backward" and one.paths]
    for one in backward:
        assert "site-packages/" in (one.source or "")
        assert "test_models_of_libraries.py:" in (one.called_from or "")
    tokens = [one.source or "" for one in backward if str(one.path) == "cls_token"]
    assert tokens and all("equimo/layers/posemb.py:" in source for source in tokens)
    for text in (str(ledger), ledger.html()):
        assert "layers/posemb.py:" in text
        assert "called from libraries/test_models_of_libraries.py:" in " ".join(text.split())


# The protein model of esm2quinox. Its layers are made by `eqx.filter_vmap`, and their class is not
# exported.


def protein_model(key: Array) -> esm2quinox.ESM2:
    return esm2quinox.ESM2(num_layers=2, embed_size=32, num_heads=4, token_dropout=False, key=key)


LAYER = type(ft.abstract(protein_model)(jax.random.key(0)).layers)
PROTEIN_NAMES = {
    LAYER: ft.names(
        "layers",
        {
            "attn.output_proj.weight": "embed heads",
            "attn.*_proj.weight": "heads embed",
            "linear1.weight": "hidden embed",
            "linear2.weight": "embed hidden",
        },
    ),
    **ft.equinox_names,
}


def test_esm2quinox_is_trained_by_rules_and_fsdp():
    layout = ft.AxisRules(TABLE, names=PROTEIN_NAMES) | FSDP
    plan = ft.plan(ft.abstract(protein_model)(jax.random.key(0)), layout, SIZES)
    assert plan["layers.attn.query_proj.weight"].spec == P(None, "model", "data")
    assert plan["layers.attn.output_proj.weight"].spec == P(None, "data", "model")
    assert plan["layers.linear2.weight"].spec == P(None, "data", "model")

    def create(key: Array) -> ft.TrainState:
        return ft.TrainState.create(protein_model(key), TX)

    def loss(model: esm2quinox.ESM2, tokens: Array) -> Array:
        logits = jax.vmap(model)(tokens).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    tokens = jnp.asarray(esm2quinox.tokenise(["SPIDERMAN", "SPUDMAN"] * 4))
    ts = train_both(create, loss, (tokens,), layout)
    assert_lies(ts.model.layers.linear1.weight, None, "model", "data")


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
