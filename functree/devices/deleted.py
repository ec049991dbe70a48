"""Arrays that are deleted, because they were donated ─► an error with their paths."""

from collections.abc import Sequence
from typing import Any

from functree.devices.placement import is_concrete
from functree.errors import FunctreeError, Problem, count
from functree.labels.leaf import array_problem
from functree.tree.paths import Path


def is_deleted(array: object) -> bool:
    """Whether an array is deleted: it was donated to an earlier call, or by its method `delete`."""
    return is_concrete(array) and array.is_deleted()


def refuse_deleted(name: str, paths: Sequence[Path], arrays: Sequence[Any]) -> FunctreeError:
    """The error for arrays that are deleted. It lists their paths."""
    # An array may also be deleted by its method `delete`, and JAX does not keep why it was.
    why = "is deleted"
    remedy = (
        "if it was donated, use what that call returned, or donate a copy (`ft.copy`) to keep it"
    )
    problems: list[Problem] = []
    for path, array in zip(paths, arrays, strict=True):
        if is_deleted(array):
            problems.append(array_problem(path, array, why, remedy))
    verb = "is" if len(problems) == 1 else "are"
    return FunctreeError(f"{name}: {count(len(problems), 'argument')} {verb} deleted", problems)
