"""This tour repeats the Flax notebook "Scale up Flax Modules on multiple devices" in functree.

    python examples/flax_tour.py                    # Simulates 8 devices on the CPU.
    python examples/flax_tour.py --html tour.html   # Also writes a page with treescope's pictures of arrays and shardings.

Numbers in brackets refer to the notebook's cells. Linen keeps the axes of a parameter in a box
around it (`Partitioned`, `LogicallyPartitioned`). functree reads them from the annotations of a
module's fields, so parameters are plain arrays.
"""

# %% [1] Simulate 8 devices on the CPU. Both variables must be set before JAX is imported.
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

# %% [2-4]
import timeit
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray
from pictures import Show

import functree as ft

show = Show(__doc__)
show("[3] We have 8 fake JAX devices now", jax.devices())

# %% [6] A mesh with named mesh axes. The functions below take it as an argument, or use the mesh of
# their arrays.
mesh = ft.make_mesh(data=2, model=4)
show("[6] mesh", mesh)

show.section("Define a layer")
xavier_normal = jax.nn.initializers.xavier_normal()


# %% [7] `with_partitioning(init, (None, "model"))` becomes a spec in the annotation of the field,
# and `with_sharding_constraint` becomes `ft.constrain`. Neither contains the mesh.
class DotReluDot(eqx.Module):
    w1: Annotated[Float[Array, "features depth"], P(None, "model")]
    w2: Annotated[Float[Array, "depth features"], P("model", None)]

    def __init__(self, features: int, depth: int, key: PRNGKeyArray):
        w1_key, w2_key = jax.random.split(key)
        self.w1 = xavier_normal(w1_key, (features, depth))
        self.w2 = xavier_normal(w2_key, (depth, features))

    def __call__(self, x: Float[Array, "batch features"]) -> Float[Array, "batch features"]:
        y = ft.constrain(jax.nn.relu(x @ self.w1), P("data", "model"))
        return ft.constrain(y @ self.w2, P("data", None))


# %% [8] A list of layers. (For `nn.scan`, see [26].)
class MLP(eqx.Module):
    layers: list[DotReluDot]

    def __init__(self, num_layers: int, depth: int, key: PRNGKeyArray):
        self.layers = [DotReluDot(depth, depth, key) for key in jax.random.split(key, num_layers)]

    def __call__(self, x: Float[Array, "batch features"]) -> Float[Array, "batch features"]:
        for layer in self.layers:
            x = layer(x)
        return x


# %% [9] The model is created in [15].
BATCH, LAYERS, DEPTH = 8, 4, 1024
x = jnp.ones((BATCH, DEPTH))
k = jax.random.key(0)
optimizer = optax.adam(learning_rate=0.001)

show.section("Specify sharding")

# %% [10] The sharding of the input.
x_layout = P("data", None)
x = ft.shard(x, x_layout, mesh)
show("[10] x", x)


# %% [11] The function that creates the training state.
def init_fn(key: PRNGKeyArray) -> ft.TrainState[MLP]:
    return ft.TrainState.create(MLP(LAYERS, DEPTH, key), optimizer)


# %% [13] The sharding of the output. A plan replaces `eval_shape` and `get_sharding`. A spec in an
# annotation takes precedence over rules, and the optimizer's state is sharded like its parameters.
# The rule `...: None` leaves all other axes unsharded.
make_state = ft.init(init_fn, ft.AxisRules({...: None}), mesh)
state_plan = make_state.plan(k)
state_sharding = state_plan.shardings
show("[13] state_sharding", state_plan)

# %% [15] The arrays are created sharded. No device ever holds a whole array.
initialized_state = make_state(k)
layer = initialized_state.model.layers[0]
show("[15] w1", layer.w1)
show("[15] w2", layer.w2)

# %% [16] The parameter is an array without a box. Its spec is in the plan.
show(
    "[16] type, spec, shape", (type(layer.w1), state_plan["model.layers.0.w1"].spec, layer.w1.shape)
)

# %% [17] Nothing needs unboxing and reboxing, because the annotations belong to the class.
all_zero_params = jax.tree.map(jnp.zeros_like, initialized_state.model)
assert jnp.sum(all_zero_params.layers[0].w1) == 0
zero_plan = ft.plan(all_zero_params, ft.AxisRules({...: None}), mesh)
assert zero_plan["layers.0.w1"].spec == state_plan["model.layers.0.w1"].spec

# %% [18, 19]
show("[18] its sharding", layer.w1.sharding)
show("[19] step", initialized_state.step)

# %% [21] A module is a pytree.
diff = jax.tree.map(lambda a, b: a - b, layer, layer)
show("[21] diff", diff.w1)


# %% [22] Functions that take a layout also take a plan. Gradients have the model's tree structure.
@ft.jit(in_shardings=(state_plan, x_layout), out_shardings=state_plan)
def train_step(state: ft.TrainState[MLP], x: Array) -> ft.TrainState[MLP]:
    def loss_unrolled(model: MLP) -> Array:  # a fake loss
        return model(x).sum()

    return ft.apply_gradients(state, ft.grad(loss_unrolled)(state.model))


