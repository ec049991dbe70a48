r"""This script plans and trains models written without functree, and compares with plain Equinox.

    python benchmarks/peers/models.py [--only NAME]

Each model comes from another package, or is a shortened example from the documentation of Equinox
or diffrax. None has annotations for functree. Each is laid out in two ways: with `ft.FSDP`, and
with an `ft.StateSharding` of path filters.

- At its full size, the model is planned with Adam's state, and nothing is allocated. The full size is the published or
  documented size. For a mere layer or sketch, it is a size that is worth sharding.
- At a small size, the model is trained for three steps on eight simulated devices. The losses, the norms of the
  gradients, the parameters and the model's state must equal the results of `eqx.filter_jit` on one device. Each array
  must be sharded as planned, and the step must compile once.

The exit status is 1 if a model fails any of this. The script takes ten minutes, and is not part of
CI. It needs its own environment:

    python -m venv build/models && . build/models/bin/activate
    pip install -e . jax==0.10.2 jaxlib==0.10.2 diffrax==0.7.2 equimo==1.1.0 esm2quinox==0.2.0 flowjax==19.1.2 \
        jaxonmodels==0.2.3 memax==0.1.1 paramax==0.0.5 quax==0.4.6
"""

import argparse
import importlib.metadata
import itertools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads both variables once, when it starts
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import functree as ft

try:
    import diffrax
    import flowjax.distributions
    import flowjax.flows
    import paramax
    import quax
    from equimo.models import convnext, vit
    from esm2quinox import ESM2
    from jaxonmodels.models.mamba import Mamba
    from jaxonmodels.models.vit import VisionTransformer
    from memax.equinox.train_utils import add_batch_dim, get_residual_memory_model
    from quax.examples import lora
except ModuleNotFoundError as error:
    sys.exit(
        f"the package {error.name} is not installed: see the command at the top of {os.path.basename(__file__)}"
    )

STEPS = 3
BATCH = 16
RATE = 1e-3
# Adam divides a gradient by its magnitude. A gradient may be zero except for rounding, such as the
# gradient of a bias before a normalization. It would become a full step in a random direction. This
# epsilon keeps such a step small.
TX = optax.adamw(RATE, eps=1e-4)
# On several devices, sums have a different order, so values differ by rounding: here by about 1e-6.
# Training moves parameters by up to STEPS * RATE. A wrong step, such as a gradient of only a part of
# the batch, misses by a large part of this distance. One hundredth of the distance is allowed. Adam
# hides gradients with a wrong factor, so the norms of the gradients are compared too.
TOLERANCE = 0.01 * STEPS * RATE

FULL_MESH = {"data": 8, "model": 4}
SMALL_MESH = {"data": 2, "model": 4}
LAYOUTS = ("FSDP", "filters")

Batch = tuple[jax.Array, ...]
MakeBatch = Callable[[jax.Array], Batch]


class Example(NamedTuple):
    """A model from another package, and its training.

    Attributes:
        name: the name that `--only` searches.
        package: the distribution that has the model.
        make: (whether it has its full size, a key) -> the model; a pair with an `eqx.nn.State` if
            it has one.
        loss: (model, *batch) -> the loss; for a model with state, (model, state, *batch) -> (loss,
            state).
        batch: a key -> the arrays of a batch for the small size.
        filters: path filters -> specs over the mesh axis `model`; everything else is replicated.
        needed: the code that this model needs besides the filters.
        trained: a filter for the parameters that are trained.
        plain_trained: this filter for `eqx.partition`: a model -> whether each leaf is trained.
        traceable: whether the model can be made under `jax.jit`, and thus by `ft.init`.
    """

    name: str
    package: str
    make: Callable[[bool, jax.Array], Any]
    loss: Callable[..., Any]
    batch: MakeBatch
    filters: dict[Any, ft.P]
    needed: str = ""
    trained: Any = ft.is_trainable
    plain_trained: Callable[[Any], Any] = lambda model: jax.tree.map(eqx.is_inexact_array, model)
    traceable: bool = True


# --- Batches and losses that several models share.


def images(channels: int, size: int, classes: int) -> MakeBatch:
    return lambda key: (
        jax.random.normal(key, (BATCH, channels, size, size)),
        jnp.arange(BATCH) % classes,
    )


def tokens(length: int, vocabulary: int) -> MakeBatch:
    return lambda key: (jax.random.randint(key, (BATCH, length), 3, vocabulary),)


def vectors(inputs: int, outputs: int) -> MakeBatch:
    def batch(key: jax.Array) -> Batch:
        x = jax.random.normal(key, (BATCH, inputs))
        return x, jnp.sin(x[:, :outputs])

    return batch


def series(size: int) -> MakeBatch:
    """Draw random walks, each with a label."""

    def batch(key: jax.Array) -> Batch:
        walks = jnp.cumsum(0.1 * jax.random.normal(key, (BATCH, 10, size)), axis=1)
        return walks, (walks[:, -1, 0] > 0).astype(float)

    return batch


