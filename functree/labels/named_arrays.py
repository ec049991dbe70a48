"""Bare arrays and the texts of their axes ─► leaves that have these axes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.tree_util import tree_structure

from functree.errors import Problem, ShardingError, count
from functree.labels.leaves import Leaves
from functree.tree.arrays import Tree, is_array
from functree.tree.axes import Axes
from functree.tree.nodes import children
from functree.tree.prefix import PrefixOf, aligned

AxesTree = str | Axes | Mapping[Any, Any] | list[Any] | tuple[Any, ...] | None
"""The axes of a bare array, or a prefix tree of these. `None` leaves the arrays below it their
own."""


def named_arrays(leaves: Leaves, tree: Tree, axes: AxesTree) -> Leaves:
    """The leaves of a tree, with these axes.

    Args:
        leaves: the leaves of the tree.
        tree: bare arrays in containers. Modules have annotations instead.
        axes: the axes of each array, as a prefix tree: one text may be for all arrays below it.

    Raises:
        RuleError: the axes have another structure than the tree.
        ShardingError: an array has another number of dimensions, or is annotated with other axes;
            the error lists the arrays by path.
    """
    given: list[Axes | None] = []  # for each leaf of the tree; leaves that are not arrays count too
    for one, _, subtree in aligned(axes, tree, _AXES):
        named = None if one is None else Axes.of(one)
        if named is not None and children(subtree) is None and not is_array(subtree):
            kind = type(subtree).__name__
            raise ShardingError(
                f'axes="{named}" names the dimensions of a bare array, but this is a {kind}'
            )
        given += [named] * tree_structure(subtree).num_leaves
    named_leaves, problems = list(leaves.leaves), list[Problem]()
    for i, (place, leaf) in enumerate(zip(leaves.skeleton.indices, leaves.leaves, strict=True)):
        own = given[place]
        if own is None:
            continue
        if leaf.annotated and leaf.axes != own:
            why = f'is annotated "{leaf.axes}", but `axes` names it "{own}"'
            problems.append(
                leaf.problem(why, "write `None` in its place: its annotation is enough")
            )
        elif len(own) != len(leaf.shape):
            why = (
                f'"{own}" names {count(len(own), "dimension")}, but the array has {len(leaf.shape)}'
            )
            problems.append(leaf.problem(why, "name each dimension"))
        named_leaves[i] = leaf._replace(axes=own, annotated=True, misfit=None)
    if problems:
        raise ShardingError("the axes do not fit", problems)
    return replace(leaves, leaves=tuple(named_leaves))


def _is_axes(value: object) -> bool:
    return value is None or isinstance(value, str | Axes)


_AXES = PrefixOf("axes", "text", _is_axes, 'is not a text such as `"batch embed"`')
