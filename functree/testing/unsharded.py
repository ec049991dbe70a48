"""A function and the layouts of its arguments ─► the assertion that sharding changes no result."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from functree.argument_checks import FUNCTION, ROOM, check, shown
from functree.devices.meshes import without_devices
from functree.devices.placement import check_deleted
from functree.errors import FunctreeTypeError, ShardingError
from functree.labels.leaves import read
from functree.layout.layout import LayoutTree
from functree.testing.both import Both
from functree.testing.first_difference import first_difference
from functree.testing.operation import Operation
from functree.tree.arrays import AnyArray, Tree, is_key

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
        fn: the function. One that `ft.jit` or `ft.shard_map` has made runs as it is; any other is
            jitted, with the layouts as ambient rules if they are one layout. If it has a
            shard_map, without `mesh=`, one device is a mesh whose axes have the size 1; otherwise
            it runs there without mesh and rules.
        args: its arguments. They are copied, so that they may be donated.
        layouts: the layouts of the arguments, as `in_shardings` of `ft.jit`.
        mesh: the mesh.
        rtol: how much numbers may differ, relative to those of one device.
        atol: how much they may differ beside that.

    Raises:
        AssertionError: results differ, or have another structure, or their copies on several
            devices differ. The message has their paths, and how much; and the first operation whose
            values differ: its line, the arguments that it takes, the iteration and the devices, how
            its result lies, the largest difference. Or the layouts shard nothing, so that there is
            nothing to compare.
        ShardingError: a layout does not fit; the mesh has no devices.

    Examples:
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> rules = ft.AxisRules(
        ...     {"batch": "data", "embed": None, "hidden": "model", "seq": None}
        ... )
        >>> model = ft.nn.MLP(8, 16, key=jax.random.key(0))
        >>> def loss(model, x: Float[Array, "batch seq embed"]):
        ...     return model(x).mean()
        >>> ft.testing.assert_same_as_unsharded(
        ...     loss, (model, jnp.ones((4, 2, 8))), rules, mesh
        ... )
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
    check_deleted("assert_same_as_unsharded", args)
    missing = without_devices(mesh)
    if missing is not None:
        raise ShardingError(f"assert_same_as_unsharded runs the function: {missing}")
    both = Both.of(fn, args, layouts, mesh)
    # The arguments are placed anew for each call, since they may be donated.
    expected, found = both.unsharded(*both.on_device()), both.sharded(*both.on_mesh())
    problems = [
        *_differences(expected, found, rtol, atol),
        *_unequal_copies(found, rtol, atol),
    ]
    if problems:
        first = first_difference(*both.programs())
        lines = ["the sharded function returns something else", *problems, _explanation(first)]
        raise AssertionError("\n".join(lines))


def _explanation(first: Operation | None) -> str:
    if first is not None:
        return f"the first operation whose values differ is {first}"
    return (
        "no operation differs by more than rounding: either `rtol` and `atol` ask for more than "
        "sums in another order can give, or the compiler, XLA, makes the difference only while no "
        "values are recorded"
    )


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


def _unequal_copies(found: Tree, rtol: float, atol: float) -> Iterator[str]:
    """A line for each array whose copies on several devices are not the same."""
    for leaf in read(found).leaves:
        if not isinstance(leaf.value, jax.Array):
            continue
        seen: dict[str, np.ndarray] = {}
        for shard in leaf.value.addressable_shards:
            values = _host_values(shard.data)
            first = seen.setdefault(str(shard.index), values)
            if not np.allclose(values, first, rtol=rtol, atol=atol, equal_nan=True):
                where = str(leaf.path) or "the result"
                with np.errstate(invalid="ignore"):
                    most = np.max(abs(values - first))
                yield f"  {where}: its copies on several devices differ, by up to {most:.3g}"
                break


def _host_values(array: AnyArray) -> np.ndarray:
    """The numbers of an array, in 64 bits."""
    if isinstance(array, jax.Array) and is_key(array.dtype):
        array = jax.random.key_data(array)
    values = np.asarray(array)
    # By JAX's function: for numpy bfloat16 is no floating-point dtype, and differences of its
    # numbers would be rounded to it.
    if jnp.issubdtype(values.dtype, jnp.floating):
        return values.astype(np.float64)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return values.astype(np.complex128)
    # Of the others, numpy would wrap their differences, and has none of booleans.
    return values.astype(np.int64)
