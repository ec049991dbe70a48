"""`ft.copy` copies arrays: a tree ─► new arrays with the same values and shardings."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from functree.argument_checks import FLAG, check
from functree.devices.placement import check_deleted
from functree.labels.leaves import read
from functree.tree.arrays import AnyArray

T = TypeVar("T")


def copy(tree: T, *, untie: bool = False) -> T:
    """Copy the arrays of a tree on their devices, so that a step can donate the copy.

    Args:
        tree: arrays in modules and containers. Other values stay as they are, and so do
            `jax.ShapeDtypeStruct`s.
        untie: whether an array at several paths becomes a separate array at each path. A step can
            then donate the tree, and the values at these paths may diverge.

    Returns:
        The tree with new arrays, which have the same values and shardings but share no memory with
            the original. An array at two paths stays one array, unless `untie` is true.

    Raises:
        FunctreeError: if an array is deleted. The message names its path.

    Examples:
        >>> step = ft.jit(lambda state: {"w": state["w"] + 1}, donate="state")
        >>> base = {"w": jnp.zeros(2)}
        >>> tuned = step(ft.copy(base))
        >>> base["w"].tolist(), tuned["w"].tolist()
        ([0.0, 0.0], [1.0, 1.0])
        >>> tied = {"embed": base["w"], "unembed": base["w"]}
        >>> both = ft.copy(tied, untie=True)
        >>> both["embed"] is both["unembed"]
        False
    """
    check("copy: invalid arguments", untie=(untie, FLAG))
    leaves = read(tree)
    values = leaves.values
    check_deleted("copy", tree)
    if untie:
        return leaves.skeleton.fill(map(_copy, values))
    copies = {id(value): _copy(value) for value in values}
    return leaves.skeleton.fill(copies[id(value)] for value in values)


def _copy(value: AnyArray) -> AnyArray:
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    if isinstance(value, jax.Array):
        return jnp.copy(value)
    return np.copy(value)
