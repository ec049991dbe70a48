"""A prefix tree and a tree ─► each value of the prefix with the subtree that it is for."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from functree.errors import MAX_PATHS, RuleError, listed
from functree.tree.arrays import Tree
from functree.tree.nodes import children
from functree.tree.paths import Key, Path

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
    is_one: Callable[[Tree], bool]
    wanted: str
    hint: Callable[[Tree, Tree], str] = lambda prefix, tree: ""


def aligned(
    prefix: Tree, tree: Tree, of: PrefixOf, path: Path = _ROOT
) -> Iterator[tuple[Tree, Path, Tree]]:
    """The values of a prefix tree, each with the path of the subtree that it is for, and with this
    subtree.

    Raises:
        RuleError: the prefix has another structure than the tree, or contains something that does
            not belong in it.
    """
    if of.is_one(prefix):
        yield prefix, path, tree
        return
    values, nodes, where = children(prefix), children(tree), where_text(path)
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


def where_text(path: Path) -> str:
    """A place in a tree, for messages."""
    return f"`{path}`" if path else "the root"


def _difference(have: Sequence[Key], want: Sequence[Key], noun: str) -> str:
    """How the keys of the layouts differ from those of the tree, for messages."""
    parts: list[str] = []
    for keys, others, where in ((have, want, f"the {noun}"), (want, have, "the tree")):
        lost = [key for key in keys if key not in others]
        if lost:
            parts.append(f"{_listed(lost)} {'is' if len(lost) == 1 else 'are'} only in {where}")
    if not parts:
        # For JAX, an `OrderedDict` with another order has another structure.
        order = f"{_listed(have)} instead of {_listed(want)}"
        return f"the {noun} have the keys of the tree in another order: {order}"
    return "; ".join(parts) + f": a tree of {noun} has the keys of the tree"


def _listed(keys: Sequence[Key]) -> str:
    """The first few keys, for messages."""
    return listed([f"`{Path((key,))}`" for key in keys], MAX_PATHS)


def _kind(value: Tree) -> str:
    """A node in messages: the name of its class, or `leaf`."""
    return "leaf" if children(value) is None else type(value).__name__
