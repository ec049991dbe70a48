"""A function and the layouts of its arguments ─► the function on one device, and on the mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from functree.calls.function import Function
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.signature import Signature
from functree.compiled.sources import is_layer
from functree.devices.meshes import agreed_mesh
from functree.errors import ShardingError
from functree.labels.leaves import read
from functree.layout.layout import Layout, LayoutTree, own_meshes
from functree.layout.plan.make_plan import plan_leaves
from functree.layout.plan.plan import Plan
from functree.testing.programs import Program
from functree.testing.steps import shard_maps
from functree.transforms.jit.jit import jit
from functree.tree.arrays import AnyArray, Tree, is_key
from functree.tree.skeleton.skeleton import Skeleton

T = TypeVar("T")

Place = Callable[[], Sequence[Any]]
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
        on_device: Place,
        sharded: Function[..., Any],
        on_mesh: Place,
    ):
        self.unsharded: Function[..., Any] = unsharded
        self.on_device: Place = on_device
        self.sharded: Function[..., Any] = sharded
        self.on_mesh: Place = on_mesh

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
        plain = fn.__wrapped__ if isinstance(fn, Function) else fn
        _check_something_is_sharded(plain, args, layouts, mesh)
        on_mesh = functools.partial(_sharded, plain, args, layouts, mesh)
        if _has_shard_map(sharded.trace(*on_mesh()).jax.jaxpr):
            single = _single(mesh)
            on_device = functools.partial(_sharded, plain, args, layouts, single)
            return cls(sharded.on_mesh(single), on_device, sharded, on_mesh)
        # Without rules and mesh: an error in what is constrained by them would be in both programs.
        on_device = functools.partial(_on, jax.devices()[0], tuple(args))
        return cls(jit(plain), on_device, sharded, on_mesh)

    def programs(self) -> tuple[Program, Program]:
        """The two as programs whose values can be looked at."""
        return (
            Program.of(self.unsharded, self.on_device()),
            Program.of(self.sharded, self.on_mesh()),
        )


def _has_shard_map(program: ClosedJaxpr) -> bool:
    """Whether a function has a shard_map of its own.

    Such a function has no meaning without a mesh, so one device is a mesh too. The layers of
    functree do without a shard_map if there is no mesh.
    """
    found = list(shard_maps(program))
    for one in found:
        if one.has_mesh:
            raise ShardingError(
                "assert_same_as_unsharded runs the function on a mesh of one device too, but the "
                f"shard_map at {one.source} has a mesh of its own: leave `mesh=` out, so that it "
                "takes that of the context"
            )
    return any(one.source is None or not is_layer(one.source.file) for one in found)


def _single(mesh: Mesh) -> Mesh:
    """A mesh with the same axes, of one device."""
    device = np.asarray(mesh.devices.flat[:1]).reshape((1,) * mesh.devices.ndim)
    return Mesh(device, mesh.axis_names, axis_types=mesh.axis_types)


def _on(device: Any, tree: T) -> T:
    """Copies of the arrays of a tree, on one device."""
    leaves = read(tree)
    return leaves.skeleton.fill(
        [jax.device_put(_host_copy(leaf.value), device) for leaf in leaves.leaves]
    )


def _host_copy(array: AnyArray) -> jax.Array | np.ndarray:
    """A value of its own: neither on a mesh, nor in the memory of the array.

    A function that donates its arguments may otherwise delete those of the caller, by a buffer that
    both have.
    """
    if not isinstance(array, jax.Array) or not is_key(array.dtype):
        return np.array(array)
    # numpy has no keys: their words are copied.
    data = jnp.asarray(np.array(jax.random.key_data(array)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def _planned(
    fun: Callable[..., Any], args: Sequence[Any], layouts: LayoutTree, mesh: Mesh
) -> tuple[Tree, int, Plan]:
    """The call, how many of its arguments a method or a partial brings along, and the plan."""
    signature, bound = Signature.of(fun)
    positional, by_name = bound.with_bound(tuple(args), {})
    call = signature.bind(positional, by_name)
    leaves, parts = ParameterLayouts("layouts", layouts, signature).read(call)
    view = agreed_mesh(mesh, own_meshes(parts))
    plan = plan_leaves(leaves, parts, view, allow_unspecified=True)
    return call, len(bound.args), plan


def _check_something_is_sharded(
    fun: Callable[..., Any], args: Sequence[Any], layouts: LayoutTree, mesh: Mesh
) -> None:
    """Raise an error for layouts such as those whose axes no argument has: the test would pass
    whatever the function does."""
    _, _, plan = _planned(fun, args, layouts, mesh)
    if all(row.spec is None or row.copies == mesh.size for row in plan.rows):
        raise AssertionError(
            f"the layouts shard no argument over the mesh {plan.view}, so nothing would be compared"
        )


def _sharded(
    fun: Callable[..., Any], args: Sequence[Any], layouts: LayoutTree, mesh: Mesh
) -> list[Any]:
    """Copies of the arguments, sharded by the layouts."""
    call, brought, plan = _planned(fun, args, layouts, mesh)
    skeleton, arrays = Skeleton.apart(call)
    copies: list[jax.Array | np.ndarray] = []
    for array, row in zip(arrays, plan.rows, strict=True):
        copy = _host_copy(array)
        # Without a layout (`None`) it is left to the function, as an uncommitted array is.
        if row.spec is not None:
            copy = jax.device_put(copy, plan.sharding(row))
        copies.append(copy)
    # Without what a method or a partial brings along, which the call adds again.
    return list(skeleton.fill(copies))[brought:]
