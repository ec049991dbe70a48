"""Recurrent networks, which process a sequence step by step."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.why.arrays import descend, floats, laid
from tests.why.program import Cause, Label, program

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
