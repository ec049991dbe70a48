"""Attention in several parallelisms, grouped queries, and adapters: labelled programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

import functree as ft
from tests.why.arrays import floats, laid
from tests.why.program import RELAID, Cause, Label, program

BATCH, SEQ, EMBED, HEADS, DIM = 16, 32, 64, 4, 16
GROUP = 2  # query heads for each head of keys and values

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


# --- Fully sharded weights: the batch on two axes, the weights on one of them.

BATCH_RULES = ft.AxisRules({"batch": ("data", "model"), ...: None})
FULLY_SHARDED = BATCH_RULES | ft.FSDP("data", min_size=2**8)


@program(
    cause=Cause(
        Label("asked", kind="all-gather", axes=("data",)),
        "ft.constrain(model, BATCH_RULES)",
        ("ft.constrain(model, BATCH_RULES)",),
    )
)
def attention_fully_sharded(mesh: Mesh):
    """Gradients of attention under FSDP over one of the batch's two axes: the loss gathers the
    weights, and their gradients are summed over the batch."""

    def gathered_loss(model, x, y):
        model = ft.constrain(model, BATCH_RULES)
        return loss_of(model, x, y)

    def gradient(model, x, y):
        return ft.value_and_grad(gathered_loss, layout=FULLY_SHARDED)(model, x, y)

    args = ft.abstract(Attention)(jax.random.key(0)), *[floats(BATCH, SEQ, EMBED)] * 2
    batch = P(("data", "model"))
    layouts = laid((FULLY_SHARDED, batch, batch), (P(), FULLY_SHARDED))
    return gradient, args, layouts


# --- Grouped queries: several heads of queries share one of keys and values.


@program(
    cause=Cause(
        Label("asked", kind="all-reduce", axes=("model",), phase="forward"),
        '"bqkgd,kgde->bqe"',
        ("params.out",),
    ),
    explicit=True,
)
def grouped_queries(mesh: Mesh):
    """Gradients of grouped-query attention on Explicit axes with a dimension for the heads of
    keys and one for the group: only the output projection and gradients are summed."""

    def attend(params, x):
        q = jnp.einsum("bse,ekgd->bskgd", x, params["query"])
        k = jnp.einsum("bse,ekd->bskd", x, params["key"])
        v = jnp.einsum("bse,ekd->bskd", x, params["value"])
        scores = jnp.einsum("bqkgd,btkd->bkgqt", q, k) / DIM**0.5
        mixed = jnp.einsum("bkgqt,btkd->bqkgd", jax.nn.softmax(scores, axis=-1), v)
        return jnp.einsum("bqkgd,kgde->bqe", mixed, params["out"], out_sharding=P("data"))

    def gradient(params, x, y):
        return jax.value_and_grad(lambda params: jnp.mean((attend(params, x) - y) ** 2))(params)

    heads = NamedSharding(mesh, P(None, "model"))
    params = {
        "query": floats(EMBED, HEADS, GROUP, DIM, sharding=heads),
        "key": floats(EMBED, HEADS, DIM, sharding=heads),
        "value": floats(EMBED, HEADS, DIM, sharding=heads),
        "out": floats(HEADS, GROUP, DIM, EMBED, sharding=NamedSharding(mesh, P("model"))),
    }
    x = floats(BATCH, SEQ, EMBED, sharding=NamedSharding(mesh, P("data")))
    return gradient, (params, x, x), {}


@program(
    cause=Cause(Label("compiler", axes=("model",)), "jnp.tile(v", ("params.value",)),
    labels=[
        Label("compiler", line="jnp.tile("),
        Label("compiler", kind="all-gather", axes=("model",)),
        Label("compiler", kind="all-to-all"),
        Label("compiler", kind="collective-permute"),
    ],
)
def grouped_queries_tiled(mesh: Mesh):
    """Grouped-query attention that tiles its keys and values to as many heads as queries: the
    tiled dimension loses its sharding, so they are gathered over `model`."""

    def attend(params, x):
        q = jnp.einsum("bse,ehd->bshd", x, params["query"])
        k = jnp.einsum("bse,ehd->bshd", x, params["key"])
        v = jnp.einsum("bse,ehd->bshd", x, params["value"])
        k = jnp.tile(k, (1, 1, GROUP, 1))  # head 0 1 2 3 0 1 2 3, where repeat has 0 0 1 1 2 2 3 3
        v = jnp.tile(v, (1, 1, GROUP, 1))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return jnp.einsum("bqhd,hde->bqe", mixed, params["out"])

    shapes = {
        "query": floats(EMBED, GROUP * HEADS, DIM),
        "key": floats(EMBED, HEADS, DIM),
        "value": floats(EMBED, HEADS, 2 * DIM),
        "out": floats(GROUP * HEADS, 2 * DIM, EMBED),
    }
    heads = dict.fromkeys(("query", "key", "value"), P(None, "model")) | {"out": P("model")}
    layouts = laid((heads, P("data")), P("data"))
    return attend, (shapes, floats(BATCH, SEQ, EMBED)), layouts


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


# --- Adapters of low rank, both sharded along their outputs.


@program(
    cause=Cause(
        Label("compiler", axes=("model",), phase="forward"),
        'low @ adapter["b"]',
        ("adapter.a", "adapter.b"),
    ),
    labels=[
        Label("compiler", kind="all-gather", axes=("model",)),
        Label("compiler", kind="all-to-all"),
        Label("compiler", kind="collective-permute"),
    ],
    explicit=True,
)
def adapters_by_output(mesh: Mesh):
    """Gradients of low-rank adapters on Explicit axes, both sharded along their outputs: the
    rank is sharded before the second one, which needs all of it, so it is gathered."""

    def adapted(adapter, frozen, x):
        low = x @ adapter["a"]
        change = low @ adapter["b"]
        hidden = jax.nn.gelu(x @ frozen["up"] + change)
        return jnp.einsum("bsh,he->bse", hidden, frozen["down"], out_sharding=P("data"))

    def gradient(adapter, frozen, x, y):
        return jax.value_and_grad(lambda adapter: jnp.mean((adapted(adapter, frozen, x) - y) ** 2))(
            adapter
        )

    by_output = NamedSharding(mesh, P(None, "model"))
    adapter = {
        "a": floats(EMBED, 8, sharding=by_output),
        "b": floats(8, 128, sharding=by_output),
    }
    frozen = {
        "up": floats(EMBED, 128, sharding=by_output),
        "down": floats(128, EMBED, sharding=NamedSharding(mesh, P("model"))),
    }
    x = floats(BATCH, SEQ, EMBED, sharding=NamedSharding(mesh, P("data")))
    return gradient, (adapter, frozen, x, x), {}
