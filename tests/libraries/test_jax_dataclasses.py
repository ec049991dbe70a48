"""jax_dataclasses: its dataclasses, which JAX knows without keys, with annotations that name
axes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import jax_dataclasses as jdc
import optax
from jax import Array
from jaxtyping import Float

import functree as ft
from tests.lib.meshes import SIZES, assert_lies
from tests.libraries.alike import assert_alike, assert_parts, jit_alike, train_alike


@jdc.pytree_dataclass
class Dense:
    weight: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]
    activation: jdc.Static[str] = "tanh"

    def __call__(self, x: Array) -> Array:
        return getattr(jnp, self.activation)(x @ self.weight + self.bias)


@jdc.pytree_dataclass
class Net:
    layers: list[Dense]
    scale: Float[Array, ""]
    name: jdc.Static[str]

    def __call__(self, x: Array) -> Array:
        for layer in self.layers:
            x = layer(x) @ layer.weight.T
        return self.scale * x


def net() -> Net:
    keys = jax.random.split(jax.random.key(0), 2)
    layers = [Dense(jax.random.normal(key, (8, 16)), jnp.zeros(16)) for key in keys]
    return Net(layers, jnp.float32(0.5), "net")


RULES = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})


def loss(net: Net, x: Array) -> Array:
    return jnp.mean(net(x) ** 2)


def x() -> Array:
    return jnp.arange(32.0).reshape(4, 8) / 32


def test_they_are_arguments_results_and_parts():
    jit_alike(
        lambda net, x: (net, ft.value_and_grad(loss)(net, x)),
        net(),
        x(),
        plain=lambda net, x: (net, jax.value_and_grad(loss)(net, x)),
    )
    assert_parts(net())
    static, arrays = ft.split(net())
    assert ft.merge(static, arrays).name == "net"


def test_their_annotations_are_read():
    plan = ft.plan(net(), RULES, SIZES)
    assert [(row.axes, row.spec) for row in plan] == [
        (ft.Axes("embed", "hidden"), ft.P(None, "model")),
        (ft.Axes("hidden"), ft.P("model")),
        (ft.Axes("embed", "hidden"), ft.P(None, "model")),
        (ft.Axes("hidden"), ft.P("model")),
        (ft.Axes(), ft.P()),
    ]


def test_they_are_trained_sharded(tmp_path: Path):
    # Not the small `eps` of optax: some gradients here are so small that their sums in another order
    # make another step.
    tx = optax.adam(1e-2, eps=1e-3)
    ts = train_alike(net(), loss, tx, x(), RULES)
    assert_lies(ts.model.layers[0].weight, None, "model")
    assert_lies(ts.opt_state[0].nu.layers[1].bias, "model")
    ft.save(tmp_path / "x", ts)
    assert_alike(ft.restore(tmp_path / "x", ts), ts)


def test_a_copy_that_is_changed_in_place():
    """`jdc.copy_and_mutate`, inside and outside of a compiled function."""

    def doubled(net: Net) -> Net:
        with jdc.copy_and_mutate(net) as other:
            other.scale = net.scale * 2
        return other

    assert_alike(jit_alike(doubled, net()), doubled(net()))
