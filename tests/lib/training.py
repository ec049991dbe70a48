"""Training steps whose compiled programs tests take apart: a small Llama, scanned or unrolled,
under three layouts."""

from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

import functree as ft
from tests.lib.meshes import MESH

BATCH, SEQ, EMBED, LAYERS, VOCAB = 16, 32, 64, 3, 256
TENSOR = {"heads": "model", "kv_heads": "model", "hidden": "model", "vocab": "model"}
EVERYWHERE = ("data", "model")
LAYOUTS: dict[str, ft.Layout] = {
    "TP": ft.AxisRules({"batch": "data", **TENSOR, ...: None}),
    "FSDP": ft.AxisRules({"batch": EVERYWHERE, ...: None}) | ft.FSDP(EVERYWHERE, min_size=0),
    "FSDP+TP": ft.AxisRules({"batch": "data", **TENSOR, ...: None}) | ft.FSDP("data", min_size=0),
}
NORMS = ["attn_norm.scale", "mlp_norm.scale"]
ATTENTION = ["attn.query", "attn.key", "attn.value", "attn.out"]
MLP = ["mlp.gate", "mlp.up", "mlp.down"]


class Unrolled(eqx.Module):
    """The same decoder with a list of blocks, one after another in the program."""

    embed: ft.nn.Embedding
    blocks: list[ft.nn.Block]
    norm: ft.nn.RMSNorm
    unembed: ft.nn.Linear
    remat: bool = eqx.field(static=True)

    @classmethod
    def of(cls, model: ft.nn.Transformer) -> "Unrolled":
        """The unrolled model with the parameters of one whose blocks are stacked."""
        assert model.unembed is not None
        return cls(
            model.embed,
            list(model.blocks),
            model.norm,
            model.unembed,
            model.config.remat is not None,
        )

    def __call__(self, tokens: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq vocab"]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = jax.checkpoint(lambda block, x: block(x))(block, x) if self.remat else block(x)
        return self.unembed(self.norm(x))


def loss(model: Any, tokens: Any) -> Any:
    """The mean cross entropy of the next tokens."""
    labels = optax.softmax_cross_entropy_with_integer_labels
    return labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def make(key: Any, remat: str | None = None, unrolled: bool = False, layers: int = LAYERS) -> Any:
    """The model."""
    config = ft.nn.TransformerConfig(
        VOCAB,
        EMBED,
        layers=layers,
        heads=8,
        kv_heads=4,
        head_dim=8,
        hidden=128,
        max_seq=SEQ,
        remat=remat,
    )
    model = ft.nn.Transformer.create(config, key=key)
    return Unrolled.of(model) if unrolled else model


@cache
def filled(config: ft.nn.TransformerConfig, scale: float) -> ft.nn.Transformer:
    """A model whose weights and biases are large enough to matter."""
    abstract = ft.abstract(ft.nn.Transformer.create)(config, key=jax.random.key(0))
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: np.asarray(random.normal(size=leaf.shape) * scale, leaf.dtype), abstract
    )


def batch_spec(name: str) -> ft.P:
    """The spec of the tokens under a layout."""
    return ft.P(EVERYWHERE if name == "FSDP" else "data")


@cache
def gradient(
    name: str, remat: str | None, unrolled: bool = False, mesh: Mesh = MESH
) -> tuple[Any, ft.Plan]:
    """The compiled function from a model to its loss and gradients, and the plan of the model."""
    layout = LAYOUTS[name]
    model = ft.abstract(lambda key: make(key, remat, unrolled))(jax.random.key(0))
    fun = ft.jit(
        lambda model, tokens: ft.value_and_grad(loss)(model, tokens),
        in_shardings=(layout, batch_spec(name)),
        out_shardings=(None, layout),
        mesh=mesh,
        rules=layout,
    )
    lowered = fun.lower(model, jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32))
    return lowered.compile(), ft.plan(model, layout, mesh)


@cache
def training_step(name: str, remat: str | None = None, mesh: Mesh = MESH) -> tuple[Any, ft.Plan]:
    """The compiled step of AdamW, and the plan of its state."""
    layout = LAYOUTS[name]

    @ft.jit(
        in_shardings=(layout, batch_spec(name)),
        out_shardings=(layout, None),
        mesh=mesh,
        rules=layout,
        donate="ts",
    )
    def step(ts: Any, tokens: Any) -> Any:
        value, grads = ft.value_and_grad(loss)(ts.model, tokens)
        return ft.apply_gradients(ts, grads), value

    with jax.numpy_dtype_promotion("standard"):  # Adam raises a float to the power of an integer
        state = ft.abstract(lambda key: ft.TrainState.create(make(key, remat), optax.adamw(1e-3)))(
            jax.random.key(0)
        )
        lowered = step.lower(state, jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32))
    return lowered.compile(), ft.plan(state, layout, mesh)
