"""A graph network and nearest neighbors: programs that look things up."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.why.arrays import descend, floats, ints, laid
from tests.why.program import Cause, Label, program


def message_passing(weights, nodes, edges):
    """One round: each node adds up the messages along its edges."""
    sent = nodes[edges["senders"]]
    inputs = jnp.concatenate([sent, edges["features"]], axis=-1)
    messages = jax.nn.relu(inputs @ weights["message"])
    received = jax.ops.segment_sum(messages, edges["receivers"], nodes.shape[0])
    return nodes + received @ weights["update"]


def graph_step(weights, nodes, edges, targets):
    def loss(weights):
        h = message_passing(weights, nodes, edges)
        h = message_passing(weights, jax.nn.relu(h), edges)
        return jnp.mean((h - targets) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return descend(weights, gradients), value


def graph():
    """The weights, nodes, edges and targets of a graph with 64 nodes and 512 edges."""
    weights = {"message": floats(96, 64), "update": floats(64, 64)}
    edges = {
        "senders": ints(512),
        "receivers": ints(512),
        "features": floats(512, 32),
    }
    return weights, floats(64, 64), edges, floats(64, 64)


@program(
    cause=Cause(
        Label("compiler", kind="collective-permute"), "jnp.concatenate", ("senders", "features")
    ),
    labels=[Label("asked", kind="all-reduce")],
    third="space",
    otherwise="compiler",
)
def graph_edges_apart(mesh: Mesh):
    """The ends of the edges are sharded over `data` and their features over `space`, so one of
    the two is relaid before they are concatenated."""
    edges = {"senders": P("data"), "receivers": P("data"), "features": P("space")}
    layouts = laid((P(), P(), edges, P()), P())
    return graph_step, graph(), layouts


@program(
    cause=Cause(Label("compiler", axes=("data",)), "queries @ database.T", ("queries", "database")),
    labels=[Label("asked", line="top_k")],
    otherwise="compiler",
)
def neighbors_on_one_axis(mesh: Mesh):
    """Queries and database are sharded over the same axis, so each device needs the whole
    database for its queries; over `model` it could have kept a part."""

    def nearest(queries, database):
        scores = queries @ database.T
        return jax.lax.top_k(scores, 8)

    layouts = laid((P("data"), P("data")), P("data"))
    return nearest, (floats(128, 64), floats(512, 64)), layouts
