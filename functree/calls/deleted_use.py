"""An error of JAX about a deleted array ─► an error with the paths of those that a function uses.

A function may close over an array that was donated to another one. Whether it uses that array is
known only when it runs, or when its trace is lowered, and there JAX's error has no path.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from functree.calls.closures import held_at_any_depth, variables_of
from functree.calls.signature import AnyFunction, Args, Kwargs, inspected
from functree.devices.placement import is_deleted, refuse_deleted
from functree.tree.arrays import AnyArray
from functree.tree.paths import Path

_MESSAGE = "Array has been deleted"  # the beginning of JAX's message
_CLOSED_OVER = "is deleted, and the function closes over it"


@contextmanager
def naming_deleted(
    name: str, fun: AnyFunction, args: Args = (), kwargs: Kwargs | None = None
) -> Iterator[None]:
    """A context in which the error about a deleted array has the paths of those that `fun` uses.

    Args:
        name: what runs in the context, for the message.
        fun: the function that it runs.
        args: the arguments of the function, if these were not checked before; and so `kwargs`.

    Raises:
        FunctreeError: a deleted array is used, and it is an argument, or `fun` closes over it.
    """
    try:
        yield
    except RuntimeError as error:
        if is_about_deleted(error):
            given = inspected(fun).bind_partial(*args, **(kwargs or {})).arguments
            # Without those that are alive.
            gone = _deleted(given)
            check_use(error, name, fun, list(gone), list(gone.values()), whole=False)
        raise


def is_about_deleted(error: Exception) -> bool:
    """Whether an error of JAX is about an array that is deleted."""
    return str(error).startswith(_MESSAGE)


def check_use(
    error: Exception,
    name: str,
    fun: AnyFunction,
    paths: Sequence[Path],
    arrays: Sequence[AnyArray],
    *,
    whole: bool = True,
) -> None:
    """Raise FunctreeError for a deleted array, if it is found.

    Args:
        error: the error of JAX.
        name: what was run, for the message.
        fun: the function that was run.
        paths: the paths of its arguments.
        arrays: its arguments.
        whole: whether these are all of them, and not only those that are deleted.
    """
    if any(map(is_deleted, arrays)):
        raise refuse_deleted(name, paths, arrays, whole=whole) from error
    found = _deleted(variables_of(fun))
    if found:
        values = list(found.values())
        # Of a tree that is held, others may be alive.
        raise refuse_deleted(
            name, list(found), values, "array", _CLOSED_OVER, whole=False
        ) from error


def _deleted(variables: Mapping[str, Any]) -> dict[Path, Any]:
    """The deleted arrays in some variables, and in those of functions among them."""
    found: dict[Path, Any] = {}
    for path, value in held_at_any_depth(variables, with_globals=True):
        if is_deleted(value):
            found[path] = value
    return found
