"""Steps of optimizers over sharded parameters: labeled programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

import functree as ft
from tests.why.arrays import descend, floats, laid
from tests.why.program import RELAID, Cause, Label, program

BATCH, EMBED, HIDDEN, CLASSES = 32, 64, 128, 16

P = ft.P


class Classifier(eqx.Module):
    up: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]
    down: Float[Array, "hidden classes"]

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = jax.random.normal(up, (EMBED, HIDDEN)) / EMBED**0.5
        self.bias = jnp.zeros(HIDDEN)
        self.down = jax.random.normal(down, (HIDDEN, CLASSES)) / HIDDEN**0.5

    def __call__(self, x: Float[Array, "batch embed"]):
        hidden = jax.nn.gelu(x @ self.up + self.bias[None])
        return hidden @ self.down


def loss_of(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


# --- AdamW with the parameters, their gradients and the moments sharded over the batch's axis.

WHOLE = ft.AxisRules({"batch": "data", ...: None})
FULLY_SHARDED = WHOLE | ft.FSDP("data", min_size=2**8)


@program(
    cause=Cause(
        Label("asked", kind="all-gather", axes=("data",)),
        "ft.constrain(model, WHOLE)",
        ("ft.constrain(model, WHOLE)",),
    )
)
def adamw_fully_sharded(mesh: Mesh):
    """A step of AdamW on a training state under FSDP: the loss gathers the weights over `data`,
    and their gradients are summed over it."""
    tx = optax.adamw(1e-3, weight_decay=0.1)

    def gathered_loss(model, x, y):
        model = ft.constrain(model, WHOLE)
        return loss_of(model, x, y)

    @ft.jit(rules=FULLY_SHARDED, mesh=mesh, donate="state")
    def step(state, x, y):
        loss, grads = ft.value_and_grad(gathered_loss)(state.model, x, y)
        with jax.numpy_dtype_promotion("standard"):  # the bias correction of adam promotes
            return ft.apply_gradients(state, grads), loss

    def make(key):
        return ft.TrainState.create(Classifier(key), tx)

    state = ft.abstract(make, FULLY_SHARDED, mesh)(jax.random.key(0))
    batch = NamedSharding(mesh, P("data"))
    x, y = floats(BATCH, EMBED, sharding=batch), floats(BATCH, CLASSES, sharding=batch)
    return step, (state, x, y), {}


# --- Second moments that are kept as means over rows and over columns.


@program(
    cause=Cause(
        Label("asked", line="jnp.mean(squared, axis=0)"), "jnp.mean(squared, axis=0)", ("gradient",)
    ),
    explicit=True,
)
def factored_moments(mesh: Mesh):
    """An update with factored second moments on Explicit axes: means over rows, over columns
    and over the whole update, each a sum over the axes that shard it."""

    def step(weight, rows, columns, gradient):
        squared = gradient**2 + 1e-30
        rows = 0.9 * rows + 0.1 * jnp.mean(squared, axis=1)
        columns = 0.9 * columns + 0.1 * jnp.mean(squared, axis=0)
        share = rows / jnp.mean(rows, axis=0, keepdims=True)
        update = gradient / jnp.sqrt(share[:, None] * columns[None, :])
        size = jnp.sqrt(jnp.mean(update**2))
        update = update / jnp.maximum(1.0, size)
        return weight - 0.01 * update, rows, columns

    both = NamedSharding(mesh, P("data", "model"))
    weight = floats(EMBED, HIDDEN, sharding=both)
    rows = floats(EMBED, sharding=NamedSharding(mesh, P("data")))
    columns = floats(HIDDEN, sharding=NamedSharding(mesh, P("model")))
    return step, (weight, rows, columns, weight), {}


# --- Muon's orthogonalization of a matrix that is sharded along its short side.


# --- The global norm of gradients that are made one long vector first.


@program(
    cause=Cause(Label("compiler", axes=("model",)), "g.ravel()", ("params.up",)),
    labels=[
        Label("compiler", line="g.ravel()"),
        Label("asked", line="jnp.sqrt(jnp.sum(flat**2))"),
        *RELAID,
    ],
)
def clipped_as_one_vector(mesh: Mesh):
    """A step that clips by a norm of all gradients in one vector: a matrix sharded along its
    columns cannot be flattened in parts, so its gradient is gathered over `model`."""

    def apply(params, x):
        return jax.nn.relu(x @ params["up"]) @ params["down"]

    def step(params, x, y):
        grads = jax.grad(lambda params: jnp.mean((apply(params, x) - y) ** 2))(params)
        flat = jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)])
        norm = jnp.sqrt(jnp.sum(flat**2))
        scale = jnp.minimum(1.0, 1.0 / norm)
        return jax.tree.map(lambda p, g: p - 0.1 * scale * g, params, grads)

    params = {"up": floats(EMBED, HIDDEN), "down": floats(HIDDEN, CLASSES)}
    placed = {"up": P(None, "model"), "down": P("model")}
    layouts = laid((placed, P("data"), P("data")), placed)
    return step, (params, floats(BATCH, EMBED), floats(BATCH, CLASSES)), layouts


# --- An average of the weights that has the layout of an older run.

RULES = ft.AxisRules({"batch": "data", "hidden": "model", ...: None})
OLDER_RULES = ft.AxisRules({"batch": "data", "embed": "model", ...: None})


@program(
    cause=Cause(
        Label("compiler", axes=("model",)), "0.99 * e + 0.01 * p", ("model.up", "average.up")
    ),
    labels=[Label("compiler", line="0.99 * e + 0.01 * p"), *RELAID],
)
def average_in_another_layout(mesh: Mesh):
    """A step with an average of the weights that is sharded along `embed`, the weights along
    `hidden`: each step relays the weights to add them."""

    def step(model, average, x, y):
        loss, grads = ft.value_and_grad(loss_of, layout=RULES)(model, x, y)
        model = descend(model, grads)
        average = jax.tree.map(lambda e, p: 0.99 * e + 0.01 * p, average, model)
        return model, average, loss

    model = ft.abstract(Classifier)(jax.random.key(0))
    layouts = laid((RULES, OLDER_RULES, P("data"), P("data")), (RULES, OLDER_RULES, P()))
    return step, (model, model, floats(BATCH, EMBED), floats(BATCH, CLASSES)), layouts
