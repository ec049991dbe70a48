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


# An array may also be deleted by its method `delete`, and JAX does not keep why it was.
_REMEDY = "if it was donated, use what that call returned, or donate a copy (`ft.copy`) to keep it"


def refuse_deleted(
    name: str,
    paths: Sequence[Path],
    arrays: Sequence[Any],
    what: str = "argument",
    why: str = "is deleted",
    *,
    whole: bool = True,
) -> FunctreeError:
    """The error for arrays that are deleted. It lists their paths, and one entry for an argument of
    which all are deleted, such as a training state that was donated.

    Args:
        name: what reads them, for the message.
        paths: the paths of arrays, which begin with the name of an argument or a key of a tree.
        arrays: the arrays, also those that are not deleted.
        what: what one that is deleted is.
        why: what is wrong with it.
        whole: whether the arrays of each argument are all there. If not, each path is listed.
    """
    given: dict[Path, list[tuple[Path, Any]]] = {}
    for path, array in zip(paths, arrays, strict=True):
        given.setdefault(Path(path[:1]), []).append((path, array))
    problems: list[Problem] = []
    for argument, several in given.items():
        gone = [(path, array) for path, array in several if is_deleted(array)]
        if whole and argument and len(gone) == len(several) > 1:
            number = count(len(gone), "array")
            problems.append(Problem(argument, None, number, "are all deleted", _REMEDY))
        else:
            problems += [array_problem(path, array, why, _REMEDY) for path, array in gone]
    verb = "is" if len(problems) == 1 else "are"
    noun, *rest = what.split(" ", 1)  # `array` of `array of like`
    subject = " ".join((count(len(problems), noun), *rest))
    return FunctreeError(f"{name}: {subject} {verb} deleted", problems)
