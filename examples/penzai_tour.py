"""This tour repeats the Penzai notebook "Jitting and Sharding Penzai Models" in functree.

    python examples/penzai_tour.py                    # Simulates 8 devices on the CPU.
    python examples/penzai_tour.py --html tour.html   # Also writes a page with treescope's pictures of arrays and shardings.

Numbers in brackets refer to the notebook's cells. Two things are always different here. Models are
immutable, so functions take state and return the new state. Arrays are plain JAX arrays, so
annotations name their axes.
"""

# %% [1-7] Setup. Simulate 8 devices on the CPU. Set both variables before importing JAX.
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray
from pictures import Show

import functree as ft

show = Show(__doc__)

# %% [8]
show("[8] devices", jax.local_devices())
assert jax.local_device_count() == 8

show.section("JIT-compiling models")


# %% [9] A parameter and a counter. The layer has a `StateRef` with the path of the value. The value
# is in a `State`.
class CounterLayer(eqx.Module):
    counter: ft.StateRef

    def __call__(self, x: Array, state: ft.State) -> tuple[tuple[Array, Array], ft.State]:
        count = state[self.counter] + 1
        return (x, count), state.set(self.counter, count)


def make_model(key: PRNGKeyArray) -> ft.nn.Sequential:
    linear = ft.nn.Linear(8, 8, axes="features features_out", key=key)
    return ft.nn.Sequential([linear, CounterLayer(ft.StateRef(0))])


model, state = ft.make_state(make_model(jax.random.key(0)))
ones = jnp.ones(8)
show("[9] model", model)

# %% [10, 11] Nothing is mutated. The counter increases because each call receives the previous
# call's state.
counts = {}
(y, count), state = model(ones, state=state)
counts[10] = int(count)
(y, count), state = model(ones, state=state)
counts[11] = int(count)
show("[10, 11] the counter after each call", (counts[10], counts[11]))

# %% [12, 13] Nothing needs unbinding or freezing. `make_state` has moved the values out, and only
# slots remain in the model.
show("[12] model_with_slots", model.layers[1])
show("[13] frozen_vars", state)


# %% [14-16] `model(x, state=state)` is a pure function. No variables need rebinding, or an update
# afterwards.
@ft.jit
def rebinding_call(model: Any, state: ft.State, x: Float[Array, "features"]) -> Any:
    return model(x, state=state)


(y, count), new_state = rebinding_call(model, state, ones)
counts[15] = int(count)
show("[15] result", (y, counts[15]))

# %% [17, 18] `stateless_call` is the same call. You can reuse an old state: the count equals the
# count in [15].
(y, count), _ = rebinding_call(model, state, ones)
counts[18] = int(count)
show("[18] the counter, from the state before [15]", counts[18])

# %% [19-21] An initializer under jit returns model and state. (`ft.init` creates them sharded, see
# [57].)
model, state = ft.jit(lambda key: ft.make_state(make_model(key)))(jax.random.key(0))
counts[20] = int(next(iter(state.values())))
show("[21] model", model)


# %% [22-24] `variable_jit` is jit with donated state. The state is updated in place, and the old
# state is deleted.
@ft.jit(donate="state")
def jitted_call(model: Any, state: ft.State, x: Float[Array, "features"]) -> Any:
    return model(x, state=state)


(y, count), state = jitted_call(model, state, ones)
counts[23] = int(count)
(y, count), state = jitted_call(model, state, ones)
counts[24] = int(count)
show(
    "[23, 24] the counter, and the number of compilations",
    (counts[23], counts[24], len(jitted_call.compilations)),
)

# %% [25-27] A layer that compiles its own call.
jit_model = ft.nn.Jitted(model)
(y, count), state = jit_model(ones, state=state)
counts[27] = int(count)
show("[27] the counter", counts[27])

