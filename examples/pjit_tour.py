"""This tour repeats `jax.experimental.pjit` of early JAX versions in functree.

    python examples/pjit_tour.py                    # Simulates 8 devices on the CPU.
    python examples/pjit_tour.py --html tour.html   # Also writes a page with treescope's pictures of arrays and shardings.

The sections follow the module's source, from its docstring to its last helper. Today `pjit` is
`jax.jit`. This tour uses `ft.jit` to show the promises and checks of that source, on the function
and the mesh of its docstring.
"""

import os

# Simulate 8 devices on the CPU. Both variables must be set before JAX is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from pictures import Show

import functree as ft

show = Show(__doc__)


def attempt(name: str, function: Callable[..., Any], *args: Any) -> str:
    """Call a function with a mistake, and show and return the error's message."""
    try:
        function(*args)
    except (ft.FunctreeError, TypeError) as error:
        show(name, f"{type(error).__name__}: {error}")
        return str(error)
    raise AssertionError(f"{name}: the call raised no error")


show.section("pjit")


# %% The docstring's example: a convolution, partitioned automatically. `in_axis_resources=None`
# meant replicated. Here `P()` means replicated, and `None` means any sharding.
def smooth(x: Float[Array, "n"]) -> Float[Array, "n"]:
    return jnp.convolve(x, jnp.asarray([0.5, 1.0, 0.5]), "same")


mesh = Mesh(np.array(jax.devices()), ("devices",))
x = jnp.arange(8, dtype=jnp.float32)
f = ft.jit(smooth, in_shardings=P(), out_shardings=P("devices"))
with jax.set_mesh(mesh):
    whole = ft.shard(x, P())
    y = f(whole)
show("f(x)", np.asarray(y))
show("the sharding of f(x)", y)

# %% "The returned function will use the mesh definition available at each call site": it still
# does, as the records of its compilations show. Without a current mesh, it uses the arguments'
# mesh. Here the arguments have none.
half = Mesh(np.array(jax.devices()[:4]), ("devices",))
with jax.set_mesh(half):
    y_half = f(ft.shard(x, P()))
show("on 4 devices", y_half)
show("f.compilations", [str(compilation) for compilation in f.compilations])
messages = {"no mesh": attempt("without a mesh", f, x)}

# %% "Inputs will be automatically partitioned if they're not already": here only uncommitted arrays
# are. Each call moves them again, so the second call warns unless they are tiny. A committed array
# is never moved implicitly.
g = ft.jit(lambda x: 2 * x, in_shardings=P("devices"), out_shardings=P("devices"), mesh=mesh)
doubled = g(x)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        g(jnp.arange(128.0))
show("the second call warns", str(caught[-1].message))
messages["moved"] = attempt("an input that is sharded differently", g, whole)

# %% "Make sure the relevant out_axis_resources match the in_axis_resources": then you can pass the
# result in again. (Donated state keeps its shardings without this.)
for _ in range(3):
    doubled = g(doubled)
show("doubled four times", np.asarray(doubled))

# (This tour skips the docstring's note on multi-process platforms, because it runs in one process.)


# %% "A pytree prefix": one layout covers a whole subtree. Entries are given by position or by
# parameter name. Rules are layouts, too.
@ft.jit(in_shardings={"params": {"w": P(None, "devices"), "rest": P()}, "x": P()}, mesh=mesh)
def apply(params: dict[str, Any], x: Array) -> Array:
    return x @ params["w"] + sum(jax.tree.leaves(params["rest"]))


params = {"w": jnp.ones((8, 16)), "rest": [jnp.ones(16), {"bias": jnp.ones(16)}]}
z = apply(params, x)
show("a prefix", z)

# %% static_argnums still exists, and Python numbers are always static. donate_argnums is now
# `donate=`, which takes names or positions. "pjit does not support kwargs": here a call with
# keywords shares the trace of the positional call.
power = ft.jit(lambda x, n: x**n, in_shardings=(P("devices"), None), donate="x", mesh=mesh)
donated = ft.shard(x, P("devices"), mesh)
cubed = power(n=3, x=donated)
show("x**3, and whether x is deleted", (np.asarray(cubed).tolist(), donated.is_deleted()))
messages["few"] = attempt("too few arguments", power, cubed)

# %% `lower` uses the mesh of the call site. It also accepts abstract arguments.
with jax.set_mesh(mesh):
    compiled = f.lower(ft.abstract(jnp.zeros_like)(x)).compile()
