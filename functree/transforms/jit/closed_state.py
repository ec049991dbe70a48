"""A result and the donated arguments ─► for each part that replaces an argument, the argument's
shardings."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding
from jax.tree_util import tree_leaves

from functree.tree.arrays import is_array
from functree.tree.nodes import children
from functree.tree.skeleton.skeleton import Skeleton


class StateForm(NamedTuple):
    """What two trees have in common if one can replace the other as state: structure, statics,
    shapes and dtypes."""

    skeleton: Skeleton
    arrays: tuple[tuple[tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, tree: Any) -> "StateForm":
        """The form of a tree, whose arrays may be abstract."""
        return cls(
            Skeleton.of(tree), tuple((x.shape, x.dtype) for x in tree_leaves(tree) if is_array(x))
        )


class Kept(NamedTuple):
    """A donated argument, whose shardings a part of the result may keep.

    Attributes:
        form: the form of the argument.
        shardings: the sharding of each of its arrays, in order; None for an array without a
            `NamedSharding`.
    """

    form: StateForm
    shardings: tuple[NamedSharding | None, ...]


def closed(result: Any, donated: Sequence[Kept]) -> list[NamedSharding | None]:
    """For each array of a result, the sharding that it keeps from a donated argument, or None.

    Outer parts are compared before inner ones. If several arguments have one form, the k-th part
    with this form keeps the shardings of the k-th argument. A bare array never keeps a sharding:
    that it has the shape of an argument does not mean that it replaces it.
    """
    return _closed(result, list(donated))


def _closed(node: Any, waiting: list[Kept]) -> list[NamedSharding | None]:
    """The same for a part of a result; the arguments that are replaced by it are removed from those
    that wait."""
    below = children(node)
    if below is None:
        return [None] if is_array(node) else []
    mine = StateForm.of(node) if waiting else None
    for i, kept in enumerate(waiting):
        if kept.form == mine:
            del waiting[i]
            return list(kept.shardings)
    return [sharding for _, child in below for sharding in _closed(child, waiting)]
