"""This program has the model and training step in plain Equinox and JAX."""

# --8<-- [start:program]
import equinox as eqx
import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SPECS = {"up": P(None, "model"), "down": P("model", None)}
TX = optax.adam(1e-2)


class Model(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __init__(self, hidden, key):
        keys = jax.random.split(key)
        self.up = jax.random.normal(keys[0], (64, hidden)) * 0.1
        self.down = jax.random.normal(keys[1], (hidden, 16)) * 0.1

    def __call__(self, x):
        x = jax.nn.gelu(x @ self.up)
        x = jax.lax.with_sharding_constraint(x, P("data", "model"))
        return x @ self.down


def shardings(tree, mesh, specs=SPECS):
    def of(path, leaf):
        name = getattr(path[-1], "name", None) if path else None
        return NamedSharding(mesh, specs.get(name, P()))

    return jax.tree_util.tree_map_with_path(of, tree)


def create(mesh, key, hidden=256, specs=SPECS):
    def make(key):
        model = Model(hidden, key)
        state = (model, TX.init(model))
        wanted = shardings(state, mesh, specs)
        return jax.lax.with_sharding_constraint(state, wanted)

    return eqx.filter_jit(make)(key)


def place(mesh, x, labels):
    x = jax.device_put(x, NamedSharding(mesh, P("data", None)))
    labels = jax.device_put(labels, NamedSharding(mesh, P("data")))
    return x, labels


@eqx.filter_jit(donate="all-except-first")
def run(batch, state):
    x, labels = batch
    model, opt_state = state

    def loss(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(x), labels
        )
        return losses.mean()

    value, grads = eqx.filter_value_and_grad(loss)(model)
    updates, opt_state = TX.update(grads, opt_state, model)
    state = eqx.apply_updates(model, updates), opt_state
    wanted = shardings(state, jax.sharding.get_abstract_mesh())
    return jax.lax.with_sharding_constraint(state, wanted), value


def step(state, x, labels):
    return run((x, labels), state)


# --8<-- [end:program]


def misspelled(mesh, key):
    specs = {"up": P(None, "modle"), "down": P("model", None)}
    return create(mesh, key, specs=specs)


def missing(mesh, key):
    return create(mesh, key, specs={"down": P("model", None)})


def wrong_path(mesh, key):
    model, _ = create(mesh, key)
    return eqx.tree_at(lambda model: model.upp, model, None)


@eqx.filter_jit
def scaled(x, by):
    return x * by
