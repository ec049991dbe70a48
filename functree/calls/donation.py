"""Donated arguments ─► an error with paths, if one buffer is donated twice.

If an array on several devices is donated twice, JAX 0.10 aborts the process. Later versions raise
an error of XLA, which has no paths.
"""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from functree.calls.body import Arguments
from functree.devices.placement import is_concrete, is_deleted, refuse_deleted
from functree.errors import FunctreeValueError, Problem, count
from functree.labels.leaf import array_problem
from functree.tree.arrays import AnyArray
from functree.tree.paths import Path


def twice_by_identity(arrays: Sequence[AnyArray], arguments: Arguments) -> bool:
    """Whether an array is donated twice, or donated and also passed without donation. Fast enough
    for each call."""
    # Most calls have no array twice at all, donated or not, which is seen faster.
    if len(set(map(id, arrays))) == len(arrays):
        return False
    donated = {id(arrays[i]) for i in arguments.donated}
    if len(donated) < len(arguments.donated):
        return True
    return any(id(arrays[i]) in donated for i in arguments.kept)


def check_donated(
    name: str,
    paths: Sequence[Path],
    arrays: Sequence[AnyArray],
    arguments: Arguments,
    by_buffer: bool,
) -> None:
    """Raise FunctreeError if an array is donated twice, or donated and also passed without
    donation.

    Args:
        name: the name of the function.
        paths: the paths of the arrays.
        arrays: the arrays of a call.
        arguments: which of them are donated.
        by_buffer: whether to find different arrays with one buffer too, as `jax.device_put` makes
            them.

    Raises:
        FunctreeError: such an array has two paths, which the error lists; or an array is deleted.
    """
    donated = set(arguments.donated)
    # The buffers of a deleted array cannot be read.
    if by_buffer and any(map(is_deleted, arrays)):
        raise refuse_deleted(name, paths, arrays)
    owners: dict[Hashable, int] = {}  # the index of the first array with an identity
    problems: list[Problem] = []
    # The donated arrays first: a kept array is a problem only if a donated one has the same buffer.
    for i in (*arguments.donated, *arguments.kept):
        for identity in _identities(arrays[i], by_buffer):
            owner = owners.setdefault(identity, i)
            if owner == i or owner not in donated:
                continue
            what = "buffer" if by_buffer else "array"
            how = "both are donated" if i in donated else "that one is donated"
            why = f"is the same {what} as `{paths[owner]}`, and {how}"
            # An untied copy, since the two may be in one argument.
            copy = f"`ft.copy({paths[i][0]}, untie=True)`"
            remedy = f"donate it once, or pass {copy}, where each place has an array of its own"
            problems.append(array_problem(paths[i], arrays[i], why, remedy))
            break
    if problems:
        verb = "is" if len(problems) == 1 else "are"
        raise FunctreeValueError(
            f"{name}: {count(len(problems), 'array')} {verb} donated twice", problems
        )


def _identities(array: AnyArray, by_buffer: bool) -> Sequence[Hashable]:
    """What identifies an array: its id, or its buffers."""
    if not by_buffer:
        return [id(array)]
    # A traced array has no buffer, and neither has an array of keys by JAX's public functions.
    if not is_concrete(array) or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return []
    # Nothing of an empty shard is overwritten, so two arrays may share it.
    shards = [shard for shard in array.addressable_shards if shard.data.size]
    buffers = [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards]
    # On a CPU, `jax.device_put` of an aligned NumPy array copies nothing. JAX does not overwrite
    # such foreign memory, so two arrays may be over it. It is known by shards of one array that
    # share it: JAX's own is of one device.
    if len({pointer for _, pointer in buffers}) < len(buffers):
        return []
    return buffers
