"""Donated arguments ─► an error by path, before one buffer is given away twice.

JAX 0.10 ends the process where an array on several devices is donated twice, and later versions raise in XLA's words.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from functree.errors import FunctreeError, Problem, count
from functree.transforms.jit.program import Program
from functree.tree.leaf import array_text
from functree.tree.paths import Path


def twice_by_identity(donated: Sequence[Any], kept: Sequence[Any]) -> bool:
    """Whether an array is donated twice, or donated and handed over beside it. Cheap enough for each call."""
    given = set(map(id, donated))
    return len(given) < len(donated) or not given.isdisjoint(map(id, kept))


def is_gone(array: Any) -> bool:
    """Whether an array was donated to an earlier call."""
    return isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted()


def refuse_deleted(program: Program, arrays: Sequence[Any]) -> None:
    """Raise for arguments that an earlier call was given to keep.

    Raises:
        FunctreeError: their paths.
    """
    why = "was donated to an earlier call, and is gone"
    remedy = "go on with what that call returned; or do not donate it"
    pairs = zip(program.structure.paths, arrays, strict=True)
    problems = [Problem(p, tuple(x.shape), array_text(x), why, remedy) for p, x in pairs if is_gone(x)]
    raise FunctreeError(f"{program.signature.name}: {count(len(problems), 'argument')} no longer there", problems)


def refuse_twice(program: Program, arrays: Sequence[Any], by_buffer: bool) -> None:
    """Raise for arrays that are donated and stand elsewhere too.

    Args:
        program: to be called.
        arrays: its arguments.
        by_buffer: also find two arrays on one buffer, as `jax.device_put` makes them.

    Raises:
        FunctreeError: names both paths; or those of arrays that are gone already, which have no buffer.
    """
    if by_buffer and any(map(is_gone, arrays)):
        refuse_deleted(program, arrays)
    paths, groups = program.structure.paths, program.groups
    first: dict[Any, tuple[Path, bool]] = {}
    problems = []
    for i, given in [(i, True) for i in groups.donated] + [(i, False) for i in groups.kept]:
        path, array = paths[i], arrays[i]
        for place in _places(array, by_buffer):
            other, other_given = first.setdefault(place, (path, given))
            if other != path and other_given:
                how = "is donated there" if not given else "both are donated"
                why = f"is the same {'buffer' if by_buffer else 'array'} as `{other}`, and {how}"
                remedy = "donate it once, or hand over a copy (`jnp.copy`)"
                problems.append(Problem(path, tuple(array.shape), array_text(array), why, remedy))
                break
    if problems:
        name = program.signature.name
        raise FunctreeError(f"{name}: {count(len(problems), 'array')} would be given away twice", problems)


def _places(array: Any, by_buffer: bool) -> list[Any]:
    if not by_buffer:
        return [id(array)]
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or _key(array):
        return []
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in array.addressable_shards if shard.data.size]


def _key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.extended)
