"""Arrays ─► copies of them, placed alike."""

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
    """Copy the arrays of a tree where they lie, so that the original outlives a donation.

    Args:
        tree: arrays in modules and containers. Values that are not arrays stay as they are, and so
            do `jax.ShapeDtypeStruct`s.
        untie: whether an array that is at several places of the tree becomes one array for each of
            them. A step can then donate the tree; from there on, each place has its own values.

    Returns:
        The same tree with arrays of the same values and shardings, none of which shares memory with
            the original. An array that is at two places of the tree stays one array, unless they
            are untied.

    Raises:
        FunctreeError: an array is deleted; the message has its path.

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
    if untie is not False:
        check("no tree can be copied", untie=(untie, FLAG))
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