show("lowered, compiled, run", np.asarray(compiled(whole)))

show.section("Parsing and checking resources")

# %% ParsedPartitionSpec: an entry is None, a mesh axis, or a tuple of mesh axes. Dimensions without
# an entry are not sharded.
grid = ft.make_mesh(rows=4, columns=2)
square = jnp.ones((8, 8))
specs = (P("rows", "columns"), P(("rows", "columns")), P(None, "columns"), P("rows"), P())
spread = {spec: ft.shard(square, spec, grid) for spec in specs}
for spec, array in spread.items():
    show(f"8 × 8 by {spec}", array)

# %% _check_unique_resources and _check_shapes_against_resources: functree makes these checks for all
# leaves before anything runs. The error gives the path of each leaf and a remedy. (A plan needs no
# devices: the mesh may be a dict of sizes.)
sizes = {"devices": 8}
messages["type"] = attempt("no spec", lambda: ft.jit(smooth, in_shardings="devices"))
messages["unique"] = attempt(
    "a mesh axis twice", ft.plan, {"w": square}, P("devices", "devices"), sizes
)
messages["rank"] = attempt(
    "more entries than dimensions", ft.plan, {"b": x}, P("devices", None), sizes
)
messages["undefined"] = attempt("an undefined mesh axis", ft.plan, {"b": x}, P("device"), sizes)
messages["divisible"] = attempt(
    "a size that does not divide", ft.plan, {"w": square, "b": jnp.ones(12)}, P("devices"), sizes
)

show.section("pjit rules")
f = ft.jit(smooth, in_shardings=P(), out_shardings=P("devices"), mesh=mesh)

# %% _pjit_batcher: vmap adds a leading dimension, which is not sharded.
batched = jax.vmap(f)(ft.shard(jnp.stack([x, x, x]), P(), mesh))
show("vmap", batched)

# %% _pjit_jvp: tangents are sharded like their primals.
primal, tangent = jax.jvp(f, (whole,), (jnp.ones_like(whole),))
show("jvp", tangent)

# %% _pjit_partial_eval and _pjit_transpose: the compiler chooses the shardings of the residuals.
# (Formerly "all get fully replicated".)
gradient = jax.grad(lambda x: f(x).sum())(whole)
show("grad", np.asarray(gradient))


# The rules of the step shard a model's gradients like its parameters.
class Model(eqx.Module):
    up: Float[Array, "embed hidden"]

    def __call__(self, x: Float[Array, "batch embed"]) -> Float[Array, "batch hidden"]:
        return jnp.tanh(x @ self.up)


rules = ft.AxisRules({"batch": "rows", "hidden": "columns", "embed": None})
model = ft.shard(Model(jnp.ones((8, 16))), rules, grid)
batch = ft.shard(square, rules, grid, axes="batch embed")
loss = ft.jit(ft.value_and_grad(lambda model, x: (model(x) ** 2).mean()), rules=rules)
value, gradients = loss(model, batch)
show("gradients", ft.plan(gradients))

# %% pjit inside pjit: `f` is traced into the outer program. "Changing the physical mesh is not
# allowed inside."
nested = ft.jit(lambda x: f(f(x)), mesh=mesh)(whole)
show("nested", np.asarray(nested))
inner = ft.jit(smooth, mesh=half)
messages["mesh"] = attempt("another mesh inside", ft.jit(lambda x: inner(x), mesh=mesh), whole)

show.section("with_sharding_constraint")


# %% `ft.constrain` takes a spec or axes. Outside of a trace, it moves the array. There, pjit's
# function raised NotImplementedError.
@ft.jit(rules=rules)
def constrained(x: Float[Array, "batch embed"]) -> Float[Array, "batch hidden"]:
    return ft.constrain(jnp.tanh(x), "batch hidden")


inside = constrained(batch)
show("inside", inside)
with jax.set_mesh(mesh):
    outside = ft.constrain(x, P("devices"))
show("outside", outside)

show.section("Helpers")

# %% GlobalDeviceArray, FROM_GDA: every array carries its sharding, and `None` in in_shardings
# accepts any sharding.
any_sharding = ft.jit(lambda x, y: (x, y), in_shardings=(None, P("devices")), mesh=mesh)(
    whole, doubled
)
show("any sharding", any_sharding)

# %% parse_op_sharding: the shardings of a compiled program and of live arrays, as specs.
show("compiled.output_shardings", compiled.output_shardings)
show("live", ft.plan(spread[P("rows")]))

show.save()
