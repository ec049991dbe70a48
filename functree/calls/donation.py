"""Donated arguments ─► an error by path, before one buffer is donated twice.

JAX 0.10 ends the process where an array on several devices is donated twice, and later versions raise in XLA's words.
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


def twice_by_identity(donated: Sequence[Any], kept: Sequence[Any]) -> bool:
    """Whether an array is donated twice, or donated and handed over beside it. Cheap enough for each call."""
    given = set(map(id, donated))
    return len(given) < len(donated) or not given.isdisjoint(map(id, kept))


def is_deleted(array: Any) -> bool:
    """Whether an array was donated to an earlier call."""
    return is_concrete(array) and array.is_deleted()


def refuse_deleted(name: str, paths: Sequence[Path], arrays: Sequence[Any]) -> FunctreeError:
    """The error for arguments of a function that were donated to an earlier call, by path."""
    why = "was donated to an earlier call, and is deleted"
    remedy = "use what that call returned; or do not donate it"
    pairs = zip(paths, arrays, strict=True)
    problems = [array_problem(path, array, why, remedy) for path, array in pairs if is_deleted(array)]
    return FunctreeError(f"{name}: {count(len(problems), 'argument')} deleted", problems)


def check_donated(
    name: str, paths: Sequence[Path], arrays: Sequence[Any], arguments: Arguments, by_buffer: bool
) -> None:
    """Raise for arrays that are donated and stand elsewhere too.

    Args:
        name: of the function.
        paths: of the arrays.
        arrays: of a call.
        arguments: which of them are donated.
        by_buffer: also find two arrays on one buffer, as `jax.device_put` makes them.

    Raises:
        FunctreeError: names both paths; or those of arrays that are deleted already, which have no buffer.
    """
    if by_buffer and any(map(is_deleted, arrays)):
        raise refuse_deleted(name, paths, arrays)
    first: dict[Any, tuple[Path, bool]] = {}
    problems: list[Problem] = []
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
    how = "both are donated" if donated else "it is donated there"
    why = f"is the same {what} as `{other}`, and {how}"
    return array_problem(path, array, why, "donate it once, or pass a copy (`jnp.copy`)")


def _places(array: Any, by_buffer: bool) -> list[Any]:
    """What tells an array: itself, or its buffers."""
    if not by_buffer:
        return [id(array)]
    if not is_concrete(array) or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return []
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in array.addressable_shards if shard.data.size]
