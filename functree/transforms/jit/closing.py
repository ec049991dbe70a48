"""The parts of a result that have a donated argument's structure ─► the shardings that they keep."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from functree.tree.codec import form_of, taker
from functree.tree.leaves import is_array
from functree.tree.nodes import children


class Kept(NamedTuple):
    """A donated argument as a part of the result would have to be.

    Attributes:
        form: from `state_form`.
        shardings: of its arrays, in order; None where an array lies by chance.
    """

    form: Any
    shardings: tuple[Any, ...]


def state_form(tree: Any) -> tuple[Any, ...]:
    """What makes two trees the same state: structure, all that is static, shapes and dtypes."""
    form = form_of(tree)
    return form, tuple((x.shape, x.dtype) for x in taker(form)(tree) or ())


def closed(result: Any, donated: Sequence[Kept]) -> list[Any]:
    """For each array of a result, the sharding that it keeps, or None.

    Outermost parts first; the k-th part that looks like an argument keeps the shardings of the k-th such argument. A
    bare array never does: nothing says that it is the state.
    """
    waiting = list(donated)

    def visit(node: Any) -> list[Any]:
        below = children(node)
        if below is None:
            return [None] if is_array(node) else []
        mine = state_form(node) if waiting else None
        for i, kept in enumerate(waiting):
            if kept.form == mine:
                del waiting[i]
                return list(kept.shardings)
        return [sharding for _, child in below for sharding in visit(child)]

    return visit(result)
