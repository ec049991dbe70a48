"""Weights, and where each is created ─► their arrays, which are the same in all processes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from functree.errors import FunctreeError
from functree.io.casts import Loss, warn_of_losses
from functree.io.extras import ForeignErrors
from functree.io.weights.blocks import Weight
from functree.io.weights.files import Tensor
from functree.processes.agreement import Agreement
from functree.processes.check_processes import checksum
from functree.processes.digest import digests_of


class Created(NamedTuple):
    """A weight, and how its array is created.

    Attributes:
        weight: the weight.
        sharding: where its array is created; None for an array of numpy.
        dtype: the dtype of its array; None for that of the files.
    """

    weight: Weight
    sharding: Sharding | None
    dtype: DTypeLike | None


def read_arrays(
    where: object, created: Sequence[Created], tensors: Mapping[str, Tensor], remedy: str
) -> list[jax.Array | np.ndarray]:
    """The arrays of some weights. All processes call this, with the same weights.

    Args:
        where: what they are read from, for messages.
        created: the weights.
        tensors: all tensors, by name.
        remedy: what to do about values that a dtype does not hold.

    Raises:
        FunctreeError: a file cannot be read; or the processes have read other values.
    """
    arrays: list[jax.Array | np.ndarray] = []
    losses: list[Loss] = []
    failure = f"{where}: no weights are loaded"
    with Agreement(failure), ForeignErrors(FunctreeError, f"{where}: the weights cannot be read"):
        for weight, sharding, dtype in created:
            array, loss = weight.array(tensors, sharding, dtype)
            arrays.append(array)
            losses.append(loss)
    with Agreement(failure):  # it is an error where the user makes warnings errors
        warn_of_losses(where, losses, remedy)
    # Each process has read its own files: copies of one part may have come from different ones.
    # With one process there is nothing to compare, and the digests would read all of the model.
    if jax.process_count() > 1:
        paths = [str(one.weight.path) for one in created]
        _, differ = digests_of(
            dict(zip(paths, arrays, strict=True)), "give all processes the same files"
        )
        if differ:
            raise FunctreeError(f"{where}: the processes read other weights", differ)
    return arrays


def beginnings(tensors: Mapping[str, Tensor]) -> list[str]:
    """How each tensor begins, by which files of another model are told from these.

    Raises:
        FunctreeError: one cannot be read.
    """
    # Each machine may have files of its own: of another model of the same shapes, perhaps. Its
    # devices would be given parts of that one.
    found: list[str] = []
    with ForeignErrors(FunctreeError, "the weights cannot be read"):
        for name, tensor in tensors.items():
            found.append(f"{name} begins with {checksum(tensor.beginning()):08x}")
    return sorted(found)
