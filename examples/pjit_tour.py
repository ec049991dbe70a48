"""`jax.experimental.pjit` as it was in its first years, from its docstring to its last helper, in functree.

    python examples/pjit_tour.py                    # on a CPU, which passes for 8 devices
    python examples/pjit_tour.py --html tour.html   # the arrays and shardings in pictures too, by treescope

The sections are those of the module's source. Today `pjit` is `jax.jit`; what its text promises, checks and leaves to
be done is shown here by `ft.jit`, on the function and the mesh of its docstring.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a CPU passes for 8 devices; JAX reads both when it is imported
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

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
    """Show what a mistake is told."""
    try:
        function(*args)
    except (ft.FunctreeError, TypeError) as error:
        show(name, f"{type(error).__name__}: {error}")
        return str(error)
    raise AssertionError(f"{name} is no mistake")


show.section("pjit")


# %% The docstring's example: a convolution, automatically partitioned. `in_axis_resources=None` meant whole on all
# devices; here that is `P()`, and `None` leaves it open.
def smooth(x: Float[Array, "n"]) -> Float[Array, "n"]:
    return jnp.convolve(x, jnp.asarray([0.5, 1.0, 0.5]), "same")


mesh = Mesh(np.array(jax.devices()), ("devices",))
x = jnp.arange(8, dtype=jnp.float32)
f = ft.jit(smooth, in_shardings=P(), out_shardings=P("devices"))
with jax.set_mesh(mesh):
    whole = ft.shard(x, P())
    y = f(whole)
show("f(x)", np.asarray(y))
show("f(x) lies", y)

# %% "The returned function will use the mesh definition available at each call site": so it does, and a record says
# so. Without any mesh, the one on which the arguments lie would do; these have none.
half = Mesh(np.array(jax.devices()[:4]), ("devices",))
with jax.set_mesh(half):
    y_half = f(ft.shard(x, P()))
show("on 4 devices", y_half)
show("f.compilations", [str(compilation) for compilation in f.compilations])
said = {"no mesh": attempt("without a mesh", f, x)}

# %% "Inputs will be automatically partitioned if they're not already": only those that have no place yet, and the
# second time it warns, since it is done on each call. What somebody has put elsewhere is not moved in silence.
g = ft.jit(lambda x: 2 * x, in_shardings=P("devices"), out_shardings=P("devices"), mesh=mesh)
doubled = g(x)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    g(x)
show("the second call warns", str(caught[-1].message))
said["moved"] = attempt("an input that lies otherwise", g, whole)

# %% "Make sure the relevant out_axis_resources match the in_axis_resources": then the result goes in again. Donated
# state comes back where it lay without a word.
for _ in range(3):
    doubled = g(doubled)
show("doubled four times", np.asarray(doubled))

# (Its note on multi-process platforms is left out: there is one process here.)


# %% "A pytree prefix": one layout for a whole subtree. Entries go by position, or by parameter name; and rules are
# layouts.
@ft.jit(in_shardings={"params": {"w": P(None, "devices"), "rest": P()}, "x": P()}, mesh=mesh)
def apply(params: dict[str, Any], x: Array) -> Array:
    return x @ params["w"] + sum(jax.tree.leaves(params["rest"]))


params = {"w": jnp.ones((8, 16)), "rest": [jnp.ones(16), {"bias": jnp.ones(16)}]}
z = apply(params, x)
show("a prefix", z)

# %% static_argnums are as they were, and Python numbers are static by themselves. donate_argnums are names or
# positions. "pjit does not support kwargs": here they share the trace of the positional call.
power = ft.jit(lambda x, n: x**n, in_shardings=(P("devices"), None), donate="x", mesh=mesh)
donated = ft.shard(x, P("devices"), mesh)
cubed = power(n=3, x=donated)
show("x**3, and whether x is gone", (np.asarray(cubed).tolist(), donated.is_deleted()))
said["few"] = attempt("too few arguments", power, cubed)

# %% `lower`, with the mesh of the call site, of described arguments too.
with jax.set_mesh(mesh):
    compiled = f.lower(ft.abstract(jnp.zeros_like)(x)).compile()
show("lowered, compiled, run", np.asarray(compiled(whole)))

show.section("Parsing and checking resources")

# %% ParsedPartitionSpec: an entry is None, a mesh axis, or a tuple of them; missing ones are whole.
grid = ft.make_mesh(rows=4, columns=2)
square = jnp.ones((8, 8))
specs = (P("rows", "columns"), P(("rows", "columns")), P(None, "columns"), P("rows"), P())
spread = {spec: ft.shard(square, spec, grid) for spec in specs}
for spec, array in spread.items():
    show(f"8 × 8 by {spec}", array)

# %% _check_unique_resources and _check_shapes_against_resources: the same checks, of all leaves before anything runs,
# with each leaf's path and what to do. (A plan needs no devices: the mesh may be its sizes.)
sizes = {"devices": 8}
said["type"] = attempt("no spec", lambda: ft.jit(smooth, in_shardings="devices"))
said["unique"] = attempt("a mesh axis twice", ft.plan, {"w": square}, P("devices", "devices"), sizes)
said["rank"] = attempt("more entries than dimensions", ft.plan, {"b": x}, P("devices", None), sizes)
said["undefined"] = attempt("an undefined mesh axis", ft.plan, {"b": x}, P("device"), sizes)
said["divisible"] = attempt(
    "a size that does not divide", ft.plan, {"w": square, "b": jnp.ones(12)}, P("devices"), sizes
)

show.section("pjit rules")
f = ft.jit(smooth, in_shardings=P(), out_shardings=P("devices"), mesh=mesh)

# %% _pjit_batcher: vmap puts a whole dimension in front.
batched = jax.vmap(f)(ft.shard(jnp.stack([x, x, x]), P(), mesh))
show("vmap", batched)

# %% _pjit_jvp: tangents lie as their primals.
primal, tangent = jax.jvp(f, (whole,), (jnp.ones_like(whole),))
show("jvp", tangent)

# %% _pjit_partial_eval and _pjit_transpose: residuals are the compiler's ("all get fully replicated" no more).
gradient = jax.grad(lambda x: f(x).sum())(whole)
show("grad", np.asarray(gradient))


# Gradients of a model lie as its parameters, by the rules of the step.
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

# %% pjit inside pjit: `f` is traced into the outer program. "Changing the physical mesh is not allowed inside."
nested = ft.jit(lambda x: f(f(x)), mesh=mesh)(whole)
show("nested", np.asarray(nested))
inner = ft.jit(smooth, mesh=half)
said["mesh"] = attempt("another mesh inside", ft.jit(lambda x: inner(x), mesh=mesh), whole)

show.section("with_sharding_constraint")


# %% `ft.constrain`, by a spec or by axis names. Outside of a trace, where pjit's raised NotImplementedError, it moves.
@ft.jit(rules=rules)
def constrained(x: Float[Array, "batch embed"]) -> Float[Array, "batch hidden"]:
    return ft.constrain(jnp.tanh(x), "batch hidden")


inside = constrained(batch)
show("inside", inside)
with jax.set_mesh(mesh):
    outside = ft.constrain(x, P("devices"))
show("outside", outside)

show.section("Helpers")

# %% GlobalDeviceArray, FROM_GDA: every array knows how it lies, and `None` among in_shardings takes it as it comes.
as_it_comes = ft.jit(lambda x, y: (x, y), in_shardings=(None, P("devices")), mesh=mesh)(whole, doubled)
show("as it comes", as_it_comes)

# %% parse_op_sharding: XLA's shardings read as specs again, of a compiled program and of live arrays.
show("compiled.output_shardings", compiled.output_shardings)
show("live", ft.plan(spread[P("rows")]))

show.save()
