"""Programs with a constraint too many: its mesh axes are swapped, or of another model."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import functree as ft
from tests.why.arrays import descend, floats, laid, normed, shapes
from tests.why.mistake import Made, mistake


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
