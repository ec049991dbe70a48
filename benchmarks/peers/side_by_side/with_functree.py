"""This program has the model and training step in functree."""

# --8<-- [start:program]
import equinox as eqx
import jax
import optax
from jaxtyping import Array, Float, Int

import functree as ft

RULES = ft.AxisRules(
    {
        "batch": "data",
        "hidden": "model",
        "embed": None,
        "classes": None,
    }
)
TX = optax.adam(1e-2)


class Model(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden classes"]

    def __init__(self, hidden, key):
        keys = jax.random.split(key)
        self.up = jax.random.normal(keys[0], (64, hidden)) * 0.1
        self.down = jax.random.normal(keys[1], (hidden, 16)) * 0.1

    def __call__(self, x):
        x = ft.constrain(jax.nn.gelu(x @ self.up), "batch hidden")
        return x @ self.down


def create(mesh, key, hidden=256, rules=RULES):
    def make(key):
        return ft.TrainState.create(Model(hidden, key), TX)

    return ft.init(make, rules, mesh)(key)


def place(mesh, x, labels):
    axes = ("batch embed", "batch")
    return ft.shard((x, labels), RULES, mesh, axes=axes)


@ft.jit(rules=RULES, donate="state")
def step(
    state,
    x: Float[Array, "batch embed"],
    labels: Int[Array, "batch"],
):
    def loss(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(x), labels
        )
        return losses.mean()

    value, grads = ft.value_and_grad(loss)(state.model)
    return ft.apply_gradients(state, grads), value


# --8<-- [end:program]


def misspelled(mesh, key):
    rules = {
        "batch": "data",
        "hiden": "model",
        "embed": None,
        "classes": None,
    }
    return create(mesh, key, rules=ft.AxisRules(rules))


def missing(mesh, key):
    rules = {"batch": "data", "embed": None, "classes": None}
    return create(mesh, key, rules=ft.AxisRules(rules))


def wrong_path(mesh, key):
    frozen = ~ft.glob("upp")
    return ft.grad(lambda model: model.up.sum(), wrt=frozen)(
        create(mesh, key).model
    )


@ft.jit
def scaled(x, by):
    return x * by
