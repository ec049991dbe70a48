"""The result of a gradient function ─► what is at a place in its tuples, and which of its arrays
that has."""

from typing import Any

from functree.transforms.accumulate.roles import Call
from functree.transforms.grad.known_gradient import KnownGradient
from functree.tree.arrays import Tree
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton

Place = tuple[int, ...]
"""Where something is in nested tuples."""


def at(result: Tree, place: Place) -> Tree:
    """What is at a place; None if there is nothing."""
    for index in place:
        if not isinstance(result, tuple | list) or len(result) <= index:
            return None
        result = result[index]
    return result


def indices_at(result: Any, place: Place) -> range:
    """The indices of the arrays at a place, among all arrays of the result."""
    start = 0
    for index in place:
        start += sum(len(Skeleton.of(one)) for one in result[:index])
        result = result[index]
    return range(start, start + len(Skeleton.of(result)))


def parameters_of(result: Tree, call: Call, gradient: KnownGradient | None) -> dict[int, int]:
    """For the index of each gradient among the arrays of a result, the index of its parameter among
    those of the call.

    Args:
        result: the result.
        call: the call.
        gradient: what the function returns, if that is known. Else a gradient is told by its paths,
            which are those of the model.
    """
    model = {Path(call.leaves.leaves[i].path[1:]): i for i in call.of_model}
    places: list[Place] = [(1,), (0,), ()]
    if gradient is not None:
        places = [gradient.place_of(len(call.arguments.partial.args))]
    for place in places:
        found = at(result, place)
        paths = Skeleton.of(found).learn(found).paths
        if paths and all(path in model for path in paths):
            return {
                i: model[path] for i, path in zip(indices_at(result, place), paths, strict=True)
            }
    return {}
