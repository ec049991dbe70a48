"""`ShownByPlan` and `short_text` show how the arrays of a tree are sharded now.

They read only shapes and shardings, so they accept donated and traced arrays.
"""

import math

import jax
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from functree.errors import count
from functree.layout.plan.make_plan import plan
from functree.report.table import bytes_text
from functree.tree.arrays import Tree, array_text, is_array
from functree.tree.nodes import children


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
    """Return a module's fields, one per line, with their content and bytes.

    Return None if the tree contains no arrays, or contains specs.
    """
    if not _is_of_arrays(tree):
        return None
    shown = plan(tree)
    size = bytes_text(shown.total_bytes)
    head = f"{type(tree).__name__} of {count(len(shown), 'array')}, {size}"
    if shown.sizes:
        head += f", on the mesh {shown.view}"
    lines = [head]
    for name, value in children(tree) or ():
        lines.append(f"  {name}: {_field_text(value)}")
    return "\n".join(lines)


def table_text(tree: Tree) -> str | None:
    """Return the plan of a tree's current sharding as text.

    Return None if the tree contains no arrays, or contains specs.
    """
    if not _is_of_arrays(tree):
        return None
    return str(plan(tree))


def _field_text(value: Tree) -> str:
    if value is None:
        return "None"
    if is_array(value):
        return array_text(value)
    arrays = [leaf for leaf in jax.tree.leaves(value) if is_array(leaf)]
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    return f"{type(value).__name__} of {count(len(arrays), 'array')}, {bytes_text(size)}"
