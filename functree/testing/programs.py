"""A `Program` runs a function and records its values. `Both` runs it unsharded and sharded."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from functree.calls.function import Function
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import around
from functree.calls.signature import Signature
from functree.compiled.sources import is_layer
from functree.devices.meshes import agreed_mesh
from functree.layout.decide import plan_leaves
from functree.layout.layout import Layout, LayoutTree, own_meshes
from functree.layout.plan.plan import Plan
from functree.testing.checksums import has_checksum, is_inexact, numbers, rounding, wide
from functree.testing.intermediates import Record, Site, Watch, run
from functree.testing.steps import Body, body_of, line_of
from functree.transforms.jit.jit import jit
from functree.tree.arrays import AnyArray, Tree, is_key
from functree.tree.jaxprs import AnyJaxpr, all_equations
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

Sampler = Callable[[Sequence[AnyArray]], Mapping[Site, jax.Array]]
"""A function that runs a program on arrays, and returns its records."""

# A recording program runs only a few times, so optimizing it does not pay off. These options exist
# only on CPUs.
_QUICK: Mapping[str, dict[str, str | bool]] = {
    "cpu": {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
}


@dataclass(frozen=True, eq=False)
class Program:
    """A function traced for some arguments.

    Attributes:
        body: its operations.
        arrays: the arrays of the arguments.
        paths: the path of each array.
        mesh: the mesh to enter around a call; None if there is none.
    """

    body: Body
    arrays: Sequence[AnyArray]
    paths: tuple[Path, ...]
    mesh: Mesh | None

    @classmethod
    def of(cls, function: Function[..., Any], args: Sequence[Any]) -> "Program":
        """Trace a function, ignoring its donation."""
        traced = function.trace(*args)
        return cls(
            body_of(traced.jax.jaxpr), traced.arrays(tuple(args), {}), traced.paths, traced.entered
        )

    def watched(self, watch: Watch) -> Sampler:
        """Compile the function so that it returns only the records of watched values."""
        sites: list[Site] = []

        def recording(*arrays: jax.Array) -> list[Record]:
            _, records = run(self.body, arrays, watch)
            sites[:] = records
            return list(records.values())

        with around(self.mesh):
            lowered = jax.jit(recording, keep_unused=True).lower(*self.arrays)
            compiled = lowered.compile(_QUICK.get(jax.default_backend()))

        def sample(arrays: Sequence[AnyArray]) -> Mapping[Site, jax.Array]:
            return dict(zip(sites, compiled(*arrays), strict=True))

        return sample

    def perturbed(self, seed: int) -> list[AnyArray]:
        """Perturb each number by up to the rounding error of the coarsest dtype in the function.

        The program's values for perturbed arguments show how much these values depend on rounding,
        for example on the order of a sum.
        """
        # The relative error of the coarsest dtype in which the function computes.
        amount = float(jnp.finfo(jnp.float32).eps)
        for step in self.body.all_steps():
            for kind in step.types:
                if has_checksum(kind):
                    amount = max(amount, rounding(kind.dtype))
        rng = np.random.default_rng(seed)
        return [_perturbed(array, amount, rng) for array in self.arrays]


def _perturbed(array: AnyArray, amount: float, rng: np.random.Generator) -> AnyArray:
    if is_key(array.dtype) or not is_inexact(array.dtype):
        return array
    values = np.asarray(array)
    off = wide(values) * (1 + amount * rng.uniform(-1, 1, values.shape))
    off = off.astype(values.dtype)
    if not isinstance(array, jax.Array):
        return off
    return jax.device_put(off, array.sharding)


Copies = Callable[[], Sequence[Any]]
"""A function that copies the arguments of a call to their devices."""


@dataclass(frozen=True, eq=False)
class Both:
    """A function on one device and on a mesh.

    Attributes:
        unsharded: the function on one device.
        on_device: a function that copies the arguments to that device.
        sharded: the function on the mesh.
        on_mesh: a function that copies the arguments to the mesh, sharded.
    """

    unsharded: Function[..., Any]
    on_device: Copies
    sharded: Function[..., Any]
    on_mesh: Copies

    @classmethod
    def of(
        cls, fn: Callable[..., Any], args: Sequence[Any], layouts: LayoutTree, mesh: Mesh
    ) -> "Both":
        """Prepare a function to run unsharded, and sharded with layouts of its arguments.

        Raises:
            AssertionError: if the layouts shard nothing.
            ShardingError: if a layout does not fit.
        """
        # A single layout applies to all arguments, and therefore to activations.
        rules = layouts if isinstance(layouts, Layout) else None
        sharded = fn if isinstance(fn, Function) else jit(fn, mesh=mesh, rules=rules)
        plain = sharded.__wrapped__
        plan, on_mesh = _sharded(plain, args, layouts, mesh)
        # If the layouts shard nothing, for example because no argument has their axes, a test would
        # always pass.
        if all(row.spec is None or row.copies == mesh.size for row in plan.rows):
            raise AssertionError(
                f"the layouts shard no argument over the mesh {plan.view}, so there is nothing to "
                "compare: pass layouts that shard at least one argument"
            )
        if _has_shard_map(sharded.trace(*on_mesh()).jax.jaxpr):
            # A shard_map needs a mesh, so the one device becomes a mesh.
            device = np.reshape(mesh.devices.flat[0], (1,) * mesh.devices.ndim)
            single = Mesh(device, mesh.axis_names, axis_types=mesh.axis_types)
            _, on_device = _sharded(plain, args, layouts, single)
            return cls(sharded.changed(mesh=single), on_device, sharded, on_mesh)
        on_device = _copies(tuple(args), repeat(jax.devices()[0]))
        # No rules and no mesh, since a wrong constraint would otherwise be in both programs.
        return cls(jit(plain), on_device, sharded, on_mesh)

    def programs(self) -> tuple[Program, Program]:
        """Trace both functions as programs whose values can be recorded."""
        return (
            Program.of(self.unsharded, self.on_device()),
            Program.of(self.sharded, self.on_mesh()),
        )


def _has_shard_map(program: AnyJaxpr) -> bool:
    """Return whether a function has a shard_map outside functree's layers.

    functree's layers work without their shard_map if there is no mesh.
    """
    for eqn in all_equations(program):
        if eqn.primitive.name == "shard_map":
            source = line_of(eqn)
            if source is None or not is_layer(source.file):
                return True
    return False


def _sharded(
    fun: Callable[..., Any], args: Sequence[Any], layouts: LayoutTree, mesh: Mesh
) -> tuple[Plan, Copies]:
    """Return the arguments' plan, and a function that copies them with the plan's shardings."""
    signature, bound = Signature.of(fun)
    call = signature.bind(*bound.with_bound(tuple(args), {}))
    leaves, parts = ParameterLayouts("layouts", layouts, signature).read(call)
    plan = plan_leaves(leaves, parts, agreed_mesh(mesh, own_meshes(parts)), allow_unspecified=True)
    # Without a layout (`None`), an array stays uncommitted.
    targets = [None if row.spec is None else plan.sharding(row) for row in plan.rows]
    copies = _copies(call, targets)
    # Leave out the bound arguments of a method or partial, which the call adds again.
    return plan, lambda: list(copies())[len(bound.args) :]


def _copies(tree: Tree, targets: Iterable[Any]) -> Copies:
    """Build a function that copies a tree to devices or shardings, where None means the host."""
    skeleton, arrays = Skeleton.apart(tree)

    def copies() -> Sequence[Any]:
        copied: list[Any] = []
        for array, target in zip(arrays, targets, strict=False):
            copy = _host_copy(array)
            copied.append(copy if target is None else jax.device_put(copy, target))
        return skeleton.fill(copied)

    return copies


def _host_copy(array: AnyArray) -> jax.Array | np.ndarray:
    """Copy an array. The copy is not on a mesh, and shares no memory with the array.

    Otherwise, a function that donates its arguments could delete the caller's arrays through a
    shared buffer.
    """
    copy = np.array(numbers(array))
    # NumPy has no random keys, so their words are copied.
    if isinstance(array, jax.Array) and is_key(array.dtype):
        return jax.random.wrap_key_data(jnp.asarray(copy), impl=jax.random.key_impl(array))
    return copy
