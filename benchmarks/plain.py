"""This module has the language model of `ft.nn.Transformer`, written by hand in plain JAX.

The benchmarks compare functree with it. It imports nothing from functree. Parameters are dicts, and
shardings are literals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Attend = Callable[..., jax.Array]


@dataclass(frozen=True)
class Config:
    """The sizes of a model."""

    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    theta: float = 10_000.0
    dtype: Any = jnp.float32
    remat: bool = False
    chunk: int = 1024

    @property
    def shapes(self) -> dict[str, Any]:
        """The shapes of the parameters."""
        layers, embed, heads, kv_heads = self.layers, self.embed, self.heads, self.kv_heads
        return {
            "embed": (self.vocab, embed),
            "blocks": {
                "attn_norm": (layers, embed),
                "query": (layers, embed, heads, self.head_dim),
                "key": (layers, embed, kv_heads, self.head_dim),
                "value": (layers, embed, kv_heads, self.head_dim),
                "out": (layers, heads, self.head_dim, embed),
                "mlp_norm": (layers, embed),
                "gate": (layers, embed, self.hidden),
                "up": (layers, embed, self.hidden),
                "down": (layers, self.hidden, embed),
            },
            "norm": (embed,),
            "unembed": (embed, self.vocab),
        }


# FSDP over `data`, tensor parallelism over `model`.
SPECS = {
    "embed": P("model", "data"),
    "blocks": {
        "attn_norm": P(),
        "query": P(None, "data", "model", None),
        "key": P(None, "data", "model", None),
        "value": P(None, "data", "model", None),
        "out": P(None, "model", None, "data"),
        "mlp_norm": P(),
        "gate": P(None, "data", "model"),
        "up": P(None, "data", "model"),
        "down": P(None, "model", "data"),
    },
    "norm": P(),
    "unembed": P("data", "model"),
}


def attend_plain(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute causal attention with JAX's own function."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def attend_splash(mesh: Mesh, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute causal attention with JAX's TPU kernel."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    def local(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        seq, heads, head_dim = query.shape[1:]
        sizes = kernels.BlockSizes(512, 512, 512, 512, 512, 512, 512, 512)
        mask = kernels.MultiHeadMask([kernels.CausalMask((seq, seq))] * heads)
        kernel = kernels.make_splash_mha_single_device(mask=mask, block_sizes=sizes)
        arrays = (x.transpose(0, 2, 1, 3) for x in (query * head_dim**-0.5, key, value))
        return jax.vmap(kernel)(*arrays).transpose(0, 2, 1, 3)

    spec = P("data", None, "model")
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(
        query, key, value
    )


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return (unit * scale).astype(x.dtype)


def rotated(x: jax.Array, theta: float) -> jax.Array:
    seq, head_dim = x.shape[1], x.shape[-1]
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


class Model:
    """The model on a mesh, or on one device.

    Args:
        config: the sizes.
        mesh: the mesh; None for one device.
        attend: the function that computes attention.
    """

    def __init__(self, config: Config, mesh: Mesh | None, attend: Attend):
        self.config, self.mesh, self.attend = config, mesh, attend

    def on(self, x: jax.Array, *spec: Any) -> jax.Array:
        """Constrain `x` to a spec."""
        return (
            x
            if self.mesh is None
            else jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))
        )

    def block(self, x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
        layer = {name: w if "norm" in name else w.astype(x.dtype) for name, w in layer.items()}
        y = rms_norm(layer["attn_norm"], x)
        query, key, value = (
            jnp.einsum("bse,ehd->bshd", y, layer[name]) for name in ("query", "key", "value")
        )
        query, key = (
            self.on(rotated(one, self.config.theta), "data", None, "model") for one in (query, key)
        )
        mixed = self.on(
            self.attend(query, key, self.on(value, "data", None, "model")), "data", None, "model"
        )
        x = self.on(x + self.on(jnp.einsum("bshd,hde->bse", mixed, layer["out"]), "data"), "data")
        y = rms_norm(layer["mlp_norm"], x)
        gate, up = (self.on(y @ layer[name], "data", None, "model") for name in ("gate", "up"))
        return self.on(x + self.on((jax.nn.silu(gate) * up) @ layer["down"], "data"), "data")

    def features(self, params: Any, tokens: jax.Array) -> jax.Array:
        table = self.on(params["embed"], "model")
        x = self.on(table.at[tokens].get(mode="fill").astype(self.config.dtype), "data")
        block = jax.checkpoint(self.block, prevent_cse=False) if self.config.remat else self.block
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params["blocks"])
        return rms_norm(params["norm"], x)

    def chunk_loss(self, weight: jax.Array, x: jax.Array, targets: jax.Array) -> jax.Array:
        logits = self.on(x @ weight.astype(x.dtype), "data", None, "model").astype(jnp.float32)
        picked = jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0).sum(-1)
        return (jax.nn.logsumexp(logits, axis=-1) - picked).sum()

    def loss(self, params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the mean cross-entropy, in chunks of the sequence if it exceeds one chunk."""
        x, size, chunk = self.features(params, tokens), targets.size, self.config.chunk
        if tokens.shape[1] <= chunk:
            return self.chunk_loss(params["unembed"], x, targets) / size
        weight = self.on(params["unembed"], None, "model")  # gathered once

        def add(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            parts = (jax.lax.dynamic_slice_in_dim(one, i * chunk, chunk, 1) for one in (x, targets))
            return total + jax.checkpoint(self.chunk_loss)(weight, *parts), None

        return jax.lax.scan(add, jnp.zeros(()), jnp.arange(tokens.shape[1] // chunk))[0] / size

    def step(self, tx: optax.GradientTransformation, state: Any, tokens: jax.Array) -> Any:
        """Run a training step, and return `(params, optimizer state)` and the loss."""
        params, opt_state = state
        loss, grads = jax.value_and_grad(self.loss)(params, tokens[:, :-1], tokens[:, 1:])
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def compiled(
        self, tx: optax.GradientTransformation, batch: int, seq: int, specs: Any = None
    ) -> Any:
        """Lower the step for a mesh, without creating an array."""
        specs = SPECS if specs is None else specs
        abstract = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            self.config.shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        state = (abstract, jax.eval_shape(tx.init, abstract))
        shardings = None
        if self.mesh is not None:
            own = jax.tree.map(
                partial(NamedSharding, self.mesh), specs, is_leaf=lambda x: isinstance(x, P)
            )
            like = optax.tree_map_params(
                tx,
                lambda _, one: one,
                state[1],
                own,
                transform_non_params=lambda _: NamedSharding(self.mesh, P()),
            )
            shardings = (own, like)
            batches = NamedSharding(self.mesh, P("data"))
            step = jax.jit(
                partial(self.step, tx), in_shardings=(shardings, batches), out_shardings=(shardings, None),
                donate_argnums=0,
            )  # fmt: skip
        else:
            step = jax.jit(partial(self.step, tx), donate_argnums=0)
        return step.lower(state, jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32))
