"""One array with axis names, which is in no tree ─► the spec that a layout gives it."""

from collections.abc import Sequence
from functools import lru_cache

import jax
import numpy as np
from jax.sharding import PartitionSpec

from functree.devices.meshes import MeshView
from functree.errors import Problem, ShardingError
from functree.labels.leaf import Leaf
from functree.layout.decision import Decision
from functree.layout.layout import Layout
from functree.layout.validation import is_clean, leaf_problems, near_misses
from functree.tree.arrays import AnyArray
from functree.tree.axes import Axes
from functree.tree.paths import Path


def array_spec(layout: Layout, leaf: Leaf, mesh: MeshView | None) -> PartitionSpec:
    """The spec that a layout gives to an activation.

    Models constrain the same activations again and again while they are traced. What is decided
    depends on axes and shape alone, and is computed once for these.

    Args:
        layout: the layout.
        leaf: the activation.
        mesh: the mesh; None if mesh axes and sizes are not to be checked.

    Raises:
        ShardingError: the layout does not fit. `problems` has what is wrong.
    """
    sizes = None if mesh is None else tuple(mesh.sizes.items())
    found = _decided(layout, leaf.axes, leaf.shape, sizes)
    if found is not None:
        return found
    raise ShardingError("an array cannot be laid out", _problems(layout, leaf, mesh)[1])


@lru_cache(maxsize=4096)
def _decided(
    layout: Layout,
    axes: Axes,
    shape: tuple[int, ...],
    sizes: tuple[tuple[str, int], ...] | None,
) -> PartitionSpec | None:
    """The spec; None if something is wrong, since messages say more than these arguments."""
    # No layout asks for the dtype of an activation.
    leaf = activation(axes, jax.ShapeDtypeStruct(shape, np.float32))
    mesh = None if sizes is None else MeshView(dict(sizes))
    decision, problems = _problems(layout, leaf, mesh)
    if problems:
        return None
    return decision.spec


def _problems(layout: Layout, leaf: Leaf, mesh: MeshView | None) -> tuple[Decision, list[Problem]]:
    """What is decided about an activation, and what is wrong with it."""
    resolved = layout.resolve([leaf], mesh or MeshView({}))
    (decision,) = resolved.decisions
    problems = near_misses([leaf], [decision], resolved.unused)
    # Without a mesh, each rule would name a mesh axis that does not exist.
    if mesh is not None:
        problems += resolved.problems
    if not is_clean(decision):
        # Without a mesh: one that has all mesh axes, of size 1.
        problems += leaf_problems(leaf, decision, mesh or _of_ones(decision))
    return decision, problems


def _of_ones(decision: Decision) -> MeshView:
    return MeshView(dict.fromkeys(decision.used(), 1))


def activation(axes: Axes, value: AnyArray) -> Leaf:
    """The leaf of an array that is in no tree."""
    return Leaf(Path(), value, axes, annotated=True, activation=True)


def spec_of_axes(
    layout: Layout, axes: Axes, shape: Sequence[int] | None, mesh: MeshView | None
) -> PartitionSpec:
    """The spec that a layout gives to an array with these axes.

    Args:
        layout: the layout.
        axes: the axes of the array.
        shape: its shape; None if it is not known.
        mesh: the mesh; None if mesh axes are not to be checked.

    Raises:
        ShardingError: the array cannot be laid out.
    """
    if shape is not None and len(shape) != len(axes):
        have = f"the shape {tuple(shape)} has {len(shape)}"
        raise ShardingError(f'"{axes}" names {len(axes)} dimensions, and {have}')
    # Each number of parts divides zero, so sizes that are not known are not an error.
    sizes = (0,) * len(axes) if shape is None else tuple(shape)
    leaf = activation(axes, jax.ShapeDtypeStruct(sizes, np.float32))
    try:
        return array_spec(layout, leaf, mesh)
    except ShardingError as error:
        where = ""
        if mesh is not None:
            where = f" on mesh {mesh}"
        problems = [_of_axes(one, axes, shape) for one in error.problems]
        raise ShardingError(f'"{axes}" cannot be laid out{where}', problems) from None


def _of_axes(problem: Problem, axes: Axes, shape: Sequence[int] | None) -> Problem:
    """A problem of the array that `spec_of_axes` makes up, with only what is known of it."""
    if problem.path is None:  # of a rule, and not of the array
        return problem
    if shape is None:
        return problem._replace(path=None, shape=None, what=f'"{axes}"')
    return problem._replace(path=None, shape=tuple(shape), what=f'"{axes}" of shape {tuple(shape)}')
