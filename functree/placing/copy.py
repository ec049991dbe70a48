"""Arrays ─► copies of them, placed alike."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from functree.devices.deleted import is_deleted, refuse_deleted
from functree.labels.leaves import read
from functree.tree.arrays import AnyArray

T = TypeVar("T")


def copy(tree: T) -> T:
    """Copy the arrays of a tree where they lie, so that the original outlives a donation.

    Args:
        tree: arrays in modules and containers. Values that are not arrays stay as they are, and so
            do `jax.ShapeDtypeStruct`s.

    Returns:
        The same tree with arrays of the same values and shardings, none of which shares memory with
            the original. An array that is at two places of the tree stays one array.

    Raises:
        FunctreeError: an array is deleted; the message has its path.

    Examples:
        >>> step = ft.jit(lambda state: {"w": state["w"] + 1}, donate="state")
        >>> base = {"w": jnp.zeros(2)}
        >>> tuned = step(ft.copy(base))
        >>> base["w"].tolist(), tuned["w"].tolist()
        ([0.0, 0.0], [1.0, 1.0])
    """
    leaves = read(tree)
    values = leaves.values
    if any(map(is_deleted, values)):
        raise refuse_deleted("copy", leaves.paths, values)
    copies = {id(value): _copy(value) for value in values}
    return leaves.skeleton.fill(copies[id(value)] for value in values)


def _copy(value: AnyArray) -> AnyArray:
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    if isinstance(value, jax.Array):
        return jnp.copy(value)
    return np.copy(value)
