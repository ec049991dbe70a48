"""A function, its arguments and their layouts ─► the assertion that sharded it returns what it does on one device."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from functree.calls.function import Function
from functree.calls.parameter_layouts import ParameterLayouts
from functree.calls.signature import Signature
from functree.errors import FunctreeError, ShardingError
from functree.layout.layout import Layout, LayoutTree
from functree.layout.meshes import without_devices
from functree.layout.plan.plan import Plan
from functree.layout.plan.resolver import plan_tree
from functree.parameters import FUNCTION, ROOM, check, shown
from functree.transforms.jit.jit import jit
from functree.tree.leaves import read
from functree.tree.skeleton.skeleton import Skeleton


def assert_same_as_unsharded(
    fn: Callable[..., Any],
    args: Sequence[Any],
    layouts: LayoutTree,
    mesh: Mesh,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Assert that a function returns the same when its arguments are sharded as when they are on one device.

    Args:
        fn: the function. One that `ft.jit` has made runs as it is; any other is jitted, with the layouts as ambient
            rules if they are one layout.
        args: its arguments. They are copied, so that they may be donated.
        layouts: the layouts of the arguments, as `in_shardings` of `ft.jit`.
        mesh: the mesh.
        rtol: how much numbers may differ, relative to those of one device.
        atol: how much they may differ beside that.

    Raises:
        AssertionError: results differ, or have another structure; the message has their paths, and how much. Or the
            layouts shard nothing, so that there is nothing to compare.
        ShardingError: a layout does not fit; the mesh has no devices.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> rules = ft.AxisRules({"batch": "data", "embed": None, "hidden": "model", "seq": None})
        >>> model = ft.nn.MLP(8, 16, key=jax.random.key(0))
        >>> def loss(model, x: Float[Array, "batch seq embed"]):
        ...     return model(x).mean()
        >>> ft.testing.assert_same_as_unsharded(loss, (model, jnp.ones((4, 2, 8))), rules, mesh)
    """
    check("assert_same_as_unsharded cannot compare this", fn=(fn, FUNCTION), rtol=(rtol, ROOM), atol=(atol, ROOM))
    if not isinstance(mesh, Mesh):
        raise ShardingError(f"assert_same_as_unsharded runs on devices: give a `Mesh`, not {shown(mesh)}")
    if not isinstance(args, tuple | list):
        raise FunctreeError("assert_same_as_unsharded takes the arguments as a tuple: `(model, batch)`")
    missing = without_devices(mesh)
    if missing is not None:
        raise ShardingError(f"assert_same_as_unsharded runs the function: {missing}")
    plain = fn.__wrapped__ if isinstance(fn, Function) else fn
    expected = jit(plain)(*_on(jax.devices()[0], tuple(args)))
    placed = _placed(plain, args, layouts, mesh)
    rules = layouts if isinstance(layouts, Layout) else None
    found = (fn if isinstance(fn, Function) else jit(fn, mesh=mesh, rules=rules))(*placed)
    problems = list(_differences(expected, found, rtol, atol))
    if problems:
        raise AssertionError("\n".join(["the sharded function returns something else", *problems]))


def _on(device: Any, tree: Any) -> Any:
    """Copies of the arrays of a tree, on one device."""
    leaves = read(tree)
    return leaves.skeleton.fill([jax.device_put(_host(leaf.value), device) for leaf in leaves.leaves])


def _host(array: Any) -> Any:
    """A value of its own: neither on a mesh, nor in the memory of the array."""
    if not _is_key(array):
        return np.array(array)
    data = jax.numpy.asarray(np.array(jax.random.key_data(array)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))


def _is_key(array: Any) -> bool:
    return isinstance(array, jax.Array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)


def _placed(fun: Any, args: Sequence[Any], layouts: LayoutTree, mesh: Mesh) -> list[Any]:
    """Copies of the arguments, sharded by the layouts."""
    signature, bound = Signature.of(fun)
    positional, by_name = bound.call(tuple(args), {})
    call = signature.bind(positional, by_name)
    prefix = ParameterLayouts("layouts", layouts, signature).prefix(call)
    plan: Plan = plan_tree(call, prefix, mesh, allow_unspecified=True)
    if all(row.spec is None or row.copies == mesh.size for row in plan.rows):
        raise AssertionError(f"the layouts shard no argument over the mesh {plan.view}, so nothing would be compared")
    skeleton, arrays = Skeleton.apart(call)
    shardings = [None if row.spec is None else plan.sharding(row) for row in plan.rows]
    new = list(map(_put, arrays, shardings))
    return list(skeleton.fill(new))[len(bound.args) :]


def _put(array: Any, sharding: Any) -> Any:
    """A copy of an array; where a layout says, if one does."""
    own = _host(array)
    return own if sharding is None else jax.device_put(own, sharding)


def _differences(expected: Any, found: Any, rtol: float, atol: float) -> Iterator[str]:
    """A line for each array that differs."""
    before, after = read(expected), read(found)
    if before.skeleton.treedef != after.skeleton.treedef:
        yield f"  structure {before.skeleton.treedef}, but sharded {after.skeleton.treedef}"
        return
    for one, other in zip(before.leaves, after.leaves, strict=True):
        a, b = _host_values(one.value), _host_values(other.value)
        where = str(one.path) or "the result"
        if a.shape != b.shape or one.value.dtype != other.value.dtype:
            yield f"  {where}: {one.value.dtype}{list(a.shape)}, but sharded {other.value.dtype}{list(b.shape)}"
        elif not np.allclose(b, a, rtol=rtol, atol=atol, equal_nan=True):
            most, size = np.nanmax(np.abs(b - a)), np.nanmax(np.abs(a))
            yield f"  {where}: differs by up to {most:.3g}, where values are up to {size:.3g}"


def _host_values(array: Any) -> Any:
    """The numbers of an array, in double precision if they are not whole."""
    values = np.asarray(jax.random.key_data(array) if _is_key(array) else array)
    for kind, double in ((jax.numpy.floating, np.float64), (jax.numpy.complexfloating, np.complex128)):
        if jax.numpy.issubdtype(values.dtype, kind):
            return values.astype(double)
    return values
