"""`current_plan` shows how the arrays of a tree are sharded now, for notebooks.

It reads only shapes and shardings, so it accepts donated and traced arrays.
"""

import jax
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from functree.errors import count
from functree.layout.decide import plan
from functree.layout.plan.plan import Plan
from functree.report.table import bytes_text
from functree.tree.arrays import Tree, is_array


class ShownByPlan:
    """Base class of modules that a notebook shows as a plan of their current sharding."""

    def _repr_html_(self) -> str | None:
        """Render the module as HTML, or return None if it has no arrays, or contains specs."""
        shown = current_plan(self)
        return None if shown is None else shown._repr_html_()


def current_plan(tree: Tree) -> Plan | None:
    """Return the plan of a tree's current sharding.

    Return None if the tree contains no arrays, or contains specs.
    """
    leaves = jax.tree.leaves(tree)
    if not any(map(is_array, leaves)) or any(isinstance(x, Sharding | P) for x in leaves):
        return None
    return plan(tree)


def short_text(tree: Tree) -> str | None:
    """Return a line with a tree's class, the number of its arrays, their bytes, and the mesh.

    Return None if the tree contains no arrays, or contains specs.
    """
    shown = current_plan(tree)
    if shown is None:
        return None
    size = bytes_text(shown.total_bytes)
    text = f"{type(tree).__name__} of {count(len(shown), 'array')}, {size}"
    if shown.sizes:
        text += f", on the mesh {shown.view}"
    return text