# %% [28, 29] Each layer of two classes compiles its own call.
jit_model_2 = ft.select(model).under(ft.nn.Linear | CounterLayer).apply(ft.nn.Jitted)
(y, count), state = jit_model_2(ones, state=state)
counts[29] = int(count)
show("[28] jit_model_2", [type(layer).__name__ for layer in jit_model_2.layers])
show("[29] the counter", counts[29])

# %% [30] `body` is the original model.
assert jit_model.body is model

show.section("Sharding basics, and pictures of shardings")

# %% [31, 32] A mesh of devices. JAX has removed `PositionalSharding`. A `NamedSharding` on a mesh
# with named mesh axes replaces it. (`devices` is an option of `ft.make_mesh`, so JAX's own class
# makes this mesh.)
line = Mesh(mesh_utils.create_device_mesh((8,)), ("devices",))
show("[31] devices", line)
show("[32] pos_sharding", NamedSharding(line, P("devices")))

# %% [33] An array over the 8 devices.
arrays = {33: ft.shard(jnp.ones(16), P("devices"), line)}
show("[33] ones(16)", arrays[33])

# %% [34, 35] Use another mesh instead of reshaping a positional sharding.
grid = ft.make_mesh(rows=4, columns=2)
arrays[35] = ft.shard(jnp.ones((8, 8)), P("rows", "columns"), grid)
show("[34] reshape((4, 2))", NamedSharding(grid, P("rows", "columns")))
show("[35] ones([8, 8])", arrays[35])

# %% [36, 37] A mesh axis that the spec does not name replaces `replicate(axis=0)`.
wide = ft.make_mesh(rows=2, columns=4)
arrays[37] = ft.shard(jnp.ones((8, 8)), P(None, "columns"), wide)
show("[36] reshape((2, 4)).replicate(axis=0)", NamedSharding(wide, P(None, "columns")))
show("[37] ones([8, 8])", arrays[37])

# %% [38, 39] An array replicated on all devices.
arrays[39] = ft.shard(jnp.ones((8, 8)), P(), line)
show("[38] replicate(axis=0)", NamedSharding(line, P()))
show("[39] ones([8, 8])", arrays[39])

# %% [40-43] A mesh, and shardings on it.
mesh = ft.make_mesh(foo=4, bar=2)
show("[40] mesh", mesh)
for cell, spec in {41: P("foo", "bar"), 42: P(None, ("bar", "foo"), None), 43: P("foo")}.items():
    show(f"[{cell}] {spec}", NamedSharding(mesh, spec))

show.section("Sharding arrays whose axes have names")

# %% [44-46] An array with the values 1 + 0 to 3 + 3. It is a plain array. Functions that need the
# names of its axes take them as an argument.
arr = jnp.arange(1, 4)[:, None] + jnp.arange(4)[None, :]
show("[45] arr", arr)

# %% [47-49] `axes=` names the array's axes, and each name has a rule.
arrays[49] = ft.shard(arr, ft.AxisRules({"foo": None, "bar": "columns"}), wide, axes="foo bar")
show("[49] sharded_arr", arrays[49])


# %% [50, 51] A tree of arrays with named axes is a module whose annotations name the axes. functree
# checks the annotations against the ranks of the arrays.
class SomeArrays(eqx.Module):
    one: Float[Array, "a b c"]
    two: Float[Array, "a"]
    three: Float[Array, "b d"]


some_arrays = SomeArrays(jnp.ones((4, 8, 6)), jnp.ones(8), jnp.ones((4, 12)))
show("[50] some_array_tree", some_arrays)
show("[51] mesh", mesh)

# %% [52, 53] A plan replaces `name_to_name_sharding`, and also gives the reasons. `...: None` leaves
# `c` and `d` unsharded. Without it, they would raise an error, since they have no rule.
rules = ft.AxisRules({"a": "bar", "b": "foo", ...: None})
plan = ft.plan(some_arrays, rules, mesh)
show("[53] plan", plan)
show("[53] shardings", plan.shardings.three)

