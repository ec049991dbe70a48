"""A leaf and the decision about it ─► the problems of the leaf; and all problems of a tree ─► one error."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from functree.errors import Problem, ShardingError, count, did_you_mean, near_name
from functree.layout.decision import Decision, Fault, optimizer_remedy
from functree.layout.layout import Layout
from functree.layout.meshes import MeshView
from functree.layout.specs import axes_text
from functree.tree.axes import Axes
from functree.tree.leaf import Leaf
from functree.tree.paths import Path

RULE = "rule "
"""The beginning of `Dimension.source` for a dimension that a rule or FSDP has sharded.

These report mesh axes that the mesh does not have once for each rule, and not for each leaf.
"""


def missing_axes(what: str, mesh_axes: Sequence[str], mesh: MeshView, remedy: str) -> list[Problem]:
    """The problems of a rule that names mesh axes which the mesh does not have, even if no leaf needs the rule."""
    return [
        Problem(None, None, what, f"the mesh {mesh} has no axis `{axis}`{did_you_mean(axis, mesh.sizes)}", remedy)
        for axis in mesh_axes
        if axis not in mesh.sizes
    ]


def near_misses(leaves: Sequence[Leaf], decisions: Sequence[Decision], unused: Sequence[str]) -> list[Problem]:
    """The problems of axes that no rule but `...: None` is for, if an unused rule has a similar name."""
    found: list[Problem] = []
    if not unused:
        return found
    for leaf, decision in zip(leaves, decisions, strict=True):
        for name, dimension in zip(leaf.axes, decision.dimensions, strict=False):
            near = near_name(name, unused) if name is not None and dimension.closed else None
            if near is not None:
                why = f'"{name}" has no rule but `...: None`, and no leaf has the axis of rule `{near}`'
                remedy = f'write the same name in both, or add `"{name}": None` if they are different axes'
                found.append(leaf.problem(why, remedy))
    return found


def leaf_problems(leaf: Leaf, decision: Decision, mesh: MeshView) -> list[Problem]:
    """The problems of one leaf: those that the layouts found, and those that the mesh causes."""
    faults = list(decision.faults)
    faults += [dimension.fault for dimension in decision.dimensions if dimension.fault is not None]
    for dim, dimension in enumerate(decision.dimensions):
        if dimension.mesh_axes:
            faults += _dimension_faults(leaf, dim, decision, mesh)
    return [leaf.problem(why, remedy) for why, remedy in faults]


def _dimension_faults(leaf: Leaf, dim: int, decision: Decision, mesh: MeshView) -> list[Fault]:
    """What is wrong with one sharded dimension of a leaf."""
    found: list[Fault] = []
    axes, source = decision.dimensions[dim].mesh_axes, decision.dimensions[dim].source
    missing = [axis for axis in axes if axis not in mesh.sizes]
    if not source.startswith(RULE):
        for axis in missing:
            near = did_you_mean(axis, mesh.sizes)
            why = f"{source} names `{axis}`, and the mesh {mesh} has no such axis{near}"
            found.append((why, "name an axis of the mesh"))
    # Mesh axes that an earlier dimension uses, or that this dimension uses more than once. Each is reported once.
    seen = {axis for dimension in decision.dimensions[:dim] for axis in dimension.mesh_axes}
    again: dict[str, None] = {}
    for axis in axes:
        if axis in seen:
            again[axis] = None
        seen.add(axis)
    for axis in again:
        why = f"{source} uses mesh axis `{axis}` twice, the second time for {leaf.dimension(dim)}"
        found.append((why, "name the mesh axis once: it shards one dimension of an array"))
    parts = math.prod(mesh.sizes[axis] for axis in axes if axis in mesh.sizes)
    # If a mesh axis does not exist, the number of parts is not known.
    if not missing and leaf.shape[dim] % parts:
        found.append(_indivisible(leaf, dim, axes, parts, source))
    return found


def _indivisible(leaf: Leaf, dim: int, mesh_axes: Sequence[str], parts: int, source: str) -> Fault:
    """The fault that a size is not a multiple of the number of parts."""
    size, text, where = leaf.shape[dim], leaf.dimension(dim), axes_text(mesh_axes)
    padded = -(-size // parts) * parts  # the next multiple
    if not source.startswith(RULE):
        why = f"{text} has size {size}; {where}={parts} needs a multiple of {parts}"
        return why, f"pad {text} to {padded}, or write `None` there to leave it unsharded"
    # Rules shard dimensions that have names, and FSDP only dimensions that it can divide.
    name = leaf.axes[dim]
    why = f"{text} has size {size}; {source} needs a multiple of {where}={parts}"
    alone = "leave this leaf unsharded by a path filter (`StateSharding`)"
    return why, f'pad {text} to {padded}, {alone}, or every "{name}" by `"{name}": None`' + optimizer_remedy(leaf)


def local_shape(shape: Sequence[int], mesh_axes: Sequence[Sequence[str]], mesh: MeshView) -> tuple[int, ...]:
    """The shape of the shard on one device."""
    parts = [math.prod(mesh.sizes.get(axis, 1) for axis in axes) for axes in mesh_axes]
    # Rounded up: a plan with `check=False` has rows with sizes that the mesh does not divide.
    return tuple(-(-size // n) for size, n in zip(shape, parts, strict=True))


def spec_of_axes(layout: Layout, axes: Axes, shape: Sequence[int] | None, mesh: MeshView | None) -> PartitionSpec:
    """The spec that a layout gives to one array.

    Args:
        layout: the layout.
        axes: the axes of the array.
        shape: its shape; None if it is not known.
        mesh: the mesh; None if mesh axes are not to be checked.

    Raises:
        ShardingError: the array cannot be laid out.
    """
    if shape is not None and len(shape) != len(axes):
        raise ShardingError(f'"{axes}" names {len(axes)} dimensions, and the shape {tuple(shape)} has {len(shape)}')
    # Each number of parts divides zero, so sizes that are not known are not an error.
    sizes = tuple(shape) if shape is not None else (0,) * len(axes)
    leaf = Leaf(Path(), jax.ShapeDtypeStruct(sizes, np.float32), axes, annotated=True)
    resolved = layout.resolve([leaf], mesh if mesh is not None else MeshView({}))
    decision = resolved.decisions[0]
    problems = near_misses([leaf], [decision], resolved.unused)
    if mesh is not None:
        problems = [*resolved.problems, *problems, *leaf_problems(leaf, decision, mesh)]
    else:
        # A mesh that has all mesh axes, of size 1: neither the mesh axes nor the sizes are a problem.
        anywhere = MeshView(dict.fromkeys(decision.used(), 1))
        problems += leaf_problems(leaf, decision, anywhere)
    if problems:
        where = f" on mesh {mesh}" if mesh is not None else ""
        raise ShardingError(f'"{axes}" cannot be laid out{where}', [_of_axes(one, axes, shape) for one in problems])
    return decision.spec


def _of_axes(problem: Problem, axes: Axes, shape: Sequence[int] | None) -> Problem:
    """A problem of the array that `spec_of_axes` makes up, with only what is known of it."""
    if problem.path is None:
        return problem
    if shape is None:
        return problem._replace(path=None, shape=None, what=f'"{axes}"')
    return problem._replace(path=None, shape=tuple(shape), what=f'"{axes}" of shape {tuple(shape)}')


def refuse(problems: Sequence[Problem], mesh: MeshView) -> ShardingError:
    """The one error for all problems of a tree on a mesh."""
    leaves = leaves_at_fault(problems)
    if not leaves:
        return ShardingError(f"the layout does not fit the tree on mesh {mesh}", problems)
    return ShardingError(f"{leaves} cannot be laid out on mesh {mesh}", problems)


def leaves_at_fault(problems: Sequence[Problem]) -> str:
    """The number of leaves with problems as a text: `2 leaves`. Empty if no problem is about a single leaf."""
    # A problem with a path and without a shape is about a module: about names for a leaf that it does not have.
    paths = {problem.path for problem in problems if problem.path is not None and problem.shape is not None}
    return count(len(paths), "leaf") if paths else ""
