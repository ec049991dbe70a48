"""This program has the model and training step in Flax NNX."""

# --8<-- [start:program]
import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

RULES = (
    ("batch", "data"),
    ("hidden", "model"),
    ("embed", None),
    ("classes", None),
)
TX = optax.adam(1e-2)
INIT = nnx.initializers.normal(0.1)


class Model(nnx.Module):
    def __init__(self, hidden, rngs):
        self.up = nnx.Linear(
            64,
            hidden,
            use_bias=False,
            kernel_init=nnx.with_partitioning(INIT, ("embed", "hidden")),
            rngs=rngs,
        )
        self.down = nnx.Linear(
            hidden,
            16,
            use_bias=False,
            kernel_init=nnx.with_partitioning(
                INIT, ("hidden", "classes")
            ),
            rngs=rngs,
        )

    def __call__(self, x):
        x = nnx.gelu(self.up(x))
        x = jax.lax.with_sharding_constraint(x, P("data", "model"))
        return self.down(x)


def create(mesh, key, hidden=256, rules=RULES):
    @nnx.jit
    def make(key):
        model = Model(hidden, nnx.Rngs(key))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    with nnx.logical_axis_rules(rules):
        return make(key)


def place(mesh, x, labels):
    x = jax.device_put(x, NamedSharding(mesh, P("data", None)))
    labels = jax.device_put(labels, NamedSharding(mesh, P("data")))
    return x, labels


@nnx.jit
def update(model, optimizer, x, labels):
    def loss(model):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(x), labels
        )
        return losses.mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def step(state, x, labels):
    return state, update(*state, x, labels)  # updated in place


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
    model, _ = create(mesh, key)
    frozen = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("upp")))
    loss = nnx.grad(
        lambda model: model.up.kernel[...].sum(),
        argnums=nnx.DiffState(0, frozen),
    )
    return loss(model)


@nnx.jit
def scaled(x, by):
    return x * by
