"""A Llama-like transformer in plain JAX: parameters in dicts, every layout written out by hand.

The oracle of `test_parity.py`, on a mesh with axes `data` and `model`. It knows nothing of the
library; so keep it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]


class Layout(NamedTuple):
    """Where the parameters lie, and the activations where the compiler needs to be told."""

    params: Params
    table: P = P()  # the embedding's, where tokens are looked up in it
    stream: P = P("data", None, None)
    heads: P = P("data", None, None, None)
    hidden: P = P("data", None, None)
    logits: P = P("data", None, None)


# Each array is split over `data` along its largest dimension, and gathered where it is used.
FSDP = Layout(
    params={
        "embed": P("data", None),
        "blocks": {
            "attn_norm": P(None, None),
            "query": P(None, "data", None, None),
            "key": P(None, "data", None, None),
            "value": P(None, "data", None, None),
            "out": P(None, None, None, "data"),
            "mlp_norm": P(None, None),
            "gate": P(None, None, "data"),
            "up": P(None, None, "data"),
            "down": P(None, "data", None),
        },
        "norm": P(None),
        "unembed": P(None, "data"),
    },
)

# Heads, hidden units and vocabulary are split over `model`, and their work with them; what that leaves
# whole is split over `data`.
FSDP_TP = Layout(
    params={
        "embed": P("model", "data"),
        "blocks": {
            "attn_norm": P(None, None),
            "query": P(None, "data", "model", None),
            "key": P(None, "data", "model", None),
            "value": P(None, "data", "model", None),
            "out": P(None, "model", None, "data"),
            "mlp_norm": P(None, None),
            "gate": P(None, "data", "model"),
            "up": P(None, "data", "model"),
            "down": P(None, "model", "data"),
        },
        "norm": P(None),
        "unembed": P("data", "model"),
    },
    table=P("model", None),
    heads=P("data", None, "model", None),
    hidden=P("data", None, "model"),
    logits=P("data", None, "model"),
)


# The layers. `jnp.tensordot` keeps the order of dimensions, where `jnp.einsum` adds transposes of
# its own.


def mlp(params: Params, x: Array, layout: Layout) -> Array:
    hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
    hidden = with_sharding_constraint(hidden, layout.hidden)
    return with_sharding_constraint(hidden @ params["down"], layout.stream)


def attention(params: Params, x: Array, layout: Layout) -> Array:
    query, key, value = (
        jnp.tensordot(x, params[name], axes=1) for name in ("query", "key", "value")
    )
    query = with_sharding_constraint(rotate(query), layout.heads)
    key = with_sharding_constraint(rotate(key), layout.heads)
    value = with_sharding_constraint(value, layout.heads)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    mixed = with_sharding_constraint(mixed, layout.heads)
    return with_sharding_constraint(jnp.tensordot(mixed, params["out"], axes=2), layout.stream)


def rotate(x: Array) -> Array:
    """Rotary positions, the halves of a head paired as in Hugging Face's weights."""
    seq, head_dim = x.shape[1], x.shape[3]
    frequencies = 10_000.0 ** (-jnp.arange(0, head_dim, 2, dtype=x.dtype) / head_dim)
    angles = jnp.outer(jnp.arange(seq, dtype=x.dtype), frequencies)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rms_norm(scale: Array, x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale


def transformer(params: Params, tokens: Array, layout: Layout) -> Array:
    def block(x: Array, layer: Params) -> tuple[Array, None]:
        x = with_sharding_constraint(
            x + attention(layer, rms_norm(layer["attn_norm"], x), layout), layout.stream
        )
        x = with_sharding_constraint(
            x + mlp(layer, rms_norm(layer["mlp_norm"], x), layout), layout.stream
        )
        return x, None

    table = with_sharding_constraint(params["embed"], layout.table)
    x = with_sharding_constraint(
        jnp.take(table, tokens, axis=0), layout.stream
    )  # NaN for what is no token
    x, _ = jax.lax.scan(block, x, params["blocks"])
    return with_sharding_constraint(rms_norm(params["norm"], x) @ params["unembed"], layout.logits)


# The losses, and what is compiled


def next_token_loss(params: Params, tokens: Array, layout: Layout) -> Array:
    logits = transformer(params, tokens[:, :-1], layout)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def adam_specs(layout: Layout) -> Any:
    """Adam keeps two moments of each parameter, which lie as it does."""
    return optax.ScaleByAdamState(count=P(), mu=layout.params, nu=layout.params), optax.EmptyState()


def jit_train_step(
    loss: Callable[..., Array], tx: optax.GradientTransformation, layout: Layout
) -> Any:
    """`(params, adam's state, batch) -> (params, state, loss)`; the first two are donated."""

    def train_step(params: Params, state: Any, batch: Array) -> tuple[Params, Any, Array]:
        value, grads = jax.value_and_grad(loss)(params, batch, layout)
        grads = with_sharding_constraint(grads, layout.params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(
        train_step,
        in_shardings=(layout.params, adam_specs(layout), P("data")),
        out_shardings=(layout.params, adam_specs(layout), None),
        donate_argnums=(0, 1),
    )
