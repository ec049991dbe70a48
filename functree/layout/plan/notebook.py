"""`ShownByPlan` and `short_text` show how the arrays of a tree are sharded now.

They read only shapes and shardings, so they accept donated and traced arrays.
"""

import jax
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from functree.errors import count
from functree.layout.plan.make_plan import plan
from functree.report.table import bytes_text
from functree.tree.arrays import Tree, is_array


class ShownByPlan:
    """Base class of modules that a notebook shows as a plan of their current sharding."""

    def _repr_html_(self) -> str | None:
        """Render the module as HTML, or return None if it has no arrays, or contains specs."""
        if not _is_of_arrays(self):
            return None
        return plan(self)._repr_html_()


def _is_of_arrays(tree: Tree) -> bool:
    leaves = jax.tree.leaves(tree)
    return any(map(is_array, leaves)) and not any(isinstance(x, Sharding | P) for x in leaves)


def short_text(tree: Tree) -> str | None:
    """Return a line with a tree's class, the number of its arrays, their bytes, and the mesh.

    Return None if the tree contains no arrays, or contains specs.
    """
    if not _is_of_arrays(tree):
        return None
    shown = plan(tree)
    size = bytes_text(shown.total_bytes)
    text = f"{type(tree).__name__} of {count(len(shown), 'array')}, {size}"
    if shown.sizes:
        text += f", on the mesh {shown.view}"
    return text


def table_text(tree: Tree) -> str | None:
    """Return the plan of a tree's current sharding as text.

    Return None if the tree contains no arrays, or contains specs.
    """
    if not _is_of_arrays(tree):
        return None
    return str(plan(tree))
