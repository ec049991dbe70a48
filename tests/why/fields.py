"""Images and fields: a U-Net, a diffusion sampler and a Fourier neural operator."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.why.arrays import descend, floats, laid, shapes
from tests.why.program import RELAID, Cause, Label, program

# A U-Net whose images are sharded along their height.


def convolve(x, kernel):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def shrink(x):
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).mean((2, 4))


def enlarge(x):
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def unet(kernels, images, at_bottom=lambda h: h):
    top = jax.nn.relu(convolve(images, kernels["enter"]))
    h = jax.nn.relu(convolve(shrink(top), kernels["down"]))
    h = at_bottom(jax.nn.relu(convolve(h, kernels["bottom"])))
    h = jnp.concatenate([top, enlarge(h)], axis=-1)
    h = jax.nn.relu(convolve(h, kernels["up"]))
    return convolve(h, kernels["leave"])


def unet_step(kernels, images, targets, at_bottom=lambda h: h):
    def loss(kernels):
        return jnp.mean((unet(kernels, images, at_bottom) - targets) ** 2)

    value, gradients = jax.value_and_grad(loss)(kernels)
    return descend(kernels, gradients), value


UNET = shapes(
    enter=(3, 3, 4, 32),
    down=(3, 3, 32, 64),
    bottom=(3, 3, 64, 64),
    up=(3, 3, 96, 32),
    leave=(3, 3, 32, 4),
)
IMAGES = floats(16, 32, 32, 4)
UNET_LAYOUTS = laid((P(), P("data", "space"), P("data", "space")), P())


@program(
    cause=Cause(
        Label("asked", kind="collective-permute", phase="forward"),
        "conv_general_dilated",
        ("images",),
    ),
    labels=[Label("asked", kind="collective-permute"), Label("asked", moves="gradient")],
    third="space",
)
def unet_halos(mesh: Mesh):
    """A U-Net's images are sharded by batch and height, so convolutions exchange the rows at
    the edges and the gradients of the kernels are summed over both axes."""

    def step(kernels, images, targets):
        return unet_step(kernels, images, targets)

    return step, (UNET, IMAGES, IMAGES), UNET_LAYOUTS


@program(
    cause=Cause(
        Label("compiler", kind="all-to-all", phase="forward"),
        "jnp.concatenate",
        ("images", 'P("data", None, "space")'),
    ),
    labels=[
        Label("compiler", kind="all-to-all"),
        Label("compiler", kind="all-gather"),
        Label("compiler", line="with_sharding_constraint"),
        Label("compiler", line="jnp.concatenate"),
    ],
    third="space",
)
def unet_width_for_height(mesh: Mesh):
    """A constraint at the bottom of a U-Net shards the width where everything else shards the
    height, so activations are relaid before and after it."""

    def along_height(h):
        # This spec was written for images with channels first: it shards the width here.
        return jax.lax.with_sharding_constraint(h, P("data", None, "space"))

    def step(kernels, images, targets):
        return unet_step(kernels, images, targets, along_height)

    return step, (UNET, IMAGES, IMAGES), UNET_LAYOUTS


# A sampler that returns its images for a program with another layout.


@program(
    cause=Cause(Label("compiler", axes=("data",)), "jax.lax.scan", ("noise",)),
    labels=[Label("asked", axes=("model",)), *RELAID],
    explicit=True,
)
def sampler_with_the_layout_of_a_viewer(mesh: Mesh):
    """A diffusion sampler works on a sharded batch and returns samples sharded by pixel, so the
    result is relaid at the end."""

    def denoise(weights, x, time):
        h = jax.nn.silu(jnp.einsum("bpe,eh->bph", x, weights["up"]) + time)
        return jnp.einsum("bph,he->bpe", h, weights["down"], out_sharding=P("data", None, None))

    def sample(weights, noise):
        def move(x, time):
            return x - 0.25 * denoise(weights, x, time), None

        samples, _ = jax.lax.scan(move, noise, jnp.linspace(1.0, 0.0, 4))
        return samples

    weights = shapes(up=(32, 128), down=(128, 32))
    noise = floats(16, 64, 32)
    specs = {"up": P(None, "model"), "down": P("model", None)}
    layouts = laid((specs, P("data")), P(None, "data"))
    return sample, (weights, noise), layouts


# A Fourier neural operator.


def spectral(weights, fields):
    """Mix the channels of the eight lowest modes of each dimension."""
    modes = jnp.fft.rfft2(fields, axes=(1, 2))[:, :8, :8]
    mixing = jax.lax.complex(weights["real"], weights["imaginary"])
    mixed = jnp.einsum("bxyi,xyio->bxyo", modes, mixing)
    height, width = fields.shape[1:3]
    mixed = jnp.pad(mixed, ((0, 0), (0, height - 8), (0, width // 2 + 1 - 8), (0, 0)))
    return jnp.fft.irfft2(mixed, axes=(1, 2))


@program(
    cause=Cause(Label("compiler", line="rfft2"), "rfft2", ("fields",)),
    labels=[Label("compiler", line="rfft2")],
    third="space",
    explicit=True,
)
def fourier_operator(mesh: Mesh):
    """A Fourier neural operator transforms unsharded dimensions of a sharded batch, but the
    compiler cannot partition a transform and gathers the batch at each one."""

    def step(weights, fields, targets):
        def loss(weights):
            h = jax.nn.gelu(spectral(weights, fields) + fields @ weights["local"])
            return jnp.mean((h - targets) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return descend(weights, gradients), value

    weights = shapes(real=(8, 8, 16, 16), imaginary=(8, 8, 16, 16), local=(16, 16))
    fields = floats(16, 32, 32, 16)
    return step, (weights, fields, fields), laid((P(), P("data"), P("data")))
