"""Mixtures of experts, with dense dispatch and with sorted tokens: labeled programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

import functree as ft
from tests.why.arrays import floats, laid
from tests.why.program import Cause, Label, program

GROUPS, SEQ, EMBED, HIDDEN, EXPERTS, CAPACITY = 16, 16, 32, 64, 4, 8
TOKENS = 256

P = ft.P


# --- Dense dispatch: each group of tokens has room for some in each expert.

RULES = ft.AxisRules(
    {
        "batch": ("data", "expert"),
        "groups": "data",
        "experts": "expert",
        "hidden": "model",
        ...: None,
    }
)


class DenseExperts(eqx.Module):
    router: Float[Array, "embed choices"]
    up: Float[Array, "experts embed hidden"]
    down: Float[Array, "experts hidden embed"]

    def __init__(self, key):
        router, up, down = jax.random.split(key, 3)
        self.router = jax.random.normal(router, (EMBED, EXPERTS))
        self.up = jax.random.normal(up, (EXPERTS, EMBED, HIDDEN)) / EMBED**0.5
        self.down = jax.random.normal(down, (EXPERTS, HIDDEN, EMBED)) / HIDDEN**0.5

    def __call__(self, x: Float[Array, "batch seq embed"]):
        gates = jax.nn.softmax(jnp.einsum("gsm,me->gse", x, self.router), axis=-1)
        chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), EXPERTS)
        slot = jnp.cumsum(chosen, axis=1) * chosen - 1
        dispatch = chosen[..., None] * jax.nn.one_hot(slot.astype(jnp.int32), CAPACITY)
        combine = gates[..., None] * dispatch
        sent = jnp.einsum("gsec,gsm->egcm", dispatch, x)
        sent = ft.constrain(sent, "everyone batch capacity embed", RULES)
        sent = ft.constrain(sent, "experts groups capacity embed", RULES)
        hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", sent, self.up))
        done = jnp.einsum("egch,ehm->egcm", hidden, self.down)
        done = ft.constrain(done, "experts groups _ embed", RULES)
        done = ft.constrain(done, "everyone batch _ embed", RULES)
        return jnp.einsum("gsec,egcm->gsm", combine, done)


@program(
    cause=Cause(
        Label("asked", kind="all-to-all", phase="forward"),
        "ft.constrain(",
        ('"everyone batch', '"experts groups'),
    ),
    third="expert",
)
def experts_dense_dispatch(mesh: Mesh):
    """Gradients of a mixture of experts with one-hot dispatch: constraints exchange the groups
    of tokens for experts and back, and partial sums and gradients are summed."""

    def loss(model, x, y):
        return jnp.mean((x + model(x) - y) ** 2)

    def gradient(model, x, y):
        return ft.value_and_grad(loss, layout=RULES)(model, x, y)

    args = ft.abstract(DenseExperts)(jax.random.key(0)), *[floats(GROUPS, SEQ, EMBED)] * 2
    batch = P(("data", "expert"))
    return gradient, args, laid((RULES, batch, batch), (P(), RULES))


# --- Tokens sorted by their experts on each device, and exchanged.

PARTS = 2  # devices along `expert`


def exchanged(x, params):
    """The experts' results for the tokens of one device."""
    gates = jax.nn.softmax(x @ params["router"], axis=-1)
    chosen = jnp.argmax(gates, axis=-1)
    order = jnp.argsort(chosen)
    start = jnp.searchsorted(chosen[order], jnp.arange(EXPERTS))
    slot = jnp.arange(len(x)) - start[chosen[order]]
    room = len(x) // 2
    buffer = jnp.zeros((EXPERTS, room, EMBED)).at[chosen[order], slot].set(x[order], mode="drop")
    parts = buffer.reshape(PARTS, EXPERTS // PARTS, room, EMBED)
    here = jax.lax.all_to_all(parts, "expert", 0, 0)
    hidden = jax.nn.relu(jnp.einsum("pecm,emh->pech", here, params["up"]))
    done = jnp.einsum("pech,ehm->pecm", hidden, params["down"])
    back = jax.lax.all_to_all(done, "expert", 0, 0).reshape(buffer.shape)
    mine = back.at[chosen[order], slot].get(mode="fill", fill_value=0.0)
    return mine[jnp.argsort(order)] * jnp.max(gates, axis=-1, keepdims=True)


@program(
    cause=Cause(Label("asked", kind="all-to-all", phase="forward"), "jax.lax.all_to_all("),
    third="expert",
)
def experts_sorted_and_exchanged(mesh: Mesh):
    """Gradients of a mixture of experts in a shard_map: each device sorts its own tokens and
    exchanges them by an all-to-all that is written there."""
    tokens = P(("data", "expert"))
    placed = {"router": P(), "up": P("expert"), "down": P("expert")}
    experts = jax.shard_map(
        exchanged, mesh=mesh, in_specs=(tokens, placed), out_specs=tokens, check_vma=False
    )

    def gradient(params, x, y):
        return jax.value_and_grad(lambda params: jnp.mean((experts(x, params) - y) ** 2))(params)

    layouts = laid((placed, tokens, tokens), (P(), placed))
    return gradient, (expert_shapes(), *[floats(TOKENS, EMBED)] * 2), layouts


def expert_shapes():
    return {
        "router": floats(EMBED, EXPERTS),
        "up": floats(EXPERTS, EMBED, HIDDEN),
        "down": floats(EXPERTS, HIDDEN, EMBED),
    }


# --- All tokens sorted at once, those of other devices too.


@program(
    cause=Cause(Label("compiler", axes=("data",)), "order", ("x",)),
    labels=[Label("asked", line="sizes = jnp.sum("), Label("compiler", axes=("data",))],
    third="expert",
)
def experts_sorted_over_devices(mesh: Mesh):
    """A mixture of experts that sorts all tokens of the batch by their expert: tokens are taken
    from all devices, where a sort on each one would have moved none."""

    def experts(params, x):
        gates = jax.nn.softmax(x @ params["router"], axis=-1)
        chosen = jnp.argmax(gates, axis=-1)
        sizes = jnp.sum(jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32), axis=0)
        order = jnp.argsort(chosen)
        ranked = x[order]
        hidden = jax.nn.relu(jax.lax.ragged_dot(ranked, params["up"], sizes))
        done = jax.lax.ragged_dot(hidden, params["down"], sizes)
        restored = done[jnp.argsort(order)]
        return restored * jnp.max(gates, axis=-1, keepdims=True)

    layouts = laid((P(), P("data")), P("data"))
    return experts, (expert_shapes(), floats(TOKENS, EMBED)), layouts


