"""A leaf and the decision about it ─► all that is wrong with it; the one error for a whole tree."""

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
"""How the source of a dimension begins that a rule has split; rules report themselves that the mesh lacks an axis."""


def missing_axes(what: str, mesh_axes: Sequence[str], mesh: MeshView, remedy: str) -> list[Problem]:
    """The problems that a rule names mesh axes which the mesh does not have, whether or not a leaf goes there."""
    return [
        Problem(None, None, what, f"the mesh {mesh} has no axis `{axis}`{did_you_mean(axis, mesh.sizes)}", remedy)
        for axis in mesh_axes
        if axis not in mesh.sizes
    ]


def near_misses(leaves: Sequence[Leaf], decisions: Sequence[Decision], unused: Sequence[str]) -> list[Problem]:
    """Names that fell through to `...: None`, and of which an unused rule is a typo."""
    found: list[Problem] = []
    if not unused:
        return found
    for leaf, decision in zip(leaves, decisions, strict=True):
        for name, dimension in zip(leaf.axes, decision.dimensions, strict=False):
            near = near_name(name, unused) if name is not None and dimension.closed else None
            if near is not None:
                why = f'"{name}" fell through to `...: None`, and no leaf has the axis of rule `{near}`'
                found.append(leaf.problem(why, f'write the same name in both, or `"{name}": None` if they are two'))
    return found


def leaf_problems(leaf: Leaf, decision: Decision, mesh: MeshView) -> list[Problem]:
    """All that is wrong with one leaf: what the layouts found, and what the mesh does not allow."""
    faults = list(decision.faults)
    faults += [dimension.fault for dimension in decision.dimensions if dimension.fault is not None]
    for dim, dimension in enumerate(decision.dimensions):
        if dimension.mesh_axes:
            faults += _dimension_faults(leaf, dim, decision, mesh)
    return [leaf.problem(why, remedy) for why, remedy in faults]


def _dimension_faults(leaf: Leaf, dim: int, decision: Decision, mesh: MeshView) -> list[Fault]:
    found: list[Fault] = []
    axes, source = decision.dimensions[dim].mesh_axes, decision.dimensions[dim].source
    missing = [axis for axis in axes if axis not in mesh.sizes]
    if not source.startswith(RULE):
        for axis in missing:
            near = did_you_mean(axis, mesh.sizes)
            why = f"{source} names `{axis}`, and the mesh {mesh} has no such axis{near}"
            found.append((why, "name an axis of the mesh"))
    earlier = {axis for dimension in decision.dimensions[:dim] for axis in dimension.mesh_axes}
    for axis in dict.fromkeys(axis for i, axis in enumerate(axes) if axis in earlier or axis in axes[:i]):
        why = f"{source} uses mesh axis `{axis}` twice, the second time for {leaf.dimension(dim)}"
        found.append((why, "a mesh axis splits one dimension of an array; leave the other whole"))
    parts = math.prod(mesh.sizes[axis] for axis in axes if axis in mesh.sizes)
    if not missing and leaf.shape[dim] % parts:
        found.append(_indivisible(leaf, dim, axes, parts, source))
    return found


def _indivisible(leaf: Leaf, dim: int, mesh_axes: Sequence[str], parts: int, source: str) -> Fault:
    size, name = leaf.shape[dim], leaf.axes[dim] if dim < len(leaf.axes) else None
    by_rule = source.startswith(RULE)
    text, where = leaf.dimension(dim), axes_text(mesh_axes)
    wanted = (
        f"{source} needs a multiple of {where}={parts}" if by_rule else f"{where}={parts} needs a multiple of {parts}"
    )
    unsharded = f'write `"{name}": None`' if name and by_rule else "write `None` there"
    remedy = f"pad {text} to {-(-size // parts) * parts}, or {unsharded} to leave it unsharded"
    return f"{text} has size {size}; {wanted}", remedy + (optimizer_remedy(leaf) if by_rule else "")


def local_shape(shape: Sequence[int], mesh_axes: Sequence[Sequence[str]], mesh: MeshView) -> tuple[int, ...]:
    """The shape of one device's part."""
    parts = [math.prod(mesh.sizes.get(axis, 1) for axis in axes) for axes in mesh_axes]
    return tuple(-(-size // n) for size, n in zip(shape, parts, strict=True))


def spec_of_axes(layout: Layout, axes: Axes, shape: Sequence[int] | None, mesh: MeshView | None) -> PartitionSpec:
    """The spec that a layout gives to one array of which only the axes, and perhaps the shape, are known.

    Raises:
        ShardingError: the array cannot be laid out so.
    """
    if shape is not None and len(shape) != len(axes):
        raise ShardingError(f'"{axes}" names {len(axes)} dimensions, and the shape {tuple(shape)} has {len(shape)}')
    sizes = tuple(shape) if shape is not None else (0,) * len(axes)
    leaf = Leaf(Path(), jax.ShapeDtypeStruct(sizes, np.float32), axes, annotated=True)
    resolved = layout.resolve([leaf], mesh if mesh is not None else MeshView({}))
    decision = resolved.decisions[0]
    problems = [*(resolved.problems if mesh is not None else ()), *near_misses([leaf], [decision], resolved.unused)]
    anywhere = MeshView(dict.fromkeys(decision.used(), 1))
    problems += leaf_problems(leaf, decision, mesh if mesh is not None else anywhere)
    if problems:
        where = f" on mesh {mesh}" if mesh is not None else ""
        raise ShardingError(f'"{axes}" cannot be laid out{where}', problems)
    return decision.spec


def refuse(problems: Sequence[Problem], mesh: MeshView) -> ShardingError:
    """The one error for all that is wrong with a tree on a mesh."""
    leaves = leaves_at_fault(problems)
    if not leaves:
        return ShardingError(f"the layout does not fit the tree on mesh {mesh}", problems)
    return ShardingError(f"{leaves} cannot be laid out on mesh {mesh}", problems)


def leaves_at_fault(problems: Sequence[Problem]) -> str:
    """`2 leaves`; empty where no single leaf is at fault."""
    paths = {problem.path for problem in problems if problem.path is not None}
    return count(len(paths), "leaf") if paths else ""
