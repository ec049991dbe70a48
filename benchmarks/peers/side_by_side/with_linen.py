"""This program has the model and training step in Flax Linen."""

# --8<-- [start:program]
import functools

import jax
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

RULES = (
    ("batch", "data"),
    ("hidden", "model"),
    ("embed", None),
    ("classes", None),
)
TX = optax.adam(1e-2)
INIT = nn.initializers.normal(0.1)


class Model(nn.Module):
    hidden: int = 256

    @nn.compact
    def __call__(self, x):
        up = nn.with_logical_partitioning(INIT, ("embed", "hidden"))
        x = nn.Dense(self.hidden, use_bias=False, kernel_init=up)(x)
        x = nn.with_logical_constraint(nn.gelu(x), ("batch", "hidden"))
        down = nn.with_logical_partitioning(INIT, ("hidden", "classes"))
        return nn.Dense(16, use_bias=False, kernel_init=down)(x)


def create(mesh, key, hidden=256, rules=RULES):
    model = Model(hidden)

    def make(key):
        params = model.init(key, jax.numpy.ones((1, 64)))["params"]
        return TrainState.create(
            apply_fn=model.apply, params=params, tx=TX
        )

    specs = nn.get_partition_spec(jax.eval_shape(make, key))
    shardings = nn.logical_to_mesh_sharding(specs, mesh, rules)
    return jax.jit(make, out_shardings=shardings)(key)


def place(mesh, x, labels):
    x = jax.device_put(x, NamedSharding(mesh, P("data", None)))
    labels = jax.device_put(labels, NamedSharding(mesh, P("data")))
    return x, labels


@functools.partial(jax.jit, donate_argnums=0)
def step(state, x, labels):
    def loss(params):
        with nn.logical_axis_rules(RULES):
            logits = state.apply_fn({"params": params}, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, labels
        )
        return losses.mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


# --8<-- [end:program]


def misspelled(mesh, key):
    rules = (
        ("batch", "data"),
        ("hiden", "model"),
        ("embed", None),
        ("classes", None),
    )
    return create(mesh, key, rules=rules)


def missing(mesh, key):
    rules = (("batch", "data"), ("embed", None), ("classes", None))
    return create(mesh, key, rules=rules)


def wrong_path(mesh, key):
    params = create(mesh, key).params
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if "Dense_O" in str(path) else "trained",
        params,
    )
    transforms = {"trained": TX, "frozen": optax.set_to_zero()}
    return optax.multi_transform(transforms, labels).init(params)


@jax.jit
def scaled(x, by):
    return x * by
