"""Leaves of a model ─► a tree with their paths, in which dicts are in the place of the model's
classes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.tree_util import DictKey, register_pytree_with_keys_class

from functree.labels.leaf import Leaf
from functree.tree.interfaces import Stack
from functree.tree.paths import Key, Keys, Path


def stack_paths(leaf: Leaf) -> Sequence[Path]:
    """The paths of the stacks that a leaf is in, outermost first; none if they are not known."""
    # Each key of the path is that of one node, unless there are nodes with several keys, such as
    # state, which is not trained.
    if len(leaf.within) != len(leaf.path):
        return ()
    return [Path(leaf.path[:i]) for i, cls in enumerate(leaf.within) if issubclass(cls, Stack)]


def plain_nodes(leaves: Sequence[Leaf], values: Sequence[Any], *, stacks: bool) -> Any:
    """Dicts with a value at the path of each leaf.

    Args:
        leaves: the leaves, for their paths.
        values: the value for each of them.
        stacks: whether the nodes that are stacks in the model are stacks here too.
    """
    found: set[Path] = set()
    root: dict[Key, Any] = {}
    for leaf, value in zip(leaves, values, strict=True):
        node = root
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = value
        if stacks:
            found.update(stack_paths(leaf))
    return _with_stacks(root, (), found)


def _with_stacks(node: Any, path: Keys, stacks: set[Path]) -> Any:
    if type(node) is not dict:
        return node
    below = {key: _with_stacks(child, (*path, key), stacks) for key, child in node.items()}
    return StackOfDicts(below) if path in stacks else below


@register_pytree_with_keys_class
class StackOfDicts(Mapping[Key, Any], Stack):
    """A dict whose arrays have a leading dimension for layers."""

    def __init__(self, values: dict[Key, Any]):
        self._values = values

    def stack_axes(self) -> tuple[str, ...]:
        return ("layers",)

    def __getitem__(self, key: Key) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Key, ...]]:
        return [(DictKey(key), value) for key, value in self._values.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[Key, ...], values: Sequence[Any]) -> "StackOfDicts":
        return cls(dict(zip(keys, values, strict=True)))
