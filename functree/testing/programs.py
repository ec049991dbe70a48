"""A function and its arguments ─► `Program`, which runs it and records its values; and with layouts
`Both`, the function on one device and on the mesh."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh

from functree.calls.function import Function
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.program import around
from functree.calls.signature import Signature
from functree.compiled.sources import is_layer, is_model_file, is_own_file
from functree.devices.meshes import agreed_mesh
from functree.errors import ShardingError
from functree.layout.layout import Layout, LayoutTree, own_meshes
from functree.layout.plan.make_plan import plan_leaves
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
"""Runs a program on arrays, and returns its records."""

# A program that only records is run once or twice, so that it is not worth being optimized. Other
# platforms have no such options, or others.
_QUICK: Mapping[str, dict[str, str | bool]] = {
    "cpu": {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
}


@dataclass(frozen=True, eq=False)
class Program:
    """A function that was traced for some arguments.

    Attributes:
        body: its operations.
        arrays: the arrays of the arguments.
        paths: the path of each.
        mesh: the mesh to enter around a call; None if there is none.
    """

    body: Body
    arrays: Sequence[AnyArray]
    paths: tuple[Path, ...]
    mesh: Mesh | None

    @classmethod
    def of(cls, function: Function[..., Any], args: Sequence[Any]) -> "Program":
        """Trace a function. What it donates is not donated here."""
        traced = function.trace(*args)
        return cls(
            body_of(traced.jax.jaxpr), traced.arrays(tuple(args), {}), traced.paths, traced.entered
        )

    def watched(self, watch: Watch) -> Sampler:
        """Compile the function, so that it returns the records of its values and nothing else."""
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
        """The arrays, each number off by about as much as rounding makes of it.

        What the same program makes of these shows how much its values depend on rounding, and so on
        the order in which a sum is made.
        """
        # The relative error of the coarsest dtype in which the function computes.
        amount = float(jnp.finfo(jnp.float32).eps)
        for step in self.body.all_steps():
            for kind in step.types:
                if has_checksum(kind):
                    amount = max(amount, rounding(kind.dtype))
        rng = np.random.default_rng(seed)
        return [_perturbed(array, amount, rng) for array in self.arrays]

    @property
    def _rounding(self) -> float:
        """The relative error of the coarsest dtype in which the function computes."""
        coarsest = rounding(np.dtype(np.float32))
        for step in self.body.all_steps():
            for kind in step.types:
                if has_checksum(kind):
                    coarsest = max(coarsest, rounding(kind.dtype))
        return coarsest


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
"""Makes copies of the arguments of a call, where they should be."""


class Both:
    """A function on one device, and on a mesh.

    Attributes:
        unsharded: the function on one device.
        on_device: makes copies of its arguments, on this device.
        sharded: the function on the mesh.
        on_mesh: makes copies of its arguments, sharded.
    """

    def __init__(
        self,
        unsharded: Function[..., Any],
        on_device: Copies,
        sharded: Function[..., Any],
        on_mesh: Copies,
    ):
        self.unsharded: Function[..., Any] = unsharded
        self.on_device: Copies = on_device
        self.sharded: Function[..., Any] = sharded
        self.on_mesh: Copies = on_mesh

    @classmethod
    def of(
        cls, fn: Callable[..., Any], args: Sequence[Any], layouts: LayoutTree, mesh: Mesh
    ) -> "Both":
        """The two, for the layouts of the arguments.

        Raises:
            AssertionError: the layouts shard nothing.
            ShardingError: a layout does not fit; a shard_map has a mesh of its own.
        """
        # One layout stands for all arguments, and so for the activations between them.
        rules = layouts if isinstance(layouts, Layout) else None
        sharded = fn if isinstance(fn, Function) else jit(fn, mesh=mesh, rules=rules)
        plain = sharded.__wrapped__
        plan, on_mesh = _sharded(plain, args, layouts, mesh)
        # With such layouts, as those whose axes no argument has, a test passes in any case.
        if all(row.spec is None or row.copies == mesh.size for row in plan.rows):
            raise AssertionError(
                f"the layouts shard no argument over the mesh {plan.view}, so nothing would be "
                "compared"
            )
        if _has_shard_map(sharded.trace(*on_mesh()).jax.jaxpr):
            # It has no meaning without a mesh, so one device is a mesh too.
            device = np.reshape(mesh.devices.flat[0], (1,) * mesh.devices.ndim)
            single = Mesh(device, mesh.axis_names, axis_types=mesh.axis_types)
            _, on_device = _sharded(plain, args, layouts, single)
            return cls(sharded.on_mesh(single), on_device, sharded, on_mesh)
        on_device = _copies(tuple(args), repeat(jax.devices()[0]))
        # Without rules and mesh: an error in what is constrained by them would be in both programs.
        return cls(jit(plain), on_device, sharded, on_mesh)

    def programs(self) -> tuple[Program, Program]:
        """The two as programs whose values can be looked at."""
        return (
            Program.of(self.unsharded, self.on_device()),
            Program.of(self.sharded, self.on_mesh()),
        )


def _has_shard_map(program: AnyJaxpr) -> bool:
    """Whether a function has a shard_map of its own. The layers of functree do without one if there
    is no mesh.

    Raises:
        ShardingError: a shard_map has its mesh from the user's code, and not from the context.
    """
    found = False
    for eqn in all_equations(program):
        if eqn.primitive.name != "shard_map":
            continue
        source = line_of(eqn)
        found = found or source is None or not is_layer(source.file)
        # functree's own `shard_map` gives JAX a mesh in any case.
        if isinstance(eqn.params["mesh"], Mesh) and not _is_by_functree(eqn):
            raise ShardingError(
                "assert_same_as_unsharded runs the function on a mesh of one device too, but the "
                f"shard_map at {source} has a mesh of its own: leave `mesh=` out, so that it takes "
                "that of the context"
            )
    return found


def _is_by_functree(eqn: JaxprEqn) -> bool:
    """Return whether functree has called the function of JAX that makes an equation."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return False
    for frame in traceback.frames:
        if is_own_file(frame.file_name) or is_model_file(frame.file_name):
            return is_own_file(frame.file_name)
    return False


