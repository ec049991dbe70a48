"""The parts of a result that have a donated argument's structure ─► the shardings that they keep."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding
from jax.tree_util import tree_leaves

from functree.tree.arrays import is_array
from functree.tree.nodes import children
from functree.tree.skeleton.skeleton import Skeleton


class StateForm(NamedTuple):
    """What makes two trees the same state: structure, all that is static, shapes and dtypes."""

    skeleton: Skeleton
    arrays: tuple[tuple[tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, tree: Any) -> "StateForm":
        """The form of a tree, whose arrays may be abstract."""
        return cls(Skeleton.of(tree), tuple((x.shape, x.dtype) for x in tree_leaves(tree) if is_array(x)))


class Kept(NamedTuple):
    """A donated argument, as a part of the result would have to be.

    Attributes:
        form: of the argument.
        shardings: of its arrays, in order; None where an array has none that was chosen.
    """

    form: StateForm
    shardings: tuple[NamedSharding | None, ...]


def closed(result: Any, donated: Sequence[Kept]) -> list[NamedSharding | None]:
    """For each array of a result, the sharding that it keeps, or None.

    Outermost parts first; the k-th part that has the form of an argument keeps the shardings of the k-th such argument.
    A bare array never does: it need not be the state.
    """
    waiting = list(donated)

    def visit(node: Any) -> list[NamedSharding | None]:
        below = children(node)
        if below is None:
            return [None] if is_array(node) else []
        mine = StateForm.of(node) if waiting else None
        for i, kept in enumerate(waiting):
            if kept.form == mine:
                del waiting[i]
                return list(kept.shardings)
        return [sharding for _, child in below for sharding in visit(child)]

    return visit(result)
