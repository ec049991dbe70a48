"""A module as a user has it: factories, and layouts. Tests name lines of it."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import functree as ft


class Layer(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]


def tree():
    # So large that it would not fit anywhere if it were allocated.
    return Layer(jnp.ones((1 << 20, 1 << 20)), jnp.ones((1 << 20, 1 << 20)))


def apply(layer, x: Float[Array, "batch embed"]):
    return x + jnp.tanh(x @ layer.up) @ layer.down


def call():
    layer = Layer(jnp.ones((32, 128)), jnp.ones((128, 32)))
    return apply, (layer, jax.ShapeDtypeStruct((64, 32), "float32"))


def own():
    step, args = call()
    return ft.jit(step, donate="x"), args


def unnamed():
    return lambda layer, x: x @ layer.up, call()[1]


def huge():
    return apply, (tree(), jax.ShapeDtypeStruct((8, 1 << 20), "float32"))


def raising():
    raise ValueError("no data\nand more")


def asks():
    return jnp.ones(int(jnp.ones(()).sum()))


def wants(config):
    return config


def closing():
    scale = jnp.ones(3)
    return (lambda x: x * scale), (jax.ShapeDtypeStruct((3,), "float32"),)


def raised_inside(x: Float[Array, "batch embed"]):
    raise KeyError("later")


def late():
    return raised_inside, (jax.ShapeDtypeStruct((8, 8), "float32"),)


def nothing():
    return {"w": jnp.ones(3)}


class Mine(Exception):
    pass


def own_error():
    raise Mine("\x1b[31mred")


def no_return():
    tree()


def fewer():
    return apply, ()


def printing():
    print("hello")
    return nothing()


def mistaken(layer, x: Float[Array, "batch embed"]):
    hidden = ft.constrain(jnp.tanh(x @ layer.up), ft.P("model", None))
    return x + hidden @ layer.down


def with_a_mistake():
    return mistaken, call()[1]


value = 3
rules = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
data = ft.AxisRules({"batch": "data", ...: None})
layouts = {"rules": rules, "data": data}
each = (rules, ft.P("data"))
none = ()
filters = ft.StateSharding({"layer.up": ft.P(None, "model"), ...: rules})
