"""Donated arguments ─► an error with paths, before one buffer is donated twice.

If an array on several devices is donated twice, JAX 0.10 aborts the process. Later versions raise an error of XLA,
which has no paths.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from functree.calls.body import Arguments
from functree.errors import FunctreeError, Problem, count
from functree.layout.placement import is_concrete
from functree.tree.leaf import array_problem
from functree.tree.paths import Path


def twice_by_identity(arrays: Sequence[Any], arguments: Arguments) -> bool:
    """Whether an array is donated twice, or donated and also passed without donation. Fast enough for each call."""
    # Most calls have no array twice at all, donated or not, which is seen faster.
    if len(set(map(id, arrays))) == len(arrays):
        return False
    given = {id(arrays[i]) for i in arguments.donated}
    return len(given) < len(arguments.donated) or not given.isdisjoint([id(arrays[i]) for i in arguments.kept])


def is_deleted(array: Any) -> bool:
    """Whether an array is deleted, because it was donated to an earlier call or by its method `delete`."""
    return is_concrete(array) and array.is_deleted()


def refuse_deleted(name: str, paths: Sequence[Path], arrays: Sequence[Any]) -> FunctreeError:
    """The error for arrays that are deleted. It lists their paths."""
    # An array may also be deleted by its method `delete`, and JAX does not keep why it was.
    why = "is deleted"
    remedy = "if it was donated, use what that call returned, or donate a copy (`ft.copy`) to keep it"
    pairs = zip(paths, arrays, strict=True)
    problems = [array_problem(path, array, why, remedy) for path, array in pairs if is_deleted(array)]
    verb = "is" if len(problems) == 1 else "are"
    return FunctreeError(f"{name}: {count(len(problems), 'argument')} {verb} deleted", problems)


def check_donated(
    name: str, paths: Sequence[Path], arrays: Sequence[Any], arguments: Arguments, by_buffer: bool
) -> None:
    """Raise FunctreeError if an array is donated twice, or donated and also passed without donation.

    Args:
        name: the name of the function.
        paths: the paths of the arrays.
        arrays: the arrays of a call.
        arguments: which of them are donated.
        by_buffer: whether to find different arrays with one buffer too, as `jax.device_put` makes them.

    Raises:
        FunctreeError: such an array has two paths, which the error lists; or an array is deleted.
    """
    # The buffers of a deleted array cannot be read.
    if by_buffer and any(map(is_deleted, arrays)):
        raise refuse_deleted(name, paths, arrays)
    first: dict[Any, tuple[Path, bool]] = {}
    problems: list[Problem] = []
    # The donated arrays first: a kept array is a problem only if a donated one has the same buffer.
    for i, donated in [(i, True) for i in arguments.donated] + [(i, False) for i in arguments.kept]:
        for place in _places(arrays[i], by_buffer):
            other, other_donated = first.setdefault(place, (paths[i], donated))
            if other != paths[i] and other_donated:
                problems.append(_twice(paths[i], arrays[i], other, donated, by_buffer))
                break
    if problems:
        verb = "is" if len(problems) == 1 else "are"
        raise FunctreeError(f"{name}: {count(len(problems), 'array')} {verb} donated twice", problems)


def _twice(path: Path, array: Any, other: Path, donated: bool, by_buffer: bool) -> Problem:
    what = "buffer" if by_buffer else "array"
    how = "both are donated" if donated else "that one is donated"
    why = f"is the same {what} as `{other}`, and {how}"
    return array_problem(path, array, why, "donate it once, or pass a copy (`ft.copy`)")


def _places(array: Any, by_buffer: bool) -> list[Any]:
    """What identifies an array: its id, or its buffers."""
    if not by_buffer:
        return [id(array)]
    # A traced array has no buffer, and neither has an array of keys by JAX's public functions.
    if not is_concrete(array) or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return []
    shards = [shard for shard in array.addressable_shards if shard.data.size]
    places = [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards]
    # On a CPU, `jax.device_put` of an aligned NumPy array copies nothing. JAX does not overwrite such foreign memory,
    # so two arrays may be over it. It is known by shards of one array that share it: JAX's own is of one device.
    is_foreign = len({pointer for _, pointer in places}) < len(places)
    return [] if is_foreign else places
