"""Models of Equinox and Flax, jitted by their own libraries and by `jax.jit`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import functree as ft
from tests.why.arrays import descend, floats
from tests.why.program import RELAID, Cause, Label, program


def placed(mesh: Mesh, spec: P, *shape: int) -> Array:
    return jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))


# Equinox' attention, with a residual connection.


class Attention(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    out: eqx.nn.Linear

    def __init__(self, heads: int, width: int, key):
        for_attention, for_out = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=for_attention)
        self.out = eqx.nn.Linear(width, 16, use_bias=False, key=for_out)

    def __call__(self, x: Float[Array, "seq embed"]):
        h = x + self.attention(x, x, x)
        return jax.vmap(self.out)(h)


def attention_loss(model, x, targets):
    return jnp.mean((jax.vmap(model)(x) - targets) ** 2)


@program(
    cause=Cause(Label("compiler", kind="all-gather", phase="forward"), "reshape", ("_proj",)),
    labels=RELAID,
)
def equinox_three_heads(mesh: Mesh):
    """Three heads cannot be shared by two devices, so the projections that are sharded over
    `model` are gathered where the heads are made."""
    columns, rows = P("model", None), P(None, "model")
    layout = ft.StateSharding(
        {
            "attention.output_proj.weight": rows,
            "attention.*.weight": columns,
            ...: P(),
        }
    )

    @eqx.filter_jit
    def step(model, x, targets):
        value, gradients = eqx.filter_value_and_grad(attention_loss)(model, x, targets)
        updates = jax.tree.map(lambda g: -0.1 * g, gradients)
        return ft.constrain(eqx.apply_updates(model, updates), layout), value

    model = ft.init(lambda key: Attention(3, 96, key), layout, mesh)(jax.random.key(0))
    x = placed(mesh, P("data"), 16, 32, 96)
    return step, (model, x, placed(mesh, P("data"), 16, 32, 16)), {}


# An ensemble whose members are not sharded over the axis that `spmd_axis_name` names.


class Member(eqx.Module):
    up: Float[Array, "inputs hidden"]
    down: Float[Array, "hidden outputs"]

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = jax.random.normal(up, (32, 128)) / 32**0.5
        self.down = jax.random.normal(down, (128, 16)) / 128**0.5

    def __call__(self, x):
        h = jax.nn.relu(x @ self.up)
        h = jax.lax.with_sharding_constraint(h, P("data", None))
        return h @ self.down


def member_loss(member, x, targets):
    return jnp.mean((member(x) - targets) ** 2)


@program(
    cause=Cause(
        Label("compiler", kind="collective-permute", phase="forward"),
        "with_sharding_constraint",
        ("up", "with_sharding_constraint"),
    ),
    labels=RELAID,
    third="replica",
)
def ensemble_other_axis(mesh: Mesh):
    """The members of an ensemble are sharded over `model`, but `spmd_axis_name` is `replica`,
    so a constraint inside of the model relays the activations of all members."""

    @eqx.filter_jit
    def step(ensemble, x, targets):
        def loss(ensemble):
            each = jax.vmap(member_loss, in_axes=(0, None, None), spmd_axis_name="replica")
            return jnp.sum(each(ensemble, x, targets))

        value, gradients = eqx.filter_value_and_grad(loss)(ensemble)
        new = descend(ensemble, gradients)
        return ft.constrain(new, P("model")), value

    keys = jax.random.split(jax.random.key(0), 4)
    ensemble = ft.init(jax.vmap(Member), P("model"), mesh)(keys)
    x = placed(mesh, P("data"), 64, 32)
    return step, (ensemble, x, placed(mesh, P("data"), 64, 16)), {}


# A network of Flax NNX under tensor parallelism.


class Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 128, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(128, 32, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@program(cause=Cause(Label("asked", axes=("model",), phase="forward"), "dot_general", ("down",)))
def nnx_tensor_parallel(mesh: Mesh):
    """A network of Flax has its hidden units sharded over `model`: one sum after the second
    weight, and the gradients are summed over the batch's axis."""
    model = Perceptron(nnx.Rngs(0))
    for layer, spec in ((model.up, P(None, "model")), (model.down, P("model", None))):
        kernel = layer.kernel
        kernel.set_value(jax.device_put(kernel.get_value(), NamedSharding(mesh, spec)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, targets):
        def loss(model):
            return jnp.mean((model(x) - targets) ** 2)

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    x = placed(mesh, P("data"), 64, 32)
    return step, (model, optimizer, x, x), {}


# An autoencoder of Flax Linen that flattens images whose width is sharded.


class Autoencoder(linen.Module):
    @linen.compact
    def __call__(self, images):
        batch, height, width, _ = images.shape
        h = linen.relu(linen.Conv(8, (3, 3))(images))
        flat = h.reshape(batch, height * width * 8)
        code = linen.tanh(linen.Dense(32)(flat))
        wide = linen.Dense(height * width * 4)(code)
        return wide.reshape(batch, height, width, 4)


@program(
    cause=Cause(Label("compiler", kind="all-gather", phase="forward"), "reshape", ("images",)),
    labels=[
        Label("compiler", kind="all-gather"),
        Label("compiler", kind="all-to-all"),
        Label("compiler", line="reshape"),
    ],
    third="space",
)
def linen_flattened_width(mesh: Mesh):
    """Images are sharded along their width, and flattening them merges the width into the
    height, where no layout can express it, so they are gathered."""
    model = Autoencoder()
    images = floats(16, 16, 16, 4)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    whole, tiles = NamedSharding(mesh, P()), NamedSharding(mesh, P("data", None, "space"))

    def step(variables, images):
        def loss(variables):
            return jnp.mean((model.apply(variables, images) - images) ** 2)

        value, gradients = jax.value_and_grad(loss)(variables)
        return descend(variables, gradients), value

    jitted = jax.jit(step, in_shardings=(whole, tiles), out_shardings=whole)
    return jitted, (variables, images), {}
