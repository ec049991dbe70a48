"""`assert_same_as_unsharded` asserts that sharding does not change a function's results.

If a result changes, the message names the first operation whose values differ.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from functree.argument_checks import FUNCTION, ROOM, check, shown
from functree.devices.meshes import without_devices
from functree.devices.placement import check_deleted
from functree.errors import FunctreeTypeError, ShardingError
from functree.labels.leaves import read
from functree.layout.layout import LayoutTree
from functree.testing.checksums import numbers, wide
from functree.testing.evidence import Checksums, Values, Watched
from functree.testing.intermediates import KEPT_ITERATIONS, Site
from functree.testing.operation import Operation, described
from functree.testing.programs import Both, Program
from functree.testing.relations import Compared, assignments, distances, excess, on_devices
from functree.testing.scopes import Pairs, Scope
from functree.testing.search import Finding, Search
from functree.tree.arrays import AnyArray, Tree


def assert_same_as_unsharded(
    fn: Callable[..., Any],
    args: Sequence[Any],
    layouts: LayoutTree,
    mesh: Mesh,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Assert that a function returns the same results with sharded arguments as on one device.

    On failure, the message names the results that differ, and the first operation whose values
    differ. The message also shows the operation's line, the arguments that it uses, the iteration,
    the devices, the sharding of its result, and the largest difference.

    The reference run uses one device, without a mesh and without rules. If the function contains a
    shard_map outside functree's layers, the reference run uses a mesh with axes of size 1.

    Args:
        fn: the function. A function from `ft.jit` or `ft.shard_map` runs unchanged. Any other
            function is jitted, and if `layouts` is a single layout, that layout also sets the
            ambient rules. A shard_map in the function must not set `mesh=`: JAX would refuse to run
            it on the one device.
        args: the arguments of `fn`, as a tuple or a list. They are copied, so `fn` may donate them.
        layouts: the layouts of the arguments, like `in_shardings` of `ft.jit`.
        mesh: the mesh.
        rtol: the relative tolerance.
        atol: the absolute tolerance.

    Raises:
        AssertionError: if results differ in value or structure.
        AssertionError: if copies of a result on different devices differ.
        AssertionError: if the layouts shard nothing, so there is nothing to compare.
        ShardingError: if a layout does not fit.
        ShardingError: if `mesh` is not a `Mesh` with devices.
        FunctreeError: if another argument is invalid.

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
        "assert_same_as_unsharded: invalid arguments",
        fn=(fn, FUNCTION),
        rtol=(rtol, ROOM),
        atol=(atol, ROOM),
    )
    if not isinstance(mesh, Mesh):
        raise ShardingError(
            f"assert_same_as_unsharded runs on devices: pass a `Mesh`, not {shown(mesh)}"
        )
    if not isinstance(args, tuple | list):
        raise FunctreeTypeError(
            "assert_same_as_unsharded: pass the arguments as a tuple, such as `(model, batch)`"
        )
    check_deleted("assert_same_as_unsharded", args)
    missing = without_devices(mesh)
    if missing is not None:
        raise ShardingError(f"assert_same_as_unsharded runs the function, but {missing}")
    both = Both.of(fn, args, layouts, mesh)
    # The arguments are copied for each call, since they may be donated.
    expected, found = both.unsharded(*both.on_device()), both.sharded(*both.on_mesh())
    problems = [
        *_differences(expected, found, rtol, atol),
        *_unequal_copies(found, rtol, atol),
    ]
    if problems:
        first = first_difference(*both.programs())
        lines = ["the sharded function returns a different result", *problems, _explanation(first)]
        raise AssertionError("\n".join(lines))


def _explanation(first: Operation | None) -> str:
    if first is not None:
        return f"the first operation whose values differ is {first}"
    return (
        "no operation differs by more than rounding. If sums in a different order explain the "
        "difference, increase `rtol` and `atol`. Otherwise, the XLA compiler causes the "
        "difference, which disappears while values are recorded"
    )


def _differences(expected: Tree, found: Tree, rtol: float, atol: float) -> Iterator[str]:
    """Yield a line for each array that differs."""
    before, after = read(expected), read(found)
    if before.skeleton.treedef != after.skeleton.treedef:
        yield f"  structure: {before.skeleton.treedef}, but {after.skeleton.treedef} if sharded"
        return
    for one, other in zip(before.leaves, after.leaves, strict=True):
        a, b = _host_values(one.value), _host_values(other.value)
        where = str(one.path) or "the result"
        if a.shape != b.shape or one.value.dtype != other.value.dtype:
            before_text, after_text = shown(one.value), shown(other.value)
            yield f"  {where}: is {before_text}, but {after_text} if sharded"
        # NaNs at the same positions are treated as equal, even if the function should not return
        # NaNs.
        elif not np.allclose(b, a, rtol=rtol, atol=atol, equal_nan=True):
            most, size = np.nanmax(np.abs(b - a)), np.nanmax(np.abs(a))
            yield f"  {where}: differs by up to {most:.3g}; its largest magnitude is {size:.3g}"


def _unequal_copies(found: Tree, rtol: float, atol: float) -> Iterator[str]:
    """Yield a line for each array whose copies differ between devices."""
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
                yield f"  {where}: its copies on different devices differ by up to {most:.3g}"
                break


def _host_values(array: AnyArray) -> np.ndarray:
    """Return the numbers of an array in 64 bits."""
    return wide(np.asarray(numbers(array)))


# The first operation

# The values on a line are compared completely only if they have at most this many numbers.
_MOST_NUMBERS = 2**24


def first_difference(one: Program, many: Program) -> Operation | None:
    """Find the first operation whose values differ on a mesh.

    Each program runs with checksums of the values that leave their source line. If a checksum
    differs, all values on its line are compared.

    Args:
        one: the function on one device.
        many: the function on the mesh.

    Returns:
        The operation, or None if no value differs by more than rounding.
    """
    pairs = Pairs.of(one.body, many.body)
    checksums = Watched(pairs, one, many).checksums(one, many)
    finding = Search(checksums).first(Scope(pairs))
    return None if finding is None else _looked_at(finding, checksums, one, many)


def _looked_at(finding: Finding, checksums: Checksums, one: Program, many: Program) -> Operation:
    """Describe the operation of a finding, using the values on its line."""
    if finding.only:
        return _only_one_has(finding, many)
    array = compared = None
    sites = _sites_of_line(finding)
    if sites is not None:
        values = Values(checksums, one, many, sites)
        if not finding.step.bodies:
            value = finding.step.outs[finding.result]
            finding = Search(checksums, values).explained(finding.scope, value) or finding
        scope, j, result = finding.scope, finding.index, finding.result
        array = values.arrays.get((*scope.right.at, j, result))
        if array is not None:
            compared = values.compared(scope, j, result)
    return _operation(finding, many, compared, array)


def _sites_of_line(finding: Finding) -> list[tuple[Site, Site]] | None:
    """Return the sites of the values on a finding's line, or None if there are too many numbers."""
    scope, sites, numbers = finding.scope, list[tuple[Site, Site]](), 0
    for i, j in scope.pairs.steps:
        step = scope.step(j)
        if step is not finding.step and (step.bodies or step.source != finding.step.source):
            continue
        for result, kind in enumerate(scope.pairs.left.steps[i].types):
            sites.append(((*scope.left.at, i, result), (*scope.right.at, j, result)))
            numbers += math.prod(getattr(kind, "shape", ()))
    for around in scope.right.around:
        step = around.body.steps[around.index]
        if step.name in ("scan", "while"):
            numbers *= step.params.get("length", KEPT_ITERATIONS)
    return sites if numbers <= _MOST_NUMBERS else None


