"""Programs in which one argument has a wrong spec."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import functree as ft
from tests.why.arrays import floats, ints, laid, normed, shapes
from tests.why.mistake import Made, mistake


@mistake(
    "soft mixture: the second weight transposed",
    wrong=ft.P("expert", None, "model"),
    right=ft.P("expert", "model", None),
    edit="spec",
    named="params.down",
    third="expert",
)
def soft_experts(mesh: Mesh, down: ft.P) -> Made:
    """A soft mixture of experts: each slot of an expert is a weighted mean of all tokens.

    The second weight of the experts is sharded over its columns, as the first one, so the
    hidden activations are gathered over `model`.
    """

    def mixture(params, x):
        logits = jnp.einsum("bsd,dep->bsep", normed(x), params["slots"])
        dispatch = jax.nn.softmax(logits, axis=1)
        combine = jax.nn.softmax(logits, axis=(2, 3))
        slots = jnp.einsum("bsep,bsd->bepd", dispatch, x)
        h = jax.nn.gelu(jnp.einsum("bepd,edh->beph", slots, params["up"]))
        slots = jnp.einsum("beph,ehd->bepd", h, params["down"])
        return x + jnp.einsum("bsep,bepd->bsd", combine, slots)

    params = shapes(slots=(256, 4, 8), up=(4, 256, 1024), down=(4, 1024, 256))
    specs = {
        "slots": ft.P(None, "expert", None),
        "up": ft.P("expert", None, "model"),
        "down": down,
    }
    x = floats(64, 32, 256)
    sentences = ft.P("data", None, None)
    return mixture, (params, x), laid((specs, sentences), sentences)


@mistake(
    "language model: the table of logits over embed",
    wrong=ft.P(None, "model"),
    right=ft.P("model", None),
    edit="spec",
    named="params.unembed",
)
def language_model(mesh: Mesh, unembed: ft.P) -> Made:
    """The loss of a small language model, for each text: two tables and an MLP.

    The table of logits is sharded over `embed`, over which the product sums, so all logits are
    partial sums: 8 MiB are reduced that the vocabulary's shards would not need.
    """

    def losses(params, tokens, targets):
        x = params["embed"][tokens]
        x = x + jax.nn.gelu(normed(x) @ params["up"]) @ params["down"]
        logits = normed(x) @ params["unembed"].T
        right = jax.nn.one_hot(targets, logits.shape[-1])
        return -jnp.sum(right * jax.nn.log_softmax(logits), axis=(1, 2))

    params = shapes(embed=(2048, 256), unembed=(2048, 256), up=(256, 1024), down=(1024, 256))
    specs = {
        "embed": ft.P("model", None),
        "unembed": unembed,
        "up": ft.P(None, "model"),
        "down": ft.P("model", None),
    }
    tokens = ints(64, 32)
    texts = ft.P("data", None)
    layouts = laid((specs, texts, texts), ft.P("data"))
    return losses, (params, tokens, tokens), layouts


@mistake(
    "recommender: a buffer unlike its table",
    wrong=ft.P(None, "model"),
    right=ft.P("model", None),
    edit="spec",
    named="squares.items",
)
def recommender(mesh: Mesh, squares: ft.P) -> Made:
    """A step of Adagrad for two factors of a table of ratings.

    The sums of squares of one table are sharded over its columns, and the table and its
    gradient over the rows, so 1 MiB is relaid in each step.
    """

    def loss(params, users, items, ratings):
        predicted = jnp.sum(params["users"][users] * params["items"][items], axis=-1)
        return jnp.mean((predicted - ratings) ** 2)

    def step(params, squares, users, items, ratings):
        gradients = jax.grad(loss)(params, users, items, ratings)
        squares = jax.tree.map(lambda s, g: s + g * g, squares, gradients)

        def updated(w, g, s):
            return w - 0.1 * g * jax.lax.rsqrt(s + 1e-8)

        return jax.tree.map(updated, params, gradients, squares), squares

    params = shapes(users=(4096, 128), items=(4096, 128))
    specs = {"users": ft.P("model", None), "items": ft.P("model", None)}
    sums = {"users": ft.P("model", None), "items": squares}
    index = ints(1024)
    ratings = floats(1024)
    batch = ft.P("data")
    layouts = laid((specs, sums, batch, batch, batch), (specs, None))
    return step, (params, params, index, index, ratings), layouts