def with_keys(make: MakeBatch) -> MakeBatch:
    """Make a batch with a key for each of its elements, for dropout."""
    return lambda key: (*make(key), jax.random.split(key, BATCH))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def classify(model: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return cross_entropy(jax.vmap(model)(x), labels)


def classify_series(model: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(jax.vmap(model)(x), labels).mean()


def next_token(model: Any, x: jax.Array) -> jax.Array:
    return cross_entropy(jax.vmap(model)(x)[:, :-1], x[:, 1:])


def squared_error(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


# --- Models from packages.


def make_dino(full: bool, key: jax.Array) -> Any:
    if full:
        return vit.dinov3_vit7b16_pretrain_lvd1689m(key=key)
    small = {
        "img_size": 32,
        "dim": 64,
        "num_heads": 4,
        "depths": [2],
        "patch_size": 8,
        "dynamic_img_size": False,
    }
    return vit.dinov3_vit7b16_pretrain_lvd1689m(key=key, num_classes=8, **small)


def classify_with_keys(model: Any, x: jax.Array, labels: jax.Array, keys: jax.Array) -> jax.Array:
    return cross_entropy(jax.vmap(model)(x, keys), labels)


def make_convnext(full: bool, key: jax.Array) -> Any:
    if full:
        return convnext.convnext_l(key=key)
    return convnext.ConvNeXt(depths=[1, 1, 1, 1], dims=[16, 32, 64, 64], num_classes=8, key=key)


def make_mamba(full: bool, key: jax.Array) -> Any:
    if full:
        return Mamba(n_embd=768, n_dims=50280, n_layers=24, key=key)
    return Mamba(n_embd=32, n_dims=64, n_layers=2, key=key)


def make_clip(full: bool, key: jax.Array) -> Any:
    # The resolution, the patch size, the width, the layers, the heads and the size of the result.
    return VisionTransformer(
        *((224, 14, 1024, 24, 16, 768) if full else (16, 4, 64, 2, 4, 16)), key=key
    )


def clip_loss(model: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return classify(lambda image: model(image)[0], x, labels)


def make_esm(full: bool, key: jax.Array) -> Any:
    layers, size, heads = (48, 5120, 40) if full else (2, 32, 4)
    return ESM2(layers, size, heads, token_dropout=True, key=key)


def esm_loss(model: Any, x: jax.Array) -> jax.Array:
    return cross_entropy(jax.vmap(model)(x).logits, x)


def make_memory(name: str) -> Callable[[bool, jax.Array], Any]:
    def make(full: bool, key: jax.Array) -> Any:
        size, layers = (1024, 8) if full else (16, 2)
        return get_residual_memory_model(
            name, 8, size, 8, num_layers=layers, key=key, model_kwargs={}
        )

    return make


def memory_loss(model: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    starts = jnp.zeros(x.shape[:2], bool).at[:, 0].set(True)
    _, out = jax.vmap(model)(add_batch_dim(model.initialize_carry(), BATCH), (x, starts))
    return optax.sigmoid_binary_cross_entropy(out[:, -1, 0], labels).mean()


def make_flow(full: bool, key: jax.Array) -> Any:
    size, width, layers = (64, 1024, 10) if full else (8, 32, 2)
    base = flowjax.distributions.Normal(jnp.zeros(size))
    return flowjax.flows.masked_autoregressive_flow(
        key, base_dist=base, nn_width=width, nn_depth=2, flow_layers=layers
    )


def flow_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return -paramax.unwrap(model).log_prob(x).mean()


def not_frozen(model: Any) -> Any:
    return jax.tree.map(
        eqx.is_inexact_array, model, is_leaf=lambda node: isinstance(node, paramax.NonTrainable)
    )


def make_normalized(full: bool, key: jax.Array) -> Any:
    mlp = eqx.nn.MLP(64, 8, 4096 if full else 32, 3, key=key)
    weights = lambda mlp: [layer.weight for layer in mlp.layers]  # noqa: E731
    return eqx.tree_at(weights, mlp, replace_fn=paramax.WeightNormalization)


def normalized_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return squared_error(paramax.unwrap(model), x, y)


def make_lora(full: bool, key: jax.Array) -> Any:
    return lora.loraify(make_bert(full, key), rank=8, key=key)


def low_rank(model: Any) -> Any:
    def trained(keys: Any, x: Any) -> bool:
        return eqx.is_inexact_array(x) and jax.tree_util.keystr(keys).endswith(
            (".weight.a", ".weight.b")
        )

    return jax.tree_util.tree_map_with_path(trained, model)


# --- Examples from the documentation of diffrax.


class VectorField(eqx.Module):
    scale: jax.Array
    mlp: eqx.nn.MLP

    def __call__(self, t: Any, y: jax.Array, args: Any) -> jax.Array:
        return self.scale * self.mlp(y)


class NeuralODE(eqx.Module):
    field: VectorField

    def __init__(self, size: int, width: int, key: jax.Array):
        mlp = eqx.nn.MLP(size, size, width, 2, jax.nn.softplus, final_activation=jnp.tanh, key=key)
        self.field = VectorField(jnp.ones(()), mlp)

    def __call__(self, ys: jax.Array) -> jax.Array:
        ts = jnp.linspace(0.0, 1.0, len(ys))
        controller = diffrax.PIDController(rtol=1e-3, atol=1e-6)
        term, saved = diffrax.ODETerm(self.field), diffrax.SaveAt(ts=ts)
        solver = diffrax.Tsit5()
        return diffrax.diffeqsolve(
            term, solver, ts[0], ts[-1], ts[1], ys[0], saveat=saved, stepsize_controller=controller
        ).ys


def ode_loss(model: Any, ys: jax.Array, labels: jax.Array) -> jax.Array:
    return squared_error(model, ys, ys)


class MatrixField(eqx.Module):
    mlp: eqx.nn.MLP
    shape: tuple[int, int]

    def __call__(self, t: Any, y: jax.Array, args: Any) -> jax.Array:
        return self.mlp(y).reshape(self.shape)


class NeuralCDE(eqx.Module):
    initial: eqx.nn.MLP
    field: MatrixField
    linear: eqx.nn.Linear

    def __init__(self, inputs: int, size: int, width: int, key: jax.Array):
        keys, options = (
            jax.random.split(key, 3),
            {"activation": jax.nn.softplus, "final_activation": jnp.tanh},
        )
        self.initial = eqx.nn.MLP(inputs, size, width, 1, key=keys[0])
        self.field = MatrixField(
            eqx.nn.MLP(size, size * inputs, width, 1, **options, key=keys[1]), (size, inputs)
        )
        self.linear = eqx.nn.Linear(size, 1, key=keys[2])

    def __call__(self, xs: jax.Array) -> jax.Array:
        ts = jnp.linspace(0.0, 1.0, len(xs))
        control = diffrax.CubicInterpolation(ts, diffrax.backward_hermite_coefficients(ts, xs))
        term = diffrax.ControlTerm(self.field, control).to_ode()
        # The example uses adaptive steps, which make the model discontinuous. Inputs that differ by
        # 1e-7 take different numbers of steps, and the results differ by 1e-2.
        solution = diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 1.0, 0.05, self.initial(control.evaluate(0.0))
        )
        return self.linear(solution.ys[-1])[0]


# --- Examples from the documentation of Equinox.


class CNN(eqx.Module):
    layers: list[Any]

    def __init__(self, width: int, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(1728, width, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(width, 64, key=keys[2]),
            jax.nn.relu,
            eqx.nn.Linear(64, 10, key=keys[3]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


class BertLayer(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, size: int, heads: int, key: jax.Array):
        keys = jax.random.split(key, 3)
        biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.attention = eqx.nn.MultiheadAttention(
            heads, size, **biases, dropout_p=0.1, key=keys[0]
        )
        self.attention_norm, self.norm = eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size)
        self.up = eqx.nn.Linear(size, 4 * size, key=keys[1])
        self.down = eqx.nn.Linear(4 * size, size, key=keys[2])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: jax.Array, mask: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 3)
        attended = self.attention(x, x, x, mask=mask, key=keys[0])
        x = jax.vmap(self.attention_norm)(x + self.dropout(attended, key=keys[1]))
        hidden = jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))
        return jax.vmap(self.norm)(x + self.dropout(hidden, key=keys[2]))


class Bert(eqx.Module):
    token: eqx.nn.Embedding
    position: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    layers: list[BertLayer]
    pooler: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(
        self, vocabulary: int, length: int, size: int, layers: int, heads: int, key: jax.Array
    ):
        keys = jax.random.split(key, 4 + layers)
        self.token = eqx.nn.Embedding(vocabulary, size, key=keys[0])
        self.position = eqx.nn.Embedding(length, size, key=keys[1])
        self.norm = eqx.nn.LayerNorm(size)
        self.layers = [BertLayer(size, heads, key) for key in keys[4:]]
        self.pooler = eqx.nn.Linear(size, size, key=keys[2])
        self.head = eqx.nn.Linear(size, 2, key=keys[3])

    def __call__(self, tokens: jax.Array, key: jax.Array) -> jax.Array:
        x = jax.vmap(self.token)(tokens) + self.position.weight[: len(tokens)]
        x = jax.vmap(self.norm)(x)
        mask = (tokens != 0)[:, None] & (tokens != 0)
        for layer, layer_key in zip(
            self.layers, jax.random.split(key, len(self.layers)), strict=True
        ):
            x = layer(x, mask, layer_key)
        return self.head(jnp.tanh(self.pooler(x[0])))


def make_bert(full: bool, key: jax.Array) -> Any:
    return Bert(30522, 512, 1024, 24, 16, key) if full else Bert(50, 16, 32, 2, 4, key)


def bert_loss(model: Any, x: jax.Array, keys: jax.Array) -> jax.Array:
    return cross_entropy(jax.vmap(model)(x, keys), x[:, 0] % 2)


class Mixer(eqx.Module):
    """The MLP-mixer from the score-based diffusion example, whose `t1` is a Python number."""

    conv_in: eqx.nn.Conv2d
    conv_out: eqx.nn.ConvTranspose2d
    patches: list[eqx.nn.MLP]
    hidden: list[eqx.nn.MLP]
    norms: list[eqx.nn.LayerNorm]
    t1: float

    def __init__(self, image: int, hidden: int, width: int, blocks: int, key: jax.Array):
        keys, patches = jax.random.split(key, 2 + 2 * blocks), (image // 4) ** 2
        self.conv_in = eqx.nn.Conv2d(2, hidden, 4, stride=4, key=keys[0])
        self.conv_out = eqx.nn.ConvTranspose2d(hidden, 1, 4, stride=4, key=keys[1])
        self.patches = [eqx.nn.MLP(patches, patches, width, depth=1, key=key) for key in keys[2::2]]
        self.hidden = [eqx.nn.MLP(hidden, hidden, width, depth=1, key=key) for key in keys[3::2]]
        self.norms = [eqx.nn.LayerNorm((hidden, patches)) for _ in range(blocks + 1)]
        self.t1 = 10.0

    def __call__(self, t: jax.Array, y: jax.Array) -> jax.Array:
        y = self.conv_in(jnp.concatenate([y, jnp.full_like(y, t / self.t1)]))
        shape, y = y.shape, y.reshape(len(y), -1)
        for patch, hidden, norm in zip(self.patches, self.hidden, self.norms[1:], strict=True):
            y = y + jax.vmap(patch)(norm(y))
            y = y + jax.vmap(hidden)(y.T).T
        return self.conv_out(self.norms[0](y).reshape(shape))


def make_mixer(full: bool, key: jax.Array) -> Any:
    return Mixer(28, 64, 512, 4, key) if full else Mixer(16, 16, 32, 2, key)


class Block(eqx.Module):
    """A residual block of the U-Net, with or without linear attention."""

    time: eqx.nn.Linear
    norms: list[eqx.nn.GroupNorm]
    convs: list[eqx.nn.Conv2d]
    skip: eqx.nn.Conv2d
    attention: tuple[eqx.nn.Conv2d, eqx.nn.Conv2d] | None
    resize: Callable[[jax.Array], jax.Array] | None

    def __init__(
        self,
        sizes: tuple[int, int],
        time: int,
        key: jax.Array,
        resize: Any = None,
        attend: bool = False,
    ):
        keys, (before, after) = jax.random.split(key, 6), sizes
        self.time = eqx.nn.Linear(time, after, key=keys[0])
        self.norms = [eqx.nn.GroupNorm(min(size // 4, 32), size) for size in sizes]
        first = eqx.nn.Conv2d(before, after, 3, padding=1, key=keys[1])
        self.convs = [first, eqx.nn.Conv2d(after, after, 3, padding=1, key=keys[2])]
        self.skip = eqx.nn.Conv2d(before, after, 1, key=keys[3])
        qkv, out = (
            eqx.nn.Conv2d(after, 3 * 128, 1, key=keys[4]),
            eqx.nn.Conv2d(128, after, 1, key=keys[5]),
        )
        self.attention = (qkv, out) if attend else None
        self.resize = resize

    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        h = jax.nn.silu(self.norms[0](x))
        if self.resize is not None:
            h, x = self.resize(h), self.resize(x)
        h = self.convs[0](h) + self.time(jax.nn.silu(t))[:, None, None]
        x = (self.convs[1](jax.nn.silu(self.norms[1](h))) + self.skip(x)) / 2**0.5
        if self.attention is None:
            return x
        qkv, out = self.attention
        q, k, v = qkv(x).reshape(3, 4, 32, x.shape[1] * x.shape[2])
        attended = jnp.einsum("hdn,hen,hdm->hem", jax.nn.softmax(k), v, q)
        return x + out(attended.reshape(128, *x.shape[1:]))


def upsample(x: jax.Array) -> jax.Array:
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def downsample(x: jax.Array) -> jax.Array:
    return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2).mean(axis=(2, 4))


class UNet(eqx.Module):
    frequencies: jax.Array
    mlp: eqx.nn.MLP
    first: eqx.nn.Conv2d
    downs: list[Block]
    middle: Block
    ups: list[Block]
    last: list[Any]

    def __init__(self, channels: int, size: int, levels: tuple[int, ...], key: jax.Array):
        keys = iter(jax.random.split(key, 4 + 2 * len(levels)))
        sizes = [size, *(size * level for level in levels)]
        pairs = list(itertools.pairwise(sizes))
        self.frequencies = jnp.exp(-jnp.linspace(0.0, 9.0, size // 2))
        self.mlp = eqx.nn.MLP(size, size, 4 * size, 1, jax.nn.silu, key=next(keys))
        self.first = eqx.nn.Conv2d(channels, size, 3, padding=1, key=next(keys))
        self.downs = [Block(pair, size, next(keys), downsample) for pair in pairs]
        self.middle = Block((sizes[-1], sizes[-1]), size, next(keys), attend=True)
        self.ups = [
            Block((2 * after, before), size, next(keys), upsample)
            for before, after in reversed(pairs)
        ]
        last = eqx.nn.Conv2d(size, channels, 1, key=next(keys))
        self.last = [eqx.nn.GroupNorm(min(size // 4, 32), size), jax.nn.silu, last]

    def __call__(self, t: jax.Array, y: jax.Array) -> jax.Array:
        t = self.mlp(
            jnp.concatenate([jnp.sin(t * self.frequencies), jnp.cos(t * self.frequencies)])
        )
        y, kept = self.first(y), []
        for down in self.downs:
            y = down(y, t)
            kept.append(y)
        y = self.middle(y, t)
        for up in self.ups:
            y = up(jnp.concatenate([y, kept.pop()]), t)
        for layer in self.last:
            y = layer(y)
        return y


def make_unet(full: bool, key: jax.Array) -> Any:
    return UNet(3, 128, (1, 2, 2, 2), key) if full else UNet(1, 16, (1, 2), key)


def noised_images(key: jax.Array) -> Batch:
    image_key, noise_key = jax.random.split(key)
    times, shape = jnp.linspace(0.1, 10.0, BATCH), (BATCH, 1, 16, 16)
    return jax.random.normal(image_key, shape), times, jax.random.normal(noise_key, shape)


def score_loss(model: Any, x: jax.Array, t: jax.Array, noise: jax.Array) -> jax.Array:
    kept = jnp.exp(-t / 2)[:, None, None, None]
    return jnp.mean((jax.vmap(model)(t, kept * x + jnp.sqrt(1 - kept**2) * noise) + noise) ** 2)


class RNN(eqx.Module):
    hidden_size: int
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear
    bias: jax.Array

    def __init__(self, inputs: int, hidden_size: int, key: jax.Array):
        keys = jax.random.split(key)
        self.hidden_size = hidden_size
        self.cell = eqx.nn.GRUCell(inputs, hidden_size, key=keys[0])
        self.linear = eqx.nn.Linear(hidden_size, 1, use_bias=False, key=keys[1])
        self.bias = jnp.zeros(1)

    def __call__(self, xs: jax.Array) -> jax.Array:
        def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return self.cell(x, carry), None

        hidden, _ = jax.lax.scan(step, jnp.zeros(self.hidden_size), xs)
        return (self.linear(hidden) + self.bias)[0]


class Stateful(eqx.Module):
    norm1: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm[eqx.nn.Linear]
    norm2: eqx.nn.BatchNorm
    linear1: eqx.nn.Linear
    linear2: eqx.nn.Linear

    def __init__(self, size: int, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.norm1 = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.spectral = eqx.nn.SpectralNorm(
            eqx.nn.Linear(16, size, key=keys[0]), "weight", key=keys[1]
        )
        self.norm2 = eqx.nn.BatchNorm(size, axis_name="batch", mode="batch")
        self.linear1 = eqx.nn.Linear(size, size, key=keys[2])
        self.linear2 = eqx.nn.Linear(size, 8, key=keys[3])

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        x, state = self.norm1(x, state)
        x, state = self.spectral(x, state)
        x, state = self.norm2(jax.nn.relu(x), state)
        return self.linear2(jax.nn.relu(self.linear1(x))), state


class Discriminator(eqx.Module):
    """The discriminator of the deep convolutional GAN."""

    layers: list[Any]

    def __init__(self, width: int, key: jax.Array):
        keys, sizes = jax.random.split(key, 5), [1, width, 2 * width, 4 * width, 8 * width]
        self.layers = []
        for i in range(4):
            conv = eqx.nn.Conv2d(
                sizes[i], sizes[i + 1], 4, stride=2, padding=1, use_bias=False, key=keys[i]
            )
            norms = [eqx.nn.BatchNorm(sizes[i + 1], axis_name="batch", mode="ema")] if i > 0 else []
            self.layers += [conv, *norms, eqx.nn.PReLU(0.2)]
        self.layers.append(eqx.nn.Conv2d(sizes[-1], 1, 4, use_bias=False, key=keys[4]))

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        for layer in self.layers:
            x, state = layer(x, state) if isinstance(layer, eqx.nn.BatchNorm) else (layer(x), state)
        return x.ravel()[0], state


def make_stateful(full: bool, key: jax.Array) -> Any:
    return eqx.nn.make_with_state(Stateful)(1024 if full else 32, key)


def make_discriminator(full: bool, key: jax.Array) -> Any:
    return eqx.nn.make_with_state(Discriminator)(64 if full else 8, key)


def over_batch(model: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


def stateful_loss(model: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
    predicted, state = over_batch(model, state, x)
    return jnp.mean((predicted - y) ** 2), state


def discriminator_loss(
    model: Any, state: Any, x: jax.Array, labels: jax.Array
) -> tuple[jax.Array, Any]:
    logits, state = over_batch(model, state, x)
    return optax.sigmoid_binary_cross_entropy(logits, labels.astype(float)).mean(), state


# --- The table of the models. An Equinox layer's weight has the dimensions (out, in). A
# convolution's weight has the window's dimensions after these. Layers made by `eqx.filter_vmap` have
# one more leading dimension.

OUT, IN = ft.P("model"), ft.P(None, "model")
STACKED_OUT, STACKED_IN = ft.P(None, "model"), ft.P(None, None, "model")

# fmt: off
EXAMPLES = (
    Example(
        "DINOv3 7B", "equimo", make_dino, classify_with_keys, with_keys(images(3, 32, 8)),
        {"**.qkv.*": OUT, "**.attn.proj.weight": IN, "**.mlp.w3.weight": IN, "**.mlp.*.*": OUT},
    ),
    Example(
        "ConvNeXt-L", "equimo", make_convnext, classify, images(3, 32, 8),
        {"**.pwconv1.*": OUT, "**.pwconv2.weight": IN, "**.downsample.conv.weight": OUT},
    ),
    Example(
        "Mamba 130M", "jaxonmodels", make_mamba, next_token, tokens(12, 64),
        {
            "**.in_proj.*": OUT,
            "**.conv1d.*": OUT,
            "**.ssm.input_proj.weight": IN,
            "**.ssm.**": OUT,
            "**.out_proj.weight": IN,
            "shared_emb_lm_head.**": OUT,
        },
    ),
    Example(
        "CLIP ViT-L/14", "jaxonmodels", make_clip, clip_loss, images(3, 16, 16),
        {
            "conv1.weight": OUT,
            "**.attn.in_proj_*": OUT,
            "**.attn.out_proj.weight": IN,
            "**.c_fc.*": OUT,
            "**.c_proj.weight": IN,
        },
    ),
    Example(
        "ESM2 15B", "esm2quinox", make_esm, esm_loss, tokens(12, 30),
        {
            "layers.attn.output_proj.weight": STACKED_IN,
            "layers.attn.*_proj.*": STACKED_OUT,
            "layers.linear1.*": STACKED_OUT,
            "layers.linear2.weight": STACKED_IN,
            "logit_head.linear1.weight": OUT,
        },
        "the layers are stacked: specs with one more dimension",
    ),
    Example(
        "LRU of 8 × 1024", "memax", make_memory("LRU"), memory_loss, series(8),
        {"layers.*.C_*": IN, "layers.*.*": OUT, "ff.**": OUT},
    ),
    Example(
        "S6 of 8 × 1024", "memax", make_memory("S6"), memory_loss, series(8),
        {"layers.*.C.weight": IN, "layers.**.weight": OUT, "ff.**": OUT},
    ),
    Example(
        "MAF of 10 × 1024", "flowjax", make_flow, flow_loss, vectors(8, 8),
        {"**.layers.2.weight.**": STACKED_IN, "**.layers.*.weight.**": STACKED_OUT},
        "wrt= without paramax.NonTrainable; made outside ft.init and ft.abstract, as it closes over arrays",
        trained=ft.is_trainable & ~ft.under(paramax.NonTrainable),
        plain_trained=not_frozen,
        traceable=False,
    ),
    Example(
        "normalized MLP of 4096", "paramax", make_normalized, normalized_loss, vectors(64, 8),
        {"layers.3.weight.weight": IN, "layers.3.**": ft.P(), "layers.**": OUT},
    ),
    Example(
        "LoRA of BERT-large", "quax", make_lora, lambda *args: quax.quaxify(bert_loss)(*args),
        with_keys(tokens(12, 50)),
        {
            "head.**": ft.P(),
            "**.down.weight._w": IN,
            "**.output_proj.weight._w": IN,
            "**.weight.b": IN,
            "**.weight.*": OUT,
        },
        "wrt= of the low-rank matrices",
        trained=ft.glob("**.weight.a") | ft.glob("**.weight.b"),
        plain_trained=low_rank,
    ),
    Example(
        "neural ODE", "diffrax", lambda full, key: NeuralODE(8, 64 if full else 16, key), ode_loss, series(8),
        {"**.layers.2.weight": IN, "**.layers.*.weight": OUT},
    ),
    Example(
        "neural CDE", "diffrax", lambda full, key: NeuralCDE(4, 8, 128 if full else 16, key), classify_series,
        series(4),
        {"**.layers.*.weight": OUT, "linear.weight": IN},
    ),
    Example(
        "BERT-large", "equinox", make_bert, bert_loss, with_keys(tokens(12, 50)),
        {
            "token.weight": IN,
            "**.output_proj.weight": IN,
            "**.attention.*.*": OUT,
            "**.up.*": OUT,
            "**.down.weight": IN,
        },
    ),
    Example(
        "CNN", "equinox", lambda full, key: CNN(512 if full else 32, key), classify, images(1, 28, 10),
        {"layers.4.*": OUT, "layers.6.weight": IN},
    ),
    Example(
        "MLP-mixer", "equinox", make_mixer, score_loss, noised_images,
        {"**.layers.0.*": OUT, "**.layers.1.weight": IN, "conv_in.weight": OUT},
    ),
    Example(
        "U-Net of 128", "equinox", make_unet, score_loss, noised_images,
        {"**.convs.0.*": OUT, "**.convs.1.weight": IN, "**.time.*": OUT, "mlp.layers.0.*": OUT},
    ),
    Example(
        "GRU of 1024", "equinox", lambda full, key: RNN(4, 1024 if full else 16, key), classify_series, series(4),
        {"cell.weight_*": OUT, "cell.bias": OUT, "linear.weight": IN},
    ),
    Example(
        "BatchNorm and SpectralNorm", "equinox", make_stateful, stateful_loss, vectors(16, 8),
        {"spectral.layer.*": OUT, "norm2.weight": OUT, "norm2.bias": OUT, "linear1.weight": IN},
        "the eqx.nn.State is passed to TrainState.create and apply_gradients",
    ),
    Example(
        "DCGAN discriminator", "equinox", make_discriminator, discriminator_loss, images(1, 64, 2),
        {"layers.11.weight": IN, ft.under(eqx.nn.Conv2d): OUT},
        "the eqx.nn.State is passed to TrainState.create and apply_gradients",
    ),
)
# fmt: on


# --- The steps, on one device and on a mesh.


def layouts(example: Example, full: bool) -> dict[str, tuple[Any, ft.P]]:
    """Return the layouts of a model by name, each with the spec of a batch."""
    # The default of `min_size` fits the full sizes. It would replicate every array of a small model.
    fsdp = ft.FSDP(("data", "model")) if full else ft.FSDP(("data", "model"), min_size=2**6)
    by_path = ft.StateSharding({**example.filters, ...: ft.P()})
    return {"FSDP": (fsdp, ft.P(("data", "model"))), "filters": (by_path, ft.P("data"))}


def model_and_state(made: Any) -> tuple[Any, Any]:
    return made if isinstance(made, tuple) else (made, None)


def loss_and_state(example: Example) -> Callable[..., tuple[jax.Array, Any]]:
    """Return the loss as a function of (model, state, *batch).

    The state is None for a model without state.
    """

    def loss(model: Any, state: Any, *batch: jax.Array) -> tuple[jax.Array, Any]:
        return (
            (example.loss(model, *batch), None)
            if state is None
            else example.loss(model, state, *batch)
        )

    return loss


def batches(example: Example) -> list[Batch]:
    return [example.batch(key) for key in jax.random.split(jax.random.key(1), STEPS)]


def values(tree: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a tree by path."""
    found = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return {jax.tree_util.keystr(keys): np.asarray(x, np.float64) for keys, x in found}


def plain_steps(example: Example) -> dict[str, np.ndarray]:
    """Run the steps in plain JAX and Equinox.

    Returns:
        The losses, the norms of the gradients, the model and its state.
    """
    make = eqx.filter_jit(example.make) if example.traceable else example.make
    model, state = model_and_state(make(False, jax.random.key(0)))
    trained, frozen = eqx.partition(model, example.plain_trained(model))
    opt_state, losses, before = TX.init(trained), [], values(trained)

    @eqx.filter_jit
    def step(trained: Any, state: Any, opt_state: Any, batch: Batch) -> tuple[Any, ...]:
        def loss_of(trained: Any) -> tuple[jax.Array, Any]:
            return loss_and_state(example)(eqx.combine(trained, frozen), state, *batch)

        (loss, new_state), gradients = eqx.filter_value_and_grad(loss_of, has_aux=True)(trained)
        updates, opt_state = TX.update(gradients, opt_state, trained)
        return (
            eqx.apply_updates(trained, updates),
            new_state,
            opt_state,
            (loss, optax.global_norm(gradients)),
        )

    for batch in batches(example):
        trained, state, opt_state, loss_and_norm = step(trained, state, opt_state, batch)
        losses.append(loss_and_norm)
    if max(np.max(np.abs(x - before[path])) for path, x in values(trained).items()) < RATE:
        raise ValueError("the steps hardly change the model, so the comparison tests nothing")
    return values({"losses": losses, "model": eqx.combine(trained, frozen), "state": state})


def training_state(
    example: Example, full: bool, key: jax.Array, **placed: Any
) -> ft.TrainState[Any]:
    model, state = model_and_state(example.make(full, key))
    return ft.TrainState.create(model, TX, state=state, wrt=example.trained, **placed)


def described(example: Example, full: bool) -> ft.TrainState[Any]:
    """Create a training state of `jax.ShapeDtypeStruct`s."""
    if example.traceable:
        return ft.abstract(lambda key: training_state(example, full, key))(jax.random.key(0))
    model = eqx.filter_eval_shape(lambda key: example.make(full, key), jax.random.key(0))
    return ft.TrainState.create(model, TX, wrt=example.trained)


def placed(example: Example, layout: Any, mesh: jax.sharding.Mesh) -> ft.TrainState[Any]:
    """Create the sharded training state of the small size."""
    if example.traceable:
        return ft.init(lambda key: training_state(example, False, key), layout, mesh)(
            jax.random.key(0)
        )
    return training_state(example, False, jax.random.key(0), layout=layout, mesh=mesh)


def sharded_steps(
    example: Example, layout: Any, spec: ft.P, mesh: Any
) -> tuple[ft.TrainState[Any], list[Any], int]:
    """Run the steps on a mesh.

    Returns:
        The training state, the losses and norms, and the number of compilations.
    """

    @ft.jit(rules=layout, donate="ts")
    def step(ts: ft.TrainState[Any], batch: Batch) -> tuple[ft.TrainState[Any], Batch]:
        differentiated = ft.value_and_grad(loss_and_state(example), wrt=ts.wrt, has_aux=True)
        (loss, state), gradients = differentiated(ts.model, ts.state, *batch)
        return ft.apply_gradients(ts, gradients, state=state), (loss, optax.global_norm(gradients))

    ts, losses = placed(example, layout, mesh), []
    for batch in batches(example):
        ts, loss_and_norm = step(ts, ft.shard(batch, spec, mesh))
        losses.append(loss_and_norm)
    return ts, losses, len(step.compilations)


# --- The checks and the output.


class Result(NamedTuple):
    """The results of a model with one layout.

    Attributes:
        parameters: the number of its parameters at the full size.
        bytes_per_device: the bytes of the training state per device, at the full size.
        difference: the largest difference from plain Equinox.
        compilations: the number of compilations of the step.
        problems: the failed checks.
    """

    parameters: int
    bytes_per_device: int
    difference: float
    compilations: int
    problems: list[str]


def largest_difference(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> float:
    """Return the largest difference between values with the same path.

    It is relative for values above one.
    """
    if expected.keys() != found.keys():
        raise ValueError(
            f"arrays with these paths exist on one side only: {sorted(expected.keys() ^ found.keys())}"
        )
    return max(
        float(np.max(np.abs(x - found[path]) / np.maximum(1, np.abs(x))))
        for path, x in expected.items()
    )


def misplaced(ts: ft.TrainState[Any], plan: ft.Plan, mesh: jax.sharding.Mesh) -> list[str]:
    """Describe the arrays that are not sharded as planned."""
    found = []
    for row, x in zip(plan.rows, jax.tree.leaves(eqx.filter(ts, eqx.is_array)), strict=True):
        planned = jax.sharding.NamedSharding(mesh, row.spec)
        if not x.sharding.is_equivalent_to(planned, x.ndim):
            found.append(f"{row.path} is sharded {x.sharding}, but {planned.spec} was planned")
    return found


def is_parameter(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.inexact)


def check(example: Example, name: str, expected: dict[str, np.ndarray]) -> Result:
    """Check a model with the layout of this name."""
    full, mesh = described(example, True), ft.make_mesh(**SMALL_MESH)
    full_plan = ft.plan(full, layouts(example, True)[name][0], FULL_MESH)
    layout, spec = layouts(example, False)[name]
    plan = ft.plan(described(example, False), layout, mesh)
    ts, losses, compilations = sharded_steps(example, layout, spec, mesh)
    difference = largest_difference(
        expected, values({"losses": losses, "model": ts.model, "state": ts.state})
    )
    problems = misplaced(ts, plan, mesh)
    if not difference <= TOLERANCE:  # true for nan
        problems.append(
            f"differs by {difference:.1e} from plain Equinox; {TOLERANCE:.0e} is allowed"
        )
    if compilations != 1:
        problems.append(f"the step was compiled {compilations} times")
    if plan.bytes_per_device == plan.total_bytes:
        problems.append("the layout shards nothing")
    parameters = sum(x.size for x in jax.tree.leaves(eqx.filter(full.model, is_parameter)))
    return Result(parameters, full_plan.bytes_per_device, difference, compilations, problems)


def check_all(example: Example) -> tuple[list[Result], list[str]]:
    """Check a model with each layout, and return the results and the problems."""
    results, problems = [], []
    try:
        expected = plain_steps(example)
        for name in LAYOUTS:
            results.append(check(example, name, expected))
            problems += [f"{name}: {problem}" for problem in results[-1].problems]
    except Exception as error:  # the other models must still be tested
        traceback.print_exc()
        first_line = str(error).partition("\n")[0]
        problems.append(f"{type(error).__name__}: {first_line}")
    return results, problems


COLUMNS = "{:26} {:18} {:>11} {:>10} {:>10} {:>8} {:>8}  {}"
HEAD = ("model", "package", "parameters", "FSDP", "filters", "differs", "compiled", "needs")


def row(example: Example, results: list[Result]) -> str:
    """Format the row of a model in the table."""
    needs = "; ".join([f"{len(example.filters)} path filters", *filter(None, [example.needed])])
    package = f"{example.package} {importlib.metadata.version(example.package)}"
    if len(results) < len(LAYOUTS):
        return COLUMNS.format(example.name, package, "", "", "", "", "", f"FAILED. {needs}")
    parameters = f"{results[0].parameters / 1e6:,.2f} M"
    sizes = [f"{result.bytes_per_device / 2**20:,.2f}" for result in results]
    differs = f"{max(result.difference for result in results):.1e}"
    compilations = ", ".join(str(result.compilations) for result in results)
    return COLUMNS.format(example.name, package, parameters, *sizes, differs, compilations, needs)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/peers/models.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", default="", metavar="NAME", help="run only models whose name contains this"
    )
    only = parser.parse_args().only.lower()
    chosen = [example for example in EXAMPLES if only in example.name.lower()]
    if not chosen:
        parser.error(
            f"no model has {only} in its name; the models are {', '.join(example.name for example in EXAMPLES)}"
        )
    print(f"FSDP, filters: MiB per device of {FULL_MESH} at the full size, with Adam's state.")
    print(
        "differs: the largest difference from plain Equinox. compiled: compilations per layout.\n"
    )
    print(COLUMNS.format(*HEAD), flush=True)
    wrong = []
    for example in chosen:
        results, problems = check_all(example)
        print(row(example, results), flush=True)
        wrong += [f"{example.name}: {problem}" for problem in problems]
    print(f"\n{len(chosen)} models, {len(wrong)} problems")
    for problem in wrong:
        print(f"  {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
