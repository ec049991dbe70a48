"""A leaf ─► why its values cannot be written to a file."""

from typing import Any

import jax
from jax.core import Tracer

from functree.errors import Problem
from functree.processes.agreement import named
from functree.tree.leaf import Leaf


def not_saveable(leaf: Leaf) -> Problem | None:
    """Why the values of an array cannot be saved; None if they can."""
    value = leaf.value
    if isinstance(value, Tracer):
        return leaf.problem("is traced, and has no values yet", "save outside of jit")
    if isinstance(value, jax.ShapeDtypeStruct):
        return leaf.problem("is abstract, and has no values", "save the tree that was made, not its `ft.abstract`")
    if isinstance(value, jax.Array) and value.is_deleted():
        return leaf.problem("was donated, and has no values any more", "save the state that the step returned")
    if (where := partly(value)) is not None:
        return leaf.problem(where, "place it for all processes: `ft.shard(tree, ft.P(), mesh)`")
    return None


def partly(value: Any) -> str | None:
    """Why an array, or a sharding, is not one of all processes; None if it is."""
    sharding = getattr(value, "sharding", value)
    if jax.process_count() == 1 or not isinstance(sharding, jax.sharding.Sharding):
        return None
    there = sorted({device.process_index for device in sharding.device_set})
    if len(there) == jax.process_count():
        return None
    return f"is only on devices of {named(there)}, and there are {jax.process_count()}"
