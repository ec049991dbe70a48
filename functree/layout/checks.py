"""A leaf and the decision about it ─► its spec, and all that is wrong with it."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from functree.errors import Problem, ShardingError, count, did_you_mean, near_name
from functree.layout.layouts import Decision, Layout, dim_text, optimizer_remedy
from functree.layout.meshes import MeshView
from functree.layout.specs import axes_text, entry
from functree.tree.axes import Axes
from functree.tree.leaf import Leaf
from functree.tree.paths import Path


def decided_spec(decision: Decision) -> PartitionSpec:
    """The spec, with one entry for each dimension."""
    return PartitionSpec(*map(entry, decision.entries))


def lacking(what: str, mesh_axes: Sequence[str], mesh: MeshView, remedy: str) -> list[Problem]:
    """The problems that a rule names mesh axes which the mesh lacks, whether or not a leaf goes there."""
    return [
        Problem(None, None, what, f"the mesh {mesh} has no axis `{axis}`{did_you_mean(axis, mesh.sizes)}", remedy)
        for axis in mesh_axes
        if axis not in mesh.sizes
    ]


def near_misses(leaves: Sequence[Leaf], decisions: Sequence[Decision], unused: Sequence[str]) -> list[Problem]:
    """Names that fell through to `...: None`, and of which an unused rule is a typo."""
    found = []
    for leaf, decision in zip(leaves, decisions, strict=True) if unused else ():
        for name in (leaf.axes[dim] or "" for dim in decision.fell):
            near = near_name(name, unused)
            if near:
                why = f'"{name}" fell through to `...: None`, and no leaf has the axis of rule `{near}`'
                remedy = f'write the same name in both, or `"{name}": None` if they are two'
                found.append(Problem(leaf.path, tuple(leaf.shape), leaf.text, why, remedy))
    return found


def leaf_problems(leaf: Leaf, decision: Decision, mesh: MeshView) -> list[Problem]:
    """All that is wrong with one leaf: what the layouts said, and what the mesh does not allow."""
    found = list(decision.problems)
    found += [(why, remedy) for _, why, remedy in decision.pending]
    if not decision.said:
        found.append(("nobody has said where it goes: its layout is `None`", "write `P()` for whole on every device"))
    for dim, mesh_axes in enumerate(decision.entries):
        if mesh_axes:
            found += _dimension(leaf, dim, mesh_axes, decision, mesh)
    return [Problem(leaf.path, tuple(leaf.shape), leaf.text, why, remedy) for why, remedy in found]


def _dimension(
    leaf: Leaf, dim: int, mesh_axes: Sequence[str], decision: Decision, mesh: MeshView
) -> list[tuple[str, str]]:
    found = []
    source = decision.rules[dim]
    lacking = [axis for axis in mesh_axes if axis not in mesh.sizes]
    for axis in lacking:
        if not source.startswith("rule"):  # rules have reported it themselves
            near = did_you_mean(axis, mesh.sizes)
            why = f"{source} names `{axis}`, and the mesh {mesh} has no such axis{near}"
            found.append((why, "name an axis of the mesh"))
    earlier = [axis for other in decision.entries[:dim] for axis in other]
    for axis in dict.fromkeys(a for i, a in enumerate(mesh_axes) if a in earlier or a in mesh_axes[:i]):
        why = f"{source} uses mesh axis `{axis}` twice, the second time for {dim_text(leaf, dim)}"
        found.append((why, "a mesh axis splits one dimension of an array; leave the other whole"))
    parts = math.prod(mesh.sizes[axis] for axis in mesh_axes if axis in mesh.sizes)
    if not lacking and leaf.shape[dim] % parts:
        found.append(_indivisible(leaf, dim, mesh_axes, parts, source))
    return found


def _indivisible(leaf: Leaf, dim: int, mesh_axes: Sequence[str], parts: int, source: str) -> tuple[str, str]:
    size, name = leaf.shape[dim], leaf.axes[dim] if dim < len(leaf.axes) else None
    padded = -(-size // parts) * parts
    by = f"{source} " if source.startswith("rule") else ""
    why = f"{dim_text(leaf, dim)} has size {size}; {by}{'' if by else axes_text(mesh_axes)}"
    why += f"needs a multiple of {axes_text(mesh_axes)}={parts}" if by else f"={parts} needs a multiple of {parts}"
    whole = f'write `"{name}": None`' if name and by else "write `None` there"
    remedy = f"pad {dim_text(leaf, dim)} to {padded}, or {whole} to leave it unsharded"
    return why, remedy + (optimizer_remedy(leaf) if by else "")


def local_shape(shape: Sequence[int], entries: Sequence[Sequence[str]], mesh: MeshView) -> tuple[int, ...]:
    """The shape of one device's part."""
    parts = [math.prod(mesh.sizes.get(axis, 1) for axis in axes) for axes in entries]
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
    anywhere = MeshView({axis: 1 for axes in decision.entries for axis in axes})
    problems += leaf_problems(leaf, decision, mesh if mesh is not None else anywhere)
    if problems:
        where = f" on mesh {mesh}" if mesh is not None else ""
        raise ShardingError(f'"{axes}" cannot be laid out{where}', problems)
    return decided_spec(decision)


def refuse(problems: Sequence[Problem], mesh: MeshView) -> ShardingError:
    """The one error for all that is wrong with a tree on a mesh."""
    leaves = len({p.path for p in problems if p.path is not None})
    if not leaves:
        return ShardingError(f"the layout does not fit the tree on mesh {mesh}", problems)
    return ShardingError(f"{count(leaves, 'leaf')} cannot be laid out on mesh {mesh}", problems)
