"""Programs with a constraint too many: its names are wrong, swapped, or left over."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

import functree as ft
from tests.why.arrays import descend, floats, laid, normed, shapes
from tests.why.mistake import Made, mistake


@mistake(
    "mixer: batch and channels swapped",
    edit="constraint",
    named='t = ft.constrain(t, ft.P(None, "data", "model"))',
)
def mixer(mesh: Mesh, mistaken: bool) -> Made:
    """A block of MLP-Mixer: an MLP over the patches, then one over the channels.

    The constraint in the MLP over patches names the batch's mesh axis for the channels, so the
    activations are exchanged before it and after it, 1 MiB each.
    """

    def block(params, x):
        t = jnp.swapaxes(normed(x), 1, 2)
        t = t @ params["patches_up"]
        if mistaken:
            t = ft.constrain(t, ft.P(None, "data", "model"))
        t = jax.nn.gelu(t) @ params["patches_down"]
        x = x + jnp.swapaxes(t, 1, 2)
        h = jax.nn.gelu(normed(x) @ params["channels_up"])
        return x + h @ params["channels_down"]

    params = shapes(
        patches_up=(64, 256),
        patches_down=(256, 64),
        channels_up=(128, 512),
        channels_down=(512, 128),
    )
    specs = {
        "patches_up": ft.P(None, "model"),
        "patches_down": ft.P("model", None),
        "channels_up": ft.P(None, "model"),
        "channels_down": ft.P("model", None),
    }
    x = floats(64, 64, 128)
    images = ft.P("data", None, None)
    return block, (params, x), laid((specs, images), images)


class Attention(eqx.Module):
    """Attention over all positions."""

    query: Float[Array, "embed heads dim"]
    key: Float[Array, "embed heads dim"]
    value: Float[Array, "embed heads dim"]
    out: Float[Array, "heads dim embed"]
    mistaken: bool = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        query = jnp.einsum("bse,ehd->bshd", x, self.query)
        key = jnp.einsum("bse,ehd->bshd", x, self.key)
        value = jnp.einsum("bse,ehd->bshd", x, self.value)
        scores = jnp.einsum("bshd,bthd->bhst", query, key) / query.shape[-1] ** 0.5
        if self.mistaken:
            scores = ft.constrain(scores, ft.P("data", None, "model", None))
        mixed = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), value)
        return jnp.einsum("bshd,hde->bse", mixed, self.out)


@mistake(
    "attention: scores constrained as queries",
    edit="constraint",
    named='scores = ft.constrain(scores, ft.P("data", None, "model", None))',
)
def encoder(mesh: Mesh, mistaken: bool) -> Made:
    """An attention layer whose heads lie on `model`, in a residual.

    The scores have their heads in dimension 1, and the constraint puts `model` on dimension 2,
    as for queries: what lies by heads is relaid to lie by positions, and back.
    """

    def encode(attention: Attention, x):
        return x + attention(normed(x))

    projection = floats(256, 8, 32)
    out = floats(8, 32, 256)
    attention = Attention(projection, projection, projection, out, mistaken)
    rules = ft.AxisRules({"batch": "data", "heads": "model", "dim": None, "embed": None})
    x = floats(64, 32, 256)
    sentences = ft.P("data", None, None)
    layouts = laid((rules, sentences), sentences)
    return encode, (attention, x), layouts


@mistake(
    "scanned block: the batch forgotten",
    edit="constraint",
    named='x = ft.constrain(x, ft.P(None, None, "data"))',
)
def scanned(mesh: Mesh, mistaken: bool) -> Made:
    """A scan over four blocks whose weights are sharded over `data`, as in FSDP, and `model`.

    The constraint on the carry lays `embed` over `data`, as in the weights, and forgets the
    batch: each of the four iterations relays the activations.
    """

    def block(x, layer):
        h = jax.nn.silu(normed(x) @ layer["up"])
        x = x + h @ layer["down"]
        if mistaken:
            x = ft.constrain(x, ft.P(None, None, "data"))
        return x, None

    def features(layers, x):
        x, _ = jax.lax.scan(block, x, layers)
        return normed(x).mean(1)

    layers = shapes(up=(4, 128, 512), down=(4, 512, 128))
    specs = {"up": ft.P(None, "data", "model"), "down": ft.P(None, "model", "data")}
    x = floats(64, 32, 128)
    layouts = laid((specs, ft.P("data", None, None)), ft.P("data", None))
    return features, (layers, x), layouts


@mistake(
    "autoencoder: names swapped in the decoder",
    edit="constraint",
    named='h = ft.constrain(h, ft.P("model", "data"))',
)
def autoencoder(mesh: Mesh, mistaken: bool) -> Made:
    """A step of a variational autoencoder: the constraint is in the function that is
    differentiated.

    The constraint in the decoder swaps `data` and `model`: hidden activations, and their
    gradients, go to other devices and come back.
    """

    def loss(params, images, noise):
        h = jax.nn.relu(images @ params["inwards"])
        mean, log_variance = h @ params["mean"], h @ params["log_variance"]
        z = mean + jnp.exp(log_variance / 2) * noise
        h = z @ params["outwards"]
        if mistaken:
            h = ft.constrain(h, ft.P("model", "data"))
        drawn = jax.nn.relu(h) @ params["draw"]
        divergence = jnp.exp(log_variance) + mean**2 - 1 - log_variance
        return jnp.mean((drawn - images) ** 2) + 0.01 * jnp.mean(divergence)

    def step(params, images, noise):
        value, gradients = jax.value_and_grad(loss)(params, images, noise)
        return descend(params, gradients), value

    params = shapes(
        inwards=(256, 512),
        mean=(512, 64),
        log_variance=(512, 64),
        outwards=(64, 512),
        draw=(512, 256),
    )
    specs = {
        "inwards": ft.P(None, "model"),
        "mean": ft.P("model", None),
        "log_variance": ft.P("model", None),
        "outwards": ft.P(None, "model"),
        "draw": ft.P("model", None),
    }
    images = floats(1024, 256)
    noise = floats(1024, 64)
    batch = ft.P("data", None)
    layouts = laid((specs, batch, batch), (specs, ft.P()))
    return step, (params, images, noise), layouts


@mistake(
    "patches: the batch on another axis",
    edit="constraint",
    named='x = ft.constrain(x, ft.P("expert", None, None))',
    third="expert",
)
def patches(mesh: Mesh, mistaken: bool) -> Made:
    """Patches of images, embedded, and an MLP; the mesh axis `expert` belongs to another model.

    A constraint from another model puts the batch on `expert`, where it comes and leaves on
    `data`: the activations move twice, 1 MiB each.
    """

    def features(params, images):
        x = images.reshape(images.shape[0], 8, 4, 8, 4, 3)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(images.shape[0], 64, 48)
        x = x @ params["patch"] + params["position"][None]
        if mistaken:
            x = ft.constrain(x, ft.P("expert", None, None))
        h = jax.nn.gelu(normed(x) @ params["up"])
        return x + h @ params["down"]

    params = shapes(patch=(48, 128), position=(64, 128), up=(128, 512), down=(512, 128))
    specs = {
        "patch": ft.P(),
        "position": ft.P(),
        "up": ft.P(None, "model"),
        "down": ft.P("model", None),
    }
    images = floats(64, 32, 32, 3)
    layouts = laid((specs, ft.P("data", None, None, None)), ft.P("data", None, None))
    return features, (params, images), layouts


class Gated(eqx.Module):
    """A gated MLP."""

    gate: Float[Array, "embed hidden"]
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    mistaken: bool = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        gate = x @ self.gate
        if self.mistaken:
            gate = ft.constrain(gate, ft.P("data", "model", None))
        return (jax.nn.silu(gate) * (x @ self.up)) @ self.down


@mistake(
    "gated MLP: a sequence's constraint left over",
    edit="constraint",
    named='gate = ft.constrain(gate, ft.P("data", "model", None))',
)
def gated(mesh: Mesh, mistaken: bool) -> Made:
    """A gated MLP, once tried with the sequence sharded over `model`.

    The gate is constrained over the sequence, and what it multiplies lies over `hidden`, so one
    of them is relaid.
    """

    def apply(mlp: Gated, x):
        return x + mlp(normed(x))

    into = floats(256, 1024)
    mlp = Gated(into, into, floats(1024, 256), mistaken)
    rules = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
    x = floats(64, 32, 256)
    sentences = ft.P("data", None, None)
    return apply, (mlp, x), laid((rules, sentences), sentences)
