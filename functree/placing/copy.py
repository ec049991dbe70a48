"""Arrays ─► copies of them, placed alike."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from functree.devices.deleted import is_deleted, refuse_deleted
from functree.labels.leaves import read

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
    values = [leaf.value for leaf in leaves.leaves]
    if any(map(is_deleted, values)):
        raise refuse_deleted("copy", [leaf.path for leaf in leaves.leaves], values)
    copies = {id(value): _copy(value) for value in values}
    return leaves.skeleton.fill(copies[id(value)] for value in values)


def _copy(value: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    return jnp.copy(value) if isinstance(value, jax.Array) else np.copy(value)
