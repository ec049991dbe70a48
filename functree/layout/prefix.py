"""A prefix tree of layouts and a tree ─► each layout with the path that it is for."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import tree_map

from functree.errors import RuleError
from functree.labels.training_state import Scope
from functree.layout.layout import (
    LAYOUTS,
    Layout,
    LayoutLike,
    LayoutTree,
    as_layout,
    is_layout,
    meant_rules,
)
from functree.layout.validation import USE_PLAN_OPTIMIZER, is_optimizer_state
from functree.tree.paths import Path
from functree.tree.prefix import PrefixOf, aligned, where_text


class Part(NamedTuple):
    """One layout of a prefix tree.

    Attributes:
        layout: the layout.
        path: the path of the subtree that the layout is for.
        partial: whether the layout is for more than the tree, so that filters in it may match
            nothing here.
        scope: where the paths begin that filters see.
        for_arrays: the layout of an argument that is one array, if that is another one.
    """

    layout: Layout
    path: Path
    partial: bool = False
    scope: Scope = Scope()
    for_arrays: Layout | None = None


def own_meshes(parts: Iterable[Part]) -> list[Mesh | AbstractMesh | None]:
    """The mesh that each layout of a prefix tree has of its own."""
    return [part.layout.own_mesh for part in parts]


def as_partial(parts: Iterable[Part]) -> list[Part]:
    """The parts, as layouts that are for more than the tree."""
    return [part._replace(partial=True) for part in parts]


def copied(prefix: LayoutTree) -> LayoutTree:
    """A prefix tree of layouts in containers of its own, on which a later change of the given ones
    has no effect."""
    if prefix is None:
        return None
    return tree_map(lambda one: one, prefix, is_leaf=is_layout)


def broadcast(prefix: LayoutTree, tree: Any) -> list[Part]:
    """The layouts of a prefix tree, in the order of the leaves that they are for.

    Raises:
        RuleError: the prefix has another structure than the tree, or contains something that is not
            a layout.
    """
    return [
        Part(_written(one, where_text(path)), path, scope=Scope(len(path)))
        for one, path, _ in aligned(prefix, tree, _LAYOUTS)
    ]


def _written(layout: LayoutLike, where: str) -> Layout:
    """A layout of a prefix tree. Raises RuleError with the path for one that is invalid."""
    try:
        return as_layout(layout)
    except RuleError as error:
        raise RuleError(f"at {where}: {error}") from error


def _hint(prefix: Any, tree: Any) -> str:
    """The end of an error about layouts of another structure: rules, or the state of an optimizer,
    may be meant."""
    hint = meant_rules(prefix)
    classes = {type(tree)}
    # A chain of transformations has a tuple of states.
    if isinstance(tree, tuple):
        classes.update(map(type, tree))
    if any(map(is_optimizer_state, classes)):
        hint += USE_PLAN_OPTIMIZER
    return hint


_LAYOUTS = PrefixOf("layouts", "layout", is_layout, f"is not a layout: write {LAYOUTS}", _hint)