# No `with mesh:` is needed, since the arguments are on the mesh.
new_state = train_step(initialized_state, x)

# %% [23]
show("[23] Sharding of Weight 1", new_state.model.layers[0].w1)
show("[23] Sharding of Weight 2", new_state.model.layers[0].w2)


# %% [24] A compiled inference step.
@ft.jit(in_shardings=(state_plan, x_layout), out_shardings=x_layout)
def apply_fn(state: ft.TrainState[MLP], x: Array) -> Array:
    return state.model(x)


y = apply_fn(new_state, x)
show("[24] type, dtype, shape", (type(y), y.dtype, y.shape))
show("[24] y", y)

show.section("Profiling")

# %% [25] A call returns before the computation ends, so wait for the result.
seconds = timeit.repeat(
    lambda: jax.block_until_ready(train_step(initialized_state, x)), number=1, repeat=3
)
show("[25] ms per step, best of 3", round(1000 * min(seconds)))

show.section("Logical axis annotation")


# %% [26] Plain jaxtyping annotations, with axes instead of mesh axes.
class LogicalDotReluDot(eqx.Module):
    w1: Float[Array, "embed hidden"]
    w2: Float[Array, "hidden embed"]

    def __init__(self, features: int, depth: int, key: PRNGKeyArray):
        w1_key, w2_key = jax.random.split(key)
        self.w1 = xavier_normal(w1_key, (features, depth))
        self.w2 = xavier_normal(w2_key, (depth, features))

    def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        y = ft.constrain(jax.nn.relu(x @ self.w1), "batch hidden")
        return ft.constrain(y @ self.w2, "batch embed")


# `ft.stack` replaces `nn.scan`. It names the leading dimension `layers`.
class LogicalMLP(eqx.Module):
    layers: ft.Stacked[LogicalDotReluDot] | list[LogicalDotReluDot]

    def __init__(self, num_layers: int, depth: int, use_scan: bool, key: PRNGKeyArray):
        def make(key: PRNGKeyArray) -> LogicalDotReluDot:
            return LogicalDotReluDot(depth, depth, key)

        if use_scan:
            self.layers = ft.stack(make, num_layers, key)
        else:
            self.layers = [make(key) for key in jax.random.split(key, num_layers)]

    def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
        if isinstance(self.layers, ft.Stacked):
            return self.layers(x)
        for layer in self.layers:
            x = layer(x)
        return x


def logical_init_fn(key: PRNGKeyArray, use_scan: bool) -> ft.TrainState[LogicalMLP]:
    return ft.TrainState.create(LogicalMLP(LAYERS, DEPTH, use_scan, key), optimizer)


# %% [30] An axis without a rule is an error, not unsharded by default. Therefore `embed` and
# `layers` have rules.
rules = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None, "layers": None})
logical_abstract = ft.abstract(logical_init_fn)(k, False)
logical_axes = ft.tree_axes(logical_abstract.model).layers[0]
show("[30] annotations are logical, not mesh-specific", logical_axes.w1)

# %% [31]
logical_plan = ft.plan(logical_abstract, rules, mesh)
show("[31] the plan is mesh-specific", logical_plan["model.layers.0.w1"].spec)

# %% [32] These shardings equal the ones in [13].
one, other = state_sharding.model.layers[0], logical_plan.shardings.model.layers[0]
assert (one.w1, one.w2) == (other.w1, other.w2)

# %% [33, 34]
logical_initialized_state = ft.init(logical_init_fn, rules, mesh)(k, False)
show("[34] sharding of weight 1", logical_initialized_state.model.layers[0].w1)
show("[34] sharding of weight 2", logical_initialized_state.model.layers[0].w2)


# A training step with rules, which constrain activations and gradients. The donated state keeps its
# shardings.
@ft.jit(rules=rules, donate="state")
def logical_train_step(
    state: ft.TrainState[LogicalMLP], x: Array
) -> tuple[ft.TrainState[LogicalMLP], Array]:
    loss, gradients = ft.value_and_grad(lambda model: model(x).sum())(state.model)
    return ft.apply_gradients(state, gradients), loss


for _ in range(3):
    logical_initialized_state, loss = logical_train_step(logical_initialized_state, x)
show(
    "steps, and compilations",
    (int(logical_initialized_state.step), len(logical_train_step.compilations)),
)

# USE_SCAN = True: the program contains one layer, for any number of layers.
scanned_state = ft.init(logical_init_fn, rules, mesh)(k, True)
show("the stack", ft.plan(scanned_state.model, rules, mesh))
scanned_state, loss = logical_train_step(scanned_state, x)
show("w1 of the stack after a step", scanned_state.model.layers.layer.w1.sharding)  # type: ignore[union-attr]

show.save()
