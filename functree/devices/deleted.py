"""Arrays that are deleted, because they were donated ─► an error with their paths."""

from collections.abc import Sequence
from typing import Any

from jax.tree_util import tree_leaves

from functree.devices.placement import is_concrete
from functree.errors import FunctreeError, Problem, count
from functree.labels.leaf import array_problem
from functree.labels.leaves import read
from functree.tree.arrays import Tree
from functree.tree.paths import Path


def is_deleted(array: object) -> bool:
    """Whether an array is deleted: it was donated to an earlier call, or by its method `delete`."""
    return is_concrete(array) and array.is_deleted()


def check_deleted(name: str, tree: Tree) -> None:
    """Raise FunctreeError if an array of a tree is deleted. To be called by what reads values.

    Args:
        name: what reads them, for the message.
        tree: any tree that JAX can flatten.
    """
    # The paths are read only for the error, since this is a part of each eager call.
    if any(map(is_deleted, tree_leaves(tree))):
        leaves = read(tree)
        raise refuse_deleted(name, leaves.paths, leaves.values)


def refuse_deleted(
    name: str,
    paths: Sequence[Path],
    arrays: Sequence[Any],
    what: str = "argument",
    why: str = "is deleted",
) -> FunctreeError:
    """The error for arrays that are deleted. It lists their paths."""
    # An array may also be deleted by its method `delete`, and JAX does not keep why it was.
    remedy = (
        "if it was donated, use what that call returned, or donate a copy (`ft.copy`) to keep it"
    )
    problems: list[Problem] = []
    for path, array in zip(paths, arrays, strict=True):
        if is_deleted(array):
            problems.append(array_problem(path, array, why, remedy))
    verb = "is" if len(problems) == 1 else "are"
    return FunctreeError(f"{name}: {count(len(problems), what)} {verb} deleted", problems)
