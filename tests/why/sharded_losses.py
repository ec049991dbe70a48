"""Losses over a sharded vocabulary, and over all pairs of a sharded batch: labeled programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

import functree as ft
from tests.why.arrays import floats, ints, laid
from tests.why.program import RELAID, Cause, Label, program

BATCH, SEQ, EMBED, VOCAB = 16, 32, 64, 128
PIXELS, WORDS, SHARED = 64, 128, 32

P = ft.P


# --- Label smoothing, with two names of a constraint in the wrong order.

RULES = ft.AxisRules({"batch": "data", "seq": "seq", "vocab": "model", ...: None})


class Head(eqx.Module):
    body: Float[Array, "embed embed"]
    head: Float[Array, "embed vocab"]

    def __init__(self, key):
        body, head = jax.random.split(key)
        self.body = jax.random.normal(body, (EMBED, EMBED)) / EMBED**0.5
        self.head = jax.random.normal(head, (EMBED, VOCAB)) / EMBED**0.5

    def __call__(self, x: Float[Array, "batch seq embed"]):
        features = jnp.tanh(x @ self.body)
        return ft.constrain(features @ self.head, "batch seq vocab", RULES)


def smoothed_loss(
    model: Head, x: Float[Array, "batch seq embed"], targets: Int[Array, "batch seq"]
):
    log_probabilities = jax.nn.log_softmax(model(x), axis=-1)
    log_probabilities = ft.constrain(log_probabilities, "batch vocab seq", RULES)
    smooth = 0.9 * jax.nn.one_hot(targets, VOCAB) + 0.1 / VOCAB
    return -jnp.mean(jnp.sum(smooth * log_probabilities, axis=-1))


@program(
    cause=Cause(
        Label("compiler", phase="forward"),
        '"batch vocab seq"',
        ('"batch vocab seq"', '"batch seq vocab"'),
    ),
    labels=[Label("compiler", line='"batch vocab seq"'), *RELAID],
)
def label_smoothing_with_swapped_names(mesh: Mesh):
    """Gradients of a smoothed cross entropy whose log probabilities are constrained with
    vocabulary and sequence swapped: they are exchanged between `seq` and `model`."""

    def gradient(model, x, targets):
        return ft.value_and_grad(smoothed_loss, layout=RULES)(model, x, targets)

    targets = ints(BATCH, SEQ)
    args = ft.abstract(Head)(jax.random.key(0)), floats(BATCH, SEQ, EMBED), targets
    parts = P("data", "seq")
    return gradient, args, laid((RULES, parts, parts), (P(), RULES))


# --- A contrastive loss: each image against the texts of the whole batch.


def unit(x):
    return x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True))


@program(
    cause=Cause(
        Label("asked", kind="all-gather", phase="forward"), "jax.sharding.reshard(text", ("texts",)
    ),
    explicit=True,
)
def contrastive(mesh: Mesh):
    """Gradients of a contrastive loss on Explicit axes: the text features are gathered by a
    reshard that the loss has for it, and sums over the batch are sums over `data`."""

    def loss(params, images, texts):
        image = unit(images @ params["image"])
        text = unit(texts @ params["text"])
        everyone = jax.sharding.reshard(text, P(None, None))
        logits = image @ everyone.T * params["temperature"]
        positive = jnp.sum(image * text, axis=-1)
        positive = positive * params["temperature"]
        by_image = jnp.mean(jax.nn.logsumexp(logits, axis=1))
        by_text = jnp.mean(jax.nn.logsumexp(logits, axis=0))
        return by_image + by_text - 2 * jnp.mean(positive)

    def gradient(params, images, texts):
        return jax.value_and_grad(loss)(params, images, texts)

    whole, batch = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = tower_shapes(whole)
    images = floats(2 * BATCH, PIXELS, sharding=batch)
    return gradient, (params, images, floats(2 * BATCH, WORDS, sharding=batch)), {}


def tower_shapes(sharding: NamedSharding | None = None):
    return {
        "image": floats(PIXELS, SHARED, sharding=sharding),
        "text": floats(WORDS, SHARED, sharding=sharding),
        "temperature": floats(sharding=sharding),
    }


@program(
    cause=Cause(Label("compiler", phase="forward"), "image * text", ("images", "texts")),
    labels=[Label("compiler", line="positive = jnp.sum(image * text"), *RELAID],
)
def contrastive_towers_on_two_axes(mesh: Mesh):
    """A step of a contrastive loss whose images are sharded over `data` and whose texts over
    `model`: this suits all pairs, but an image and its own text are on two devices, so the
    features of one tower are relaid."""

    def loss(params, images, texts):
        image = unit(images @ params["image"])
        text = unit(texts @ params["text"])
        logits = image @ text.T * params["temperature"]
        positive = jnp.sum(image * text, axis=-1)
        positive = positive * params["temperature"]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1)) - jnp.mean(positive)

    def descend(params, images, texts):
        value, grads = jax.value_and_grad(loss)(params, images, texts)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    layouts = laid((P(), P("data"), P("model")), (P(), P()))
    return descend, (tower_shapes(), floats(2 * BATCH, PIXELS), floats(2 * BATCH, WORDS)), layouts