def _sharded(
    fun: Callable[..., Any], args: Sequence[Any], layouts: LayoutTree, mesh: Mesh
) -> tuple[Plan, Copies]:
    """The plan of the arguments, and what makes copies of them, sharded by it."""
    signature, bound = Signature.of(fun)
    call = signature.bind(*bound.with_bound(tuple(args), {}))
    leaves, parts = ParameterLayouts("layouts", layouts, signature).read(call)
    plan = plan_leaves(leaves, parts, agreed_mesh(mesh, own_meshes(parts)), allow_unspecified=True)
    # Without a layout (`None`) an array is left to the function, as an uncommitted one is.
    targets = [None if row.spec is None else plan.sharding(row) for row in plan.rows]
    copies = _copies(call, targets)
    # Without what a method or a partial brings along, which the call adds again.
    return plan, lambda: list(copies())[len(bound.args) :]


def _copies(tree: Tree, targets: Iterable[Any]) -> Copies:
    """What makes copies of a tree, each array on its device or with its sharding; None leaves it on
    the host."""
    skeleton, arrays = Skeleton.apart(tree)

    def copies() -> Sequence[Any]:
        found: list[Any] = []
        for array, target in zip(arrays, targets, strict=False):
            copy = _host_copy(array)
            found.append(copy if target is None else jax.device_put(copy, target))
        return skeleton.fill(found)

    return copies


def _host_copy(array: AnyArray) -> jax.Array | np.ndarray:
    """A value of its own: neither on a mesh, nor in the memory of the array.

    A function that donates its arguments may otherwise delete those of the caller, by a buffer that
    both have.
    """
    copy = np.array(numbers(array))
    # numpy has no keys: their words are copied.
    if isinstance(array, jax.Array) and is_key(array.dtype):
        return jax.random.wrap_key_data(jnp.asarray(copy), impl=jax.random.key_impl(array))
    return copy
