"""This module has training steps of `ft.nn.Transformer`, for comparison with `plain.py`."""

import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from plain import Config

import functree as ft

TENSOR = {"vocab": "model", "hidden": "model", "heads": "model", "kv_heads": "model"}
TX = optax.adamw(1e-4)


def layout_of(config: Config) -> ft.Layout:
    """Return FSDP with tensor parallelism.

    The scales of norms are replicated, as in `plain.SPECS`.
    """
    scales = config.layers * config.embed
    return ft.AxisRules({"batch": "data", **TENSOR, ...: None}) | ft.FSDP(
        "data", min_size=scales + 1
    )


def transformer_config(
    config: Config, seq: int, attention: Any = "auto"
) -> ft.nn.TransformerConfig:
    """Return the same sizes as functree's config."""
    return ft.nn.TransformerConfig(
        config.vocab,
        config.embed,
        config.layers,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.hidden,
        max_seq=seq,
        rope_theta=config.theta,
        remat="full" if config.remat else None,
        compute_dtype=config.dtype,
        attention=attention,
    )


def loss(model: ft.nn.Transformer, tokens: Any) -> Any:
    """Return the mean cross-entropy of the next tokens."""
    return ft.nn.cross_entropy(model, tokens[:, :-1], tokens[:, 1:])


def make_state(config: ft.nn.TransformerConfig, key: Any) -> ft.TrainState:
    """Create the model with its optimizer's state."""
    return ft.TrainState.create(ft.nn.Transformer.create(config, key=key), TX)


def make_step(mesh: Mesh | None, layout: ft.Layout) -> Any:
    """Make functree's training step, on a mesh or on one device."""

    def step(ts: ft.TrainState, tokens: Any) -> tuple[ft.TrainState, Any]:
        value, grads = ft.value_and_grad(loss)(ts.model, tokens)
        return ft.apply_gradients(ts, grads), value

    if mesh is None:
        return ft.jit(step, donate="ts")
    shardings: Any = {"in_shardings": (layout, ft.P("data")), "out_shardings": (layout, None)}
    return ft.jit(step, mesh=mesh, rules=layout, donate="ts", **shardings)


class Run:
    """A training step with its state, which each run replaces."""

    def __init__(self, step: Callable[..., Any], state: Any, tokens: Any):
        self.step, self.state, self.tokens = step, state, tokens

    def once(self) -> Any:
        """Run the step, and wait for its result."""
        out = self.step(self.state, self.tokens)
        self.state = out[0]
        return jax.block_until_ready(out)

    def seconds(self) -> float:
        """Time one run, and free the replaced arrays outside the clock."""
        gc.collect()
        start = time.perf_counter()
        out = self.once()
        taken = time.perf_counter() - start
        del out
        return taken


def weights_of(model: ft.nn.Transformer) -> Any:
    """Return the weights of functree's model in the tree of the hand-written model."""
    layer, unembed = model.blocks.layer, model.unembed
    assert isinstance(unembed, ft.nn.Linear)
    names = {"attn_norm": layer.attn_norm.scale, "mlp_norm": layer.mlp_norm.scale}
    names |= {name: getattr(layer.attn, name) for name in ("query", "key", "value", "out")}
    names |= {name: getattr(layer.mlp, name) for name in ("gate", "up", "down")}
    params = {
        "embed": model.embed.weight,
        "blocks": names,
        "norm": model.norm.scale,
        "unembed": unembed.weight,
    }
    return jax.tree.map(np.asarray, params)
