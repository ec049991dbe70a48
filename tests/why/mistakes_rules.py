"""Programs over models with axis names, in whose layout one rule is wrong or missing."""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

import functree as ft
from tests.why.arrays import descend, floats, laid, normed
from tests.why.mistake import Made, mistake


class Forecaster(eqx.Module):
    """A residual MLP that predicts a series of several channels."""

    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]
    head: Float[Array, "embed channels"]

    def __call__(self, x: Float[Array, "batch time embed"]) -> Float[Array, "batch time channels"]:
        x = x + jax.nn.relu(normed(x) @ self.up) @ self.down
        return x @ self.head


@mistake(
    "forecaster: embed before hidden",
    wrong={"batch": "data", "embed": "model", "hidden": "model", ...: None},
    right={"batch": "data", "embed": None, "hidden": "model", ...: None},
    edit="rule",
    named="embed",
)
def forecast(mesh: Mesh, rules: Mapping) -> Made:
    """A step of gradient descent for a forecaster; the compiler lays its results out.

    The rule for `embed` comes first and takes `model`, so the first product sums over it: the
    wide hidden activations are reduced, and not the narrow results.
    """

    def loss(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    def step(model, x, y):
        value, gradients = jax.value_and_grad(loss)(model, x, y)
        return descend(model, gradients), value

    model = Forecaster(floats(256, 1024), floats(1024, 256), floats(256, 16))
    series = ft.P("data", None, None)
    layouts = laid((ft.AxisRules(rules), series, series))
    return step, (model, floats(64, 32, 256), floats(64, 32, 16)), layouts


class Inverted(eqx.Module):
    """An inverted residual of MobileNet: wider, a convolution of each channel, narrower."""

    expand: Float[Array, "channels mid"]
    depthwise: Float[Array, "height width one mid"]
    project: Float[Array, "mid channels"]

    def __call__(self, x: Float[Array, "batch rows columns channels"]) -> Array:
        h = jax.nn.relu6(x @ self.expand)
        h = jax.lax.conv_general_dilated(
            h,
            self.depthwise,
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=self.depthwise.shape[-1],
        )
        return x + jax.nn.relu6(h) @ self.project


@mistake(
    "inverted residual: an override transposed",
    wrong=ft.P(None, "model"),
    right=ft.P("model", None),
    edit="rule",
    named="project",
)
def inverted(mesh: Mesh, project: ft.P) -> Made:
    """An inverted residual with one spec that overrides the rules.

    The filter for the last weight shards its columns, where the rules would shard its rows, so
    the wide activations or the weight are relaid.
    """

    def features(block, x):
        return block(x)

    block = Inverted(floats(256, 1024), floats(3, 3, 1, 1024), floats(1024, 256))
    rules = ft.AxisRules({"batch": "data", "mid": "model", ...: None})
    layout = ft.StateSharding({"project": project, ...: rules})
    images = ft.P("data", None, None, None)
    layouts = laid((layout, images), images)
    return features, (block, floats(64, 8, 8, 256)), layouts


class Document(eqx.Module):
    """A position-wise network of an encoder for long documents."""

    scale: Float[Array, "embed"]
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        h = jnp.square(jax.nn.relu((normed(x) * self.scale[None, None]) @ self.up))
        return x + h @ self.down


@mistake(
    "documents: hidden on the axis of the sequence",
    wrong={"batch": "data", "hidden": "seq", ...: None},
    right={"batch": "data", "hidden": "model", ...: None},
    edit="rule",
    named="hidden",
)
def document(mesh: Mesh, rules: Mapping) -> Made:
    """Positions of documents, sharded over `data` and `seq`.

    `hidden` is on the mesh axis that shards the sequence: an activation cannot lie over it
    twice, so the weights are gathered and `model` computes everything twice.
    """

    def encode(layer, x):
        return layer(x)

    layer = Document(floats(256), floats(256, 1024), floats(1024, 256))
    documents = ft.P("data", "seq", None)
    layouts = laid((ft.AxisRules(rules), documents), documents)
    return encode, (layer, floats(16, 128, 256)), layouts


class Layers(eqx.Module):
    """Equal residual MLPs, one after another."""

    scale: Float[Array, "layers embed"]
    up: Float[Array, "layers embed hidden"]
    down: Float[Array, "layers hidden embed"]

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        def layer(x, weights):
            h = jax.nn.gelu((normed(x) * weights.scale[None, None]) @ weights.up)
            return x + h @ weights.down, None

        return jax.lax.scan(layer, x, self)[0]


@mistake(
    "layers: the stack on the axis of the model",
    wrong={"batch": "data", "layers": "model", "hidden": "model", ...: None},
    right={"batch": "data", "layers": None, "hidden": "model", ...: None},
    edit="rule",
    named="layers",
    third="stage",
)
def layered(mesh: Mesh, rules: Mapping) -> Made:
    """A scan over four layers held as one.

    A rule for a pipeline shards the layers over `model`, which leaves `hidden` unsharded: the
    scan gathers every layer.
    """

    def encode(layers, x):
        return layers(x)

    layers = Layers(floats(4, 256), floats(4, 256, 1024), floats(4, 1024, 256))
    texts = ft.P("data", None, None)
    layouts = laid((ft.AxisRules(rules), texts), texts)
    return encode, (layers, floats(64, 16, 256)), layouts