# %% [54, 55] `device_put` with the plan, and `name_to_name_device_put` with the rules.
arrays[54] = ft.shard(some_arrays, plan, mesh)
arrays[55] = ft.shard(some_arrays, rules, mesh)
show("[55] sharded", arrays[55])

# %% [56] A mesh whose mesh axes have the names of axes. Each axis is sharded over the mesh axis with
# its name. `P()` replicates arrays for which no rule shards a dimension.
already_matching_mesh = ft.make_mesh(b=4, a=2)
arrays[56] = ft.shard(
    some_arrays, ft.AxisRules.identity(already_matching_mesh) | P(), already_matching_mesh
)
show("[56] sharded over the mesh axes of the same names", arrays[56])

show.section("Sharding models and training loops")


# %% [57, 58] A small transformer with a list of blocks, as in the notebook. Layers can be inserted
# between them. (functree's own transformer has its blocks in one `ft.Stacked`.)
class Decoder(eqx.Module):
    embed: ft.nn.Embedding
    blocks: ft.nn.Sequential
    norm: ft.nn.RMSNorm

    @classmethod
    def create(cls, config: ft.nn.TransformerConfig, key: PRNGKeyArray) -> "Decoder":
        stacked = ft.nn.Transformer.create(config, key=key)
        return cls(stacked.embed, ft.nn.Sequential(stacked.blocks), stacked.norm)

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq vocab"]:
        return self.embed.logits(self.norm(self.blocks(self.embed(tokens))))


config = ft.nn.TransformerConfig(
    vocab_size=100,
    embed=64,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=16,
    hidden=128,
    tie_embedding=True,
)
# Shard the embedding dimension over the devices.
embed_rules = ft.AxisRules({"embed": "devices", ...: None})
sharded_init = ft.init(Decoder.create, embed_rules, line)
tiny_transformer = sharded_init(config, key=jax.random.key(42))

# %% [59] Each parameter was created sharded. `sharded_init.plan(...)` shows the plan without
# creating any parameters.
show("[59] tiny_transformer", tiny_transformer)

# %% [60] A batch, sharded over the devices.
batch_rules = ft.AxisRules({"batch": "devices", ...: None})
tokens = ft.shard(jnp.ones((16, 20), jnp.int32), batch_rules, line, axes="batch seq")
show("[60] tokens", tokens)

# %% [61, 62] The compiler chooses the sharding of the result. (In the notebook the batch was
# sharded over the devices; newer compilers may replicate it.)
apply = ft.jit(lambda model, tokens: model(tokens))
result = apply(tiny_transformer, tokens)
show("[61] result", result)
show("[62] its sharding", result.sharding)

# More control, with "fully sharded data parallel" guaranteed: the rules of the jit constrain the
# activations of `ft.nn` layers. A mesh axis shards one dimension of an array: the batch of
# activations, and `embed` of parameters.
fsdp_rules = ft.AxisRules({"batch": "devices", "embed": "devices", ...: None})
fsdp_result = ft.jit(lambda model, tokens: model(tokens), rules=fsdp_rules)(
    tiny_transformer, tokens
)
show("[62] its sharding, with rules", fsdp_result.sharding)

# %% [63, 64] After each block, insert a layer that constrains its input. It shards the batch over
# the devices.
constrain = ft.nn.Constrain("batch seq embed", batch_rules)
tiny_transformer_constrained = (
    ft.select(tiny_transformer).under(ft.nn.Block).insert_after(constrain)
)
constrained_result = apply(tiny_transformer_constrained, tokens)

# %% [65] Select the constraints.
constraints = ft.select(tiny_transformer_constrained).under(ft.nn.Constrain)
show("[65] constraints", constraints)
show("[65] the result's sharding", constrained_result.sharding)

# %% [66] Remove them again.
tiny_transformer_unconstrained = constraints.remove()
ft.select(tiny_transformer_unconstrained).under(ft.nn.Constrain).expect(0)
show("[66] constraints", ft.select(tiny_transformer_unconstrained).under(ft.nn.Constrain))

show.save()
