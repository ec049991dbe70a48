"""Attention by heads, by parts of the sequence, and with a sharded bias: labeled programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

import functree as ft
from tests.why.arrays import floats, laid
from tests.why.program import RELAID, Cause, Label, program

BATCH, SEQ, EMBED, HEADS, DIM = 16, 32, 64, 4, 16
P = ft.P


class Attention(eqx.Module):
    scale: Float[Array, "embed"]
    query: Float[Array, "embed heads dim"]
    key: Float[Array, "embed heads dim"]
    value: Float[Array, "embed heads dim"]
    out: Float[Array, "heads dim embed"]

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.scale = jnp.ones(EMBED)
        self.query, self.key, self.value = (
            jax.random.normal(k, (EMBED, HEADS, DIM)) / EMBED**0.5 for k in keys[:3]
        )
        self.out = jax.random.normal(keys[3], (HEADS, DIM, EMBED)) / EMBED**0.5

    def __call__(self, x: Float[Array, "batch seq embed"]):
        x = x * self.scale[None, None]
        q = jnp.einsum("bse,ehd->bshd", x, self.query)
        k = jnp.einsum("bse,ehd->bshd", x, self.key)
        v = jnp.einsum("bse,ehd->bshd", x, self.value)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return jnp.einsum("bqhd,hde->bqe", mixed, self.out)


def loss_of(model, x, y):
    return jnp.mean((x + model(x) - y) ** 2)


# --- Heads on the model's axis.

HEADS_RULES = ft.AxisRules({"batch": "data", "heads": "model", ...: None})


@program(
    cause=Cause(
        Label("asked", kind="all-reduce", axes=("model",), phase="forward"),
        '"bqhd,hde->bqe"',
        ("model.out",),
    )
)
def attention_heads_on_model(mesh: Mesh):
    """Gradients of attention whose heads are sharded over `model`: the output projection's
    partial sums, the gradient of its input, and the weights' gradients over the batch."""

    def gradient(model, x, y):
        return ft.value_and_grad(loss_of, layout=HEADS_RULES)(model, x, y)

    args = ft.abstract(Attention)(jax.random.key(0)), *[floats(BATCH, SEQ, EMBED)] * 2
    layouts = laid((HEADS_RULES, P("data"), P("data")), (P(), HEADS_RULES))
    return gradient, args, layouts


# --- The sequence in parts: each device has its queries, and all keys and values.


@program(
    cause=Cause(
        Label("asked", kind="all-gather", axes=("seq",), phase="forward"),
        "with_sharding_constraint(t",
        ("x",),
    )
)
def attention_sequence_in_parts(mesh: Mesh):
    """Causal attention with the sequence sharded over `seq`: a constraint gathers keys and
    values, and gradients of whole weights are summed over batch and sequence."""

    def whole_sequence(t):
        return jax.lax.with_sharding_constraint(t, NamedSharding(mesh, P("data")))

    def attend(params, x):
        q = jnp.einsum("bse,ehd->bshd", x, params["query"])
        k = whole_sequence(jnp.einsum("bse,ehd->bshd", x, params["key"]))
        v = whole_sequence(jnp.einsum("bse,ehd->bshd", x, params["value"]))
        causal = jnp.tril(jnp.ones((SEQ, SEQ), bool))[None, None]
        scores = jnp.where(causal, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
        return jnp.einsum("bqhd,hde->bqe", mixed, params["out"])

    def gradient(params, x, y):
        return jax.value_and_grad(lambda params: jnp.mean((attend(params, x) - y) ** 2))(params)

    params = {name: floats(EMBED, HEADS, DIM) for name in ("query", "key", "value")}
    params["out"] = floats(HEADS, DIM, EMBED)
    whole, parts = NamedSharding(mesh, P()), NamedSharding(mesh, P("data", "seq"))
    jitted = jax.jit(gradient, in_shardings=(whole, parts, parts), out_shardings=whole)
    return jitted, (params, *[floats(BATCH, SEQ, EMBED)] * 2), {}


# --- A learned bias of the scores, sharded along its last dimension because that is a long one.


class Biased(eqx.Module):
    attention: Attention
    bias: Float[Array, "heads seq keys"]

    def __init__(self, key):
        self.attention = Attention(key)
        self.bias = jnp.zeros((HEADS, SEQ, SEQ))

    def __call__(self, x: Float[Array, "batch seq embed"]):
        layer = self.attention
        x = x * layer.scale[None, None]
        q = jnp.einsum("bse,ehd->bshd", x, layer.query)
        k = jnp.einsum("bse,ehd->bshd", x, layer.key)
        v = jnp.einsum("bse,ehd->bshd", x, layer.value)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5
        scores = scores + self.bias[None]
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
        return jnp.einsum("bqhd,hde->bqe", mixed, layer.out)


BIAS_BY_KEY = ft.StateSharding({"bias": P(None, None, "model"), ...: HEADS_RULES})


@program(
    cause=Cause(Label("compiler", phase="forward"), "self.bias[None]", ("model.bias",)),
    labels=[Label("asked", axes=("data",)), Label("compiler", line="self.bias[None]"), *RELAID],
)
def attention_bias_by_key(mesh: Mesh):
    """A step of attention whose learned bias is sharded along its keys, the scores along their
    heads: the bias and its gradient are relaid over `model`."""

    @eqx.filter_jit
    def descend(model, x, y):
        loss, grads = ft.value_and_grad(loss_of, layout=BIAS_BY_KEY)(model, x, y)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, grads)), loss

    model = ft.shard(Biased(jax.random.key(0)), BIAS_BY_KEY, mesh)
    x = ft.shard(jnp.ones((BATCH, SEQ, EMBED)), P("data"), mesh)
    return descend, (model, x, x), {}
