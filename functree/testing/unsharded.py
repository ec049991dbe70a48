"""A function and the layouts of its arguments ─► the assertion that sharding changes no result."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from functree.argument_checks import FUNCTION, ROOM, check, shown
from functree.calls.function import Function
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.signature import Signature
from functree.devices.meshes import without_devices
from functree.errors import FunctreeTypeError, ShardingError
from functree.labels.leaves import read
from functree.layout.layout import Layout, LayoutTree
from functree.layout.plan.make_plan import plan_tree
from functree.layout.plan.plan import Plan
from functree.transforms.jit.jit import jit
from functree.tree.arrays import AnyArray, Tree
from functree.tree.bits import is_key
from functree.tree.skeleton.skeleton import Skeleton

T = TypeVar("T")


def assert_same_as_unsharded(
    fn: Callable[..., Any],
    args: Sequence[Any],
    layouts: LayoutTree,
    mesh: Mesh,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Assert that a function returns the same with sharded arguments as on one device.

    Args:
        fn: the function. One that `ft.jit` has made runs as it is; any other is jitted, with the
            layouts as ambient rules if they are one layout.
        args: its arguments. They are copied, so that they may be donated.
        layouts: the layouts of the arguments, as `in_shardings` of `ft.jit`.
        mesh: the mesh.
        rtol: how much numbers may differ, relative to those of one device.
        atol: how much they may differ beside that.

    Raises:
        AssertionError: results differ, or have another structure; the message has their paths, and
            how much. Or the layouts shard nothing, so that there is nothing to compare.
        ShardingError: a layout does not fit; the mesh has no devices.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> rules = ft.AxisRules({"batch": "data", "embed": None, "hidden": "model", "seq": None})
        >>> model = ft.nn.MLP(8, 16, key=jax.random.key(0))
        >>> def loss(model, x: Float[Array, "batch seq embed"]):
        ...     return model(x).mean()
        >>> ft.testing.assert_same_as_unsharded(loss, (model, jnp.ones((4, 2, 8))), rules, mesh)
    """
    check(
        "assert_same_as_unsharded cannot compare this",
        fn=(fn, FUNCTION),
        rtol=(rtol, ROOM),
        atol=(atol, ROOM),
    )
    if not isinstance(mesh, Mesh):
        raise ShardingError(
            f"assert_same_as_unsharded runs on devices: give a `Mesh`, not {shown(mesh)}"
        )
    if not isinstance(args, tuple | list):
        raise FunctreeTypeError(
            "assert_same_as_unsharded takes the arguments as a tuple: `(model, batch)`"
        )
    missing = without_devices(mesh)
    if missing is not None:
        raise ShardingError(f"assert_same_as_unsharded runs the function: {missing}")
    if isinstance(fn, Function):
        # It has its own rules, mesh and shardings, and may donate.
        plain, sharded = fn.__wrapped__, fn
    else:
        # One layout stands for all arguments, and so for the activations between them.
        rules = layouts if isinstance(layouts, Layout) else None
        plain, sharded = fn, jit(fn, mesh=mesh, rules=rules)
    # Without rules and mesh: an error in what is constrained by them would be in both programs.
    expected = jit(plain)(*_on(jax.devices()[0], tuple(args)))
    found = sharded(*_sharded(plain, args, layouts, mesh))
    problems = list(_differences(expected, found, rtol, atol))
    if problems:
        raise AssertionError("\n".join(["the sharded function returns something else", *problems]))


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


def _sharded(
    fun: Callable[..., Any], args: Sequence[Any], layouts: LayoutTree, mesh: Mesh
) -> list[Any]:
    """Copies of the arguments, sharded by the layouts."""
    signature, bound = Signature.of(fun)
    positional, by_name = bound.with_bound(tuple(args), {})
    call = signature.bind(positional, by_name)
    prefix = ParameterLayouts("layouts", layouts, signature).prefix(call)
    plan: Plan = plan_tree(call, prefix, mesh, allow_unspecified=True)
    # Such as a layout whose axes no argument has: the test would pass whatever the function does.
    if all(row.spec is None or row.copies == mesh.size for row in plan.rows):
        raise AssertionError(
            f"the layouts shard no argument over the mesh {plan.view}, so nothing would be compared"
        )
    skeleton, arrays = Skeleton.apart(call)
    copies: list[jax.Array | np.ndarray] = []
    for array, row in zip(arrays, plan.rows, strict=True):
        copy = _host_copy(array)
        # Without a layout (`None`) it is left to the function, as an uncommitted array is.
        if row.spec is not None:
            copy = jax.device_put(copy, plan.sharding(row))
        copies.append(copy)
    # Without what a method or a partial brings along, which the call adds again.
    return list(skeleton.fill(copies))[len(bound.args) :]


def _differences(expected: Tree, found: Tree, rtol: float, atol: float) -> Iterator[str]:
    """A line for each array that differs."""
    before, after = read(expected), read(found)
    if before.skeleton.treedef != after.skeleton.treedef:
        yield f"  structure {before.skeleton.treedef}, but sharded {after.skeleton.treedef}"
        return
    for one, other in zip(before.leaves, after.leaves, strict=True):
        a, b = _host_values(one.value), _host_values(other.value)
        where = str(one.path) or "the result"
        if a.shape != b.shape or one.value.dtype != other.value.dtype:
            before_text, after_text = shown(one.value), shown(other.value)
            yield f"  {where}: {before_text}, but sharded {after_text}"
        # NaN at the same places is the same: whether a function should return it is not asked.
        elif not np.allclose(b, a, rtol=rtol, atol=atol, equal_nan=True):
            most, size = np.nanmax(np.abs(b - a)), np.nanmax(np.abs(a))
            yield f"  {where}: differs by up to {most:.3g}, where values are up to {size:.3g}"


def _host_values(array: AnyArray) -> np.ndarray:
    """The numbers of an array, in double precision if they are not whole."""
    if isinstance(array, jax.Array) and is_key(array.dtype):
        return np.asarray(jax.random.key_data(array))
    values = np.asarray(array)
    # By JAX's function: for numpy bfloat16 is no floating-point dtype, and differences of its
    # numbers would be rounded to it.
    if jnp.issubdtype(values.dtype, jnp.floating):
        return values.astype(np.float64)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return values.astype(np.complex128)
    return values
