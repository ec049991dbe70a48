"""This program has the model and training step in haliax."""

# --8<-- [start:program]
import equinox as eqx
import haliax as hax
import jax
import optax

RULES = {"batch": "data", "hidden": "model"}
TX = optax.adam(1e-2)
Embed, Classes = hax.Axis("embed", 64), hax.Axis("classes", 16)


class Model(eqx.Module):
    up: hax.NamedArray
    down: hax.NamedArray

    @staticmethod
    def init(Hidden, *, key):
        keys = jax.random.split(key)
        return Model(
            hax.random.normal(keys[0], (Embed, Hidden)) * 0.1,
            hax.random.normal(keys[1], (Hidden, Classes)) * 0.1,
        )

    def __call__(self, x):
        x = hax.nn.gelu(hax.dot(x, self.up, axis=Embed))
        return hax.dot(hax.auto_sharded(x), self.down, axis="hidden")


def create(mesh, key, hidden=256, rules=RULES):
    def make(key):
        model = Model.init(hax.Axis("hidden", hidden), key=key)
        return model, TX.init(eqx.filter(model, eqx.is_array))

    with hax.axis_mapping(rules):
        return hax.named_jit(make, out_axis_resources=rules)(key)


def place(mesh, x, labels):
    x = hax.named(x, ("batch", "embed"))
    return hax.shard((x, hax.named(labels, "batch")), RULES)


@hax.named_jit(axis_resources=RULES, donate_args=(True, False, False))
def step(state, x, labels):
    model, opt_state = state

    def loss(model):
        losses = hax.nn.cross_entropy_loss(
            model(x), Classes, hax.nn.one_hot(labels, Classes)
        )
        return losses.scalar()

    value, grads = eqx.filter_value_and_grad(loss)(model)
    updates, opt_state = TX.update(grads, opt_state, model)
    return (eqx.apply_updates(model, updates), opt_state), value


# --8<-- [end:program]


def misspelled(mesh, key):
    rules = {"batch": "data", "hiden": "model"}
    return create(mesh, key, rules=rules)


def missing(mesh, key):
    return create(mesh, key, rules={"batch": "data"})


def wrong_path(mesh, key):
    model, _ = create(mesh, key)
    return eqx.tree_at(lambda model: model.upp, model, None)


@hax.named_jit
def scaled(x, by):
    return x * by
