"""`aligned` pairs each value of a prefix tree with the subtree that it applies to."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from functree.errors import MAX_PATHS, RuleError, listed
from functree.tree.arrays import Tree
from functree.tree.nodes import children
from functree.tree.paths import ROOT, Key, Path


class PrefixOf(NamedTuple):
    """A description of the values in a prefix tree, such as layouts.

    Attributes:
        noun: the plural for messages: `layouts`.
        one: the singular for messages: `layout`.
        is_one: a function that returns whether an object is a single value, not a tree of values.
        wanted: the predicate in the message about an object that is neither a single value nor a
            tree.
        hint: a function that returns the end of the message, given an invalid part of the prefix
            and the subtree at the same path.
    """

    noun: str
    one: str
    is_one: Callable[[Tree], bool]
    wanted: str
    hint: Callable[[Tree, Tree], str] = lambda prefix, tree: ""


def aligned(
    prefix: Tree, tree: Tree, of: PrefixOf, path: Path = ROOT
) -> Iterator[tuple[Tree, Path, Tree]]:
    """Yield each value of a prefix tree with the path of its subtree, and the subtree itself.

    Raises:
        RuleError: if the structures of the prefix and the tree differ.
        RuleError: if the prefix contains an invalid value.
    """
    if of.is_one(prefix):
        yield prefix, path, tree
        return
    values, nodes, where = children(prefix), children(tree), where_text(path)
    hint = of.hint(prefix, tree)
    if values is None:
        raise RuleError(f"at {where}: {prefix!r} {of.wanted}, or a tree of {of.noun}{hint}")
    if nodes is None or type(prefix) is not type(tree):
        raise RuleError(
            f"at {where}: the {of.noun} are a {_kind(prefix)}, but the tree is a {_kind(tree)}: "
            f"use the structure of the tree, with a {of.one} for each leaf or subtree{hint}"
        )
    have, want = [key for key, _ in values], [key for key, _ in nodes]
    if have != want:
        raise RuleError(f"at {where}: {_difference(have, want, of.noun)}{hint}")
    for (key, below), (_, node) in zip(values, nodes, strict=True):
        yield from aligned(below, node, of, path / key)


def where_text(path: Path) -> str:
    """Format the path of a subtree for messages."""
    return f"`{path}`" if path else "the root"


def _difference(have: Sequence[Key], want: Sequence[Key], noun: str) -> str:
    """Describe how the keys of the prefix differ from the tree's keys, for messages."""
    parts: list[str] = []
    for keys, others, where in ((have, want, f"the {noun}"), (want, have, "the tree")):
        lost = [key for key in keys if key not in others]
        if lost:
            parts.append(f"{_listed(lost)} {'is' if len(lost) == 1 else 'are'} only in {where}")
    if not parts:
        # In JAX, the order of an `OrderedDict` is part of its structure.
        order = f"{_listed(have)} instead of {_listed(want)}"
        return (
            f"the {noun} have the keys of the tree in a different order ({order}): use the order "
            "of the tree"
        )
    return "; ".join(parts) + ": use the keys of the tree"


def _listed(keys: Sequence[Key]) -> str:
    """List the first few keys, for messages."""
    return listed([f"`{Path((key,))}`" for key in keys], MAX_PATHS)


def _kind(value: Tree) -> str:
    """Return the name of a node's class, or `leaf`, for messages."""
    return "leaf" if children(value) is None else type(value).__name__
