"""Models that process a sequence step by step: a GRU, an LSTM, recurrences, a policy gradient."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import functree as ft
from tests.why.arrays import descend, floats, ints, laid
from tests.why.program import Cause, Label, program

# A GRU under FSDP whose weights are gathered once, before the loop.


class GRU(eqx.Module):
    inward: Float[Array, "inputs gate hidden"]
    recurrent: Float[Array, "hidden gate hidden_out"]
    readout: Float[Array, "hidden outputs"]

    def __init__(self, key):
        inward, recurrent, readout = jax.random.split(key, 3)
        self.inward = jax.random.normal(inward, (32, 3, 64)) / 32**0.5
        self.recurrent = jax.random.normal(recurrent, (64, 3, 64)) / 64**0.5
        self.readout = jax.random.normal(readout, (64, 16)) / 64**0.5

    def __call__(self, series: Float[Array, "batch time inputs"]):
        def cell(h, x):
            from_x = jnp.einsum("bi,igh->gbh", x, self.inward)
            from_h = jnp.einsum("bi,igh->gbh", h, self.recurrent)
            reset, keep = jax.nn.sigmoid(from_x[:2] + from_h[:2])
            new = jnp.tanh(from_x[2] + reset * from_h[2])
            return keep * h + (1 - keep) * new, None

        start = jnp.zeros((series.shape[0], 64))
        last, _ = jax.lax.scan(cell, start, jnp.swapaxes(series, 0, 1))
        return last @ self.readout


@program(cause=Cause(Label("asked", kind="all-gather"), "ft.constrain(model, P())", ("recurrent",)))
def gru_fsdp(mesh: Mesh):
    """A GRU's weights are sharded over the batch's axis; a constraint gathers them before the
    loop, and their gradients are summed."""
    layout = ft.AxisRules({"batch": "data", ...: None}) | ft.FSDP("data", min_size=0)

    def loss(model, series, targets):
        model = ft.constrain(model, P())
        return jnp.mean((model(series) - targets) ** 2)

    @ft.jit(mesh=mesh, rules=layout, in_shardings=(layout, P("data"), P("data")), donate="model")
    def step(model, series, targets):
        value, gradients = ft.value_and_grad(loss)(model, series, targets)
        return descend(model, gradients), value

    model = ft.abstract(GRU)(jax.random.key(0))
    return step, (model, floats(32, 16, 32), floats(32, 16)), {}


# An LSTM whose four gates are one sharded matrix.


@program(
    cause=Cause(Label("compiler", line="jnp.split"), "jnp.split", ("gates",)),
    labels=[
        Label("compiler", line="jnp.split"),
        Label("asked", kind="all-reduce"),
        Label("compiler", axes=("model",)),
    ],
)
def lstm_fused_gates(mesh: Mesh):
    """The four gates of an LSTM are one matrix sharded over `model`, so each gate is on half of
    the devices, and gates and the state move at each step."""

    def cell(weights, carry, x):
        h, memory = carry
        joined = jnp.concatenate([x, h], axis=-1)
        gates = joined @ weights["gates"]
        enter, keep, new, leave = jnp.split(gates, 4, axis=-1)
        memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
        return (jax.nn.sigmoid(leave) * jnp.tanh(memory), memory), None

    def loss(weights, series, targets):
        start = jnp.zeros((series.shape[0], 64))
        steps = jnp.swapaxes(series, 0, 1)
        (h, _), _ = jax.lax.scan(lambda c, x: cell(weights, c, x), (start, start), steps)
        return jnp.mean((h @ weights["readout"] - targets) ** 2)

    def step(weights, series, targets):
        value, gradients = jax.value_and_grad(loss)(weights, series, targets)
        return descend(weights, gradients), value

    weights = {"gates": floats(96, 256), "readout": floats(64, 16)}
    specs = {"gates": P(None, "model"), "readout": P()}
    layouts = laid((specs, P("data"), P("data")), (specs, P()))
    return step, (weights, floats(32, 16, 32), floats(32, 16)), layouts


# A recurrent network whose constraint was written before the series became time-major.


@program(
    cause=Cause(
        Label("compiler", kind="all-to-all"),
        "with_sharding_constraint",
        ("series", "with_sharding_constraint"),
    ),
    labels=[Label("asked", moves="gradient"), Label("asked", kind="all-reduce", line="jnp.mean")],
    otherwise="compiler",
)
def time_major_constraint(mesh: Mesh):
    """A series became time-major for `lax.scan`, and the constraint for its batch now shards
    the time: the series is relaid, and the loop gathers it."""

    def cell(weights, h, x):
        return jnp.tanh(x @ weights["inward"] + h @ weights["recurrent"]), None

    def loss(weights, series, targets):
        steps = jnp.swapaxes(series, 0, 1)
        steps = jax.lax.with_sharding_constraint(steps, P("data"))
        start = jnp.zeros((series.shape[0], 64))
        h, _ = jax.lax.scan(lambda h, x: cell(weights, h, x), start, steps)
        return jnp.mean((h @ weights["readout"] - targets) ** 2)

    def step(weights, series, targets):
        value, gradients = jax.value_and_grad(loss)(weights, series, targets)
        return descend(weights, gradients), value

    weights = {"inward": floats(32, 64), "recurrent": floats(64, 64), "readout": floats(64, 16)}
    layouts = laid((P(), P("data"), P("data")), P())
    return step, (weights, floats(32, 16, 32), floats(32, 16)), layouts


# A diagonal linear recurrence whose state is sharded.


@program(
    cause=Cause(
        Label("asked", axes=("model",), phase="forward"), "out_sharding=whole", ("outward",)
    ),
    explicit=True,
)
def linear_recurrence(mesh: Mesh):
    """A diagonal linear recurrence has its states sharded over `model`, so only the projection
    out of them sums over `model`, and gradients over the batch's axis."""

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    def model(weights, signal):
        driven = jnp.einsum("bti,in->btn", signal, weights["inward"])
        decay = jax.nn.sigmoid(weights["decay"])[None, None] + jnp.zeros_like(driven)
        _, states = jax.lax.associative_scan(combine, (decay, driven), axis=1)
        whole = P("data", None, None)
        return jnp.einsum("btn,no->bto", states, weights["outward"], out_sharding=whole)

    def step(weights, signal, targets):
        def loss(weights):
            return jnp.mean((model(weights, signal) - targets) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return descend(weights, gradients), value

    weights = {"inward": floats(32, 128), "decay": floats(128), "outward": floats(128, 32)}
    specs = {"inward": P(None, "model"), "decay": P("model"), "outward": P("model", None)}
    layouts = laid((specs, P("data"), P("data")), (specs, P()))
    signal = floats(16, 32, 32)
    return step, (weights, signal, signal), layouts


# A policy gradient with a baseline: the environments are sharded.


def discounted(rewards: Float[Array, "environment time"]):
    def back(later, reward):
        total = reward + 0.99 * later
        return total, total

    _, returns = jax.lax.scan(back, jnp.zeros_like(rewards[:, 0]), rewards.T, reverse=True)
    return returns.T


@program(
    cause=Cause(Label("asked", moves="gradient"), 'observations @ policy["up"]', ("observations",)),
    explicit=True,
)
def policy_gradient(mesh: Mesh):
    """Environments are sharded, so the baseline, the loss and the policy's gradients are sums
    over their axis."""

    def loss(policy, observations, actions, rewards):
        h = jax.nn.relu(observations @ policy["up"])
        chances = jax.nn.log_softmax(h @ policy["down"])
        taken = jnp.sum(chances * jax.nn.one_hot(actions, 4), axis=-1)
        returns = discounted(rewards)
        baseline = jnp.mean(returns, axis=0)[None]
        return -jnp.mean(taken * jax.lax.stop_gradient(returns - baseline))

    def step(policy, observations, actions, rewards):
        value, gradients = jax.value_and_grad(loss)(policy, observations, actions, rewards)
        return descend(policy, gradients), value

    policy = {"up": floats(32, 64), "down": floats(64, 4)}
    played = (floats(32, 16, 32), ints(32, 16), floats(32, 16))
    return step, (policy, *played), laid((P(), P("data"), P("data"), P("data")))