def _only_one_has(finding: Finding, many: Program) -> Operation:
    """Describe an operation that only one of the programs has."""
    scope, step = finding.scope, finding.step
    body, place, where = scope.pairs.right, scope.right, "on the mesh"
    if finding.only == "device":
        body, place, where = scope.pairs.left, scope.left, "on one device"
    what = f"only the program {where} has this operation"
    return replace(described(step, finding.result, body, place, many.paths), what=what)


def _operation(
    finding: Finding, many: Program, compared: Compared | None, array: jax.Array | None
) -> Operation:
    scope, relation = finding.scope, finding.relation
    difference, bad, what = None, None, "its values differ"
    if compared is not None:
        difference, bad = _largest(compared, scope)
        what = _difference_text(difference, compared)
    if finding.note:
        what += f": {finding.note}"
    body, place = scope.pairs.right, scope.right
    found = described(finding.step, finding.result, body, place, many.paths, array, bad)
    layout = found.layout
    if scope.axes and (relation.assignment or relation.missing):
        layout += f", as {relation}"
    return replace(found, layout=layout, difference=difference, what=what)


def _difference_text(difference: float, compared: Compared) -> str:
    if not math.isfinite(difference):
        return "its values are finite in one program and not in the other"
    size = np.abs(np.nan_to_num(compared.whole)).max(initial=0)
    return f"its values differ by up to {difference:.3g}, and their largest magnitude is {size:.3g}"


def _largest(compared: Compared, scope: Scope) -> tuple[float, np.ndarray]:
    """Return the largest difference, and which devices differ by more than the tolerance."""
    candidates: list[tuple[float, np.ndarray]] = []
    dims = tuple(range(len(scope.axes), compared.parts.ndim))
    tiles = compared.whole.shape[: compared.whole.ndim - len(dims)]
    tolerance = np.broadcast_to(compared.tolerance, compared.whole.shape)
    for assignment in assignments(tiles, scope.axes):
        expected = on_devices(compared.whole, assignment, scope.axes)
        margin = on_devices(tolerance, assignment, scope.axes)
        most = distances(expected, compared.parts).max(initial=0)
        bad = excess(expected, compared.parts, margin)
        candidates.append((float(most), np.asarray(bad.any(dims))))
    return min(candidates, key=lambda one: one[0])
