"""A prefix tree of layouts and a tree ─► each layout with the subtree that it is for."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.tree_util import tree_map, tree_structure

from functree.errors import MAX_PATHS, RuleError, listed
from functree.layout.decision import USE_PLAN_OPTIMIZER, is_optimizer_state
from functree.layout.layout import LAYOUTS, Layout, LayoutLike, LayoutTree, as_layout, is_layout, meant_rules
from functree.tree.interfaces import PackedTree
from functree.tree.nodes import children
from functree.tree.paths import Path


class DerivesLayout:
    """A module that derives the layout of all its parts from the layout of one of them; the base of `TrainState`."""

    @staticmethod
    @abstractmethod
    def derived_layout(layout: Layout, found: Mapping[Path, Any]) -> Layout:
        """The layout of a tree that contains such modules.

        Args:
            layout: the layout that a user gave for the tree.
            found: the modules, by their paths in the tree.
        """


class Part(NamedTuple):
    """One layout of a prefix tree.

    Attributes:
        layout: the layout.
        path: the path of the subtree that the layout is for.
        leaves: the number of leaves of the subtree; leaves that are not arrays count too.
    """

    layout: Layout
    path: Path
    leaves: int


def copied(prefix: LayoutTree) -> LayoutTree:
    """A prefix tree of layouts in containers of its own, on which a later change of the given ones has no effect."""
    return tree_map(lambda one: one, prefix, is_leaf=is_layout)


def broadcast(prefix: LayoutTree, tree: Any) -> list[Part]:
    """The layouts of a prefix tree, in the order of the leaves that they are for.

    Raises:
        RuleError: the prefix has another structure than the tree, or contains something that is not a layout.
    """
    parts: list[Part] = []
    for one, path, subtree in aligned(prefix, tree, _LAYOUTS):
        layout, found = _written(one, _where(path)), dict(_deriving(subtree, Path()))
        if found:
            # One call for all of them: the derived layout has to know the paths of all such modules.
            first = next(iter(found.values()))
            layout = first.derived_layout(layout, found)
        parts.append(Part(layout, path, tree_structure(subtree).num_leaves))
    return parts


_ROOT = Path()


class PrefixOf(NamedTuple):
    """What a prefix tree is made of.

    Attributes:
        noun: their name for messages: `layouts`.
        one: the name of one of them: `layout`.
        is_one: whether a value is one of them, and not a tree.
        wanted: what a value should be that is neither.
        hint: for a wrong part of the prefix, the end of the error.
    """

    noun: str
    one: str
    is_one: Callable[[Any], bool]
    wanted: str
    hint: Callable[[Any, Any], str] = lambda prefix, tree: ""


def aligned(prefix: Any, tree: Any, of: PrefixOf, path: Path = _ROOT) -> Iterator[tuple[Any, Path, Any]]:
    """The values of a prefix tree, each with the path of the subtree that it is for, and with this subtree.

    Raises:
        RuleError: the prefix has another structure than the tree, or contains something that does not belong in it.
    """
    if of.is_one(prefix):
        yield prefix, path, tree
        return
    values, nodes, where = children(prefix), children(tree), _where(path)
    hint = of.hint(prefix, tree)
    if values is None:
        raise RuleError(f"at {where}: {prefix!r} {of.wanted}, or a tree of these{hint}")
    if nodes is None or type(prefix) is not type(tree):
        raise RuleError(
            f"at {where}: the {of.noun} are a {_kind(prefix)} and the tree is a {_kind(tree)}; "
            f"a tree of {of.noun} has the tree's own structure down to each {of.one}{hint}"
        )
    have, want = [key for key, _ in values], [key for key, _ in nodes]
    if have != want:
        raise RuleError(f"at {where}: {_difference(have, want, of.noun)}{hint}")
    for (key, below), (_, node) in zip(values, nodes, strict=True):
        yield from aligned(below, node, of, path / key)


def _where(path: Path) -> str:
    return f"`{path}`" if path else "the root"


def _deriving(tree: Any, path: Path) -> Iterator[tuple[Path, DerivesLayout]]:
    """The modules that derive a layout, with their paths. They are looked for in plain containers only."""
    if isinstance(tree, PackedTree):
        tree = tree.tree  # its leaves have the paths of the tree that was packed
    if isinstance(tree, DerivesLayout):
        yield path, tree
    elif isinstance(tree, list | tuple | dict):
        for key, child in children(tree) or ():
            yield from _deriving(child, path / key)


def _written(layout: LayoutLike, where: str) -> Layout:
    """A layout of a prefix tree. Raises RuleError with the path for one that is invalid."""
    try:
        return as_layout(layout)
    except RuleError as error:
        raise RuleError(f"at {where}: {error}") from error


def _difference(have: Sequence[Any], want: Sequence[Any], noun: str) -> str:
    """How the keys of the layouts differ from those of the tree, for messages."""
    parts: list[str] = []
    for keys, others, where in ((have, want, f"the {noun}"), (want, have, "the tree")):
        lost = [key for key in keys if key not in others]
        if lost:
            parts.append(f"{_listed(lost)} {'is' if len(lost) == 1 else 'are'} only in {where}")
    if not parts:
        # For JAX, an `OrderedDict` with another order has another structure.
        return f"the {noun} have the keys of the tree in another order: {_listed(have)} instead of {_listed(want)}"
    return "; ".join(parts) + f": a tree of {noun} has the keys of the tree"


def _listed(keys: Sequence[Any]) -> str:
    """The first few keys, for messages."""
    return listed([f"`{Path((key,))}`" for key in keys], MAX_PATHS)


def _hint(prefix: Any, tree: Any) -> str:
    """The end of an error about layouts of another structure: rules, or the state of an optimizer, may be meant."""
    # A chain of transformations has a tuple of states.
    states = [tree, *(tree if isinstance(tree, tuple) else ())]
    optimizer = USE_PLAN_OPTIMIZER if any(is_optimizer_state(type(state)) for state in states) else ""
    return meant_rules(prefix) + optimizer


_LAYOUTS = PrefixOf("layouts", "layout", is_layout, f"is not a layout: write {LAYOUTS}", _hint)


def _kind(value: Any) -> str:
    """A node in messages: the name of its class, or `leaf`."""
    return "leaf" if children(value) is None else type(value).__name__