# --- A loop over experts that are spread over devices.


@program(
    cause=Cause(
        Label("compiler", axes=("expert",), phase="forward"), "jax.lax.scan(", ("params.up",)
    ),
    labels=[Label("compiler", axes=("expert",)), Label("compiler", axes=("data", "expert"))],
    third="expert",
)
def experts_in_a_loop(mesh: Mesh):
    """Gradients of experts that are sharded over `expert` and run one after the other by a
    scan: each device needs each expert, so the weights are gathered."""

    def experts(params, x):
        gates = jax.nn.softmax(x @ params["router"], axis=-1)

        def add(total, one):
            up, down, gate = one
            value, linear = jnp.split(x @ up, 2, axis=-1)
            return total + gate[:, None] * ((jax.nn.silu(value) * linear) @ down), None

        stacked = params["up"], params["down"], gates.T
        total, _ = jax.lax.scan(add, jnp.zeros_like(x), stacked)
        return total

    def gradient(params, x, y):
        return jax.value_and_grad(lambda params: jnp.mean((experts(params, x) - y) ** 2))(params)

    params = expert_shapes() | {"up": floats(EXPERTS, EMBED, 2 * HIDDEN)}
    placed = {"router": P(), "up": P("expert"), "down": P("expert")}
    layouts = laid((placed, P("data"), P("data")), (P(), placed))
    return gradient, (params, *[floats(TOKENS, EMBED)] * 2), layouts
