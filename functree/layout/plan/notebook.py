"""`notebook_html` and `short_text` show how the arrays of a tree are sharded now.

They read only shapes and shardings, so they accept donated and traced arrays.
"""

import dataclasses
import math
import sys
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from functree.errors import count
from functree.labels.leaves import read
from functree.layout.plan.make_plan import plan
from functree.layout.plan.plan import Plan
from functree.layout.plan.row import array_of
from functree.report.table import bytes_text
from functree.tree.arrays import Tree, array_text, is_array
from functree.tree.nodes import children


class ShownByPlan:
    """Base class of modules that a notebook shows as a plan of their current sharding."""

    def _repr_html_(self) -> str | None:
        return notebook_html(self)


def notebook_html(tree: Tree) -> str | None:
    """Render a tree as HTML for a notebook. Return None if it has no arrays, or contains specs.

    If the notebook shows objects with treescope, so does this function, with each array's axes and
    sharding in a comment.
    """
    if not _is_of_arrays(tree):
        return None
    shown = plan(tree)
    treescope = _active_treescope()
    if treescope is not None:
        return treescope_html(treescope, tree, shown)
    return shown._repr_html_()


def _is_of_arrays(tree: Tree) -> bool:
    leaves = jax.tree.leaves(tree)
    return any(map(is_array, leaves)) and not any(isinstance(x, Sharding | P) for x in leaves)


def _active_treescope() -> Any | None:
    """Return the module treescope if IPython uses it to show all objects; otherwise None."""
    # Unless IPython and treescope are both imported, treescope is not active.
    ipython, treescope = sys.modules.get("IPython"), sys.modules.get("treescope")
    if ipython is None or treescope is None:
        return None
    shell = ipython.get_ipython()
    if shell is None:
        return None
    formatter = shell.display_formatter.formatters["text/html"]
    # `treescope.basic_interactive_setup` sets this printer. Objects with `_repr_html_` keep their
    # own HTML.
    name = getattr(formatter.type_printers.get(object), "__module__", "")
    return treescope if name.split(".")[0] == "treescope" else None


def treescope_html(treescope: Any, tree: Tree, shown: Plan) -> str:
    """Render a tree with treescope, with each array's axes and sharding in a comment.

    Args:
        treescope: the module.
        tree: the tree.
        shown: the plan of the tree.
    """
    texts: dict[int, str] = {}
    for leaf, row in zip(read(tree).leaves, shown.rows, strict=True):
        names = f" {row.axes}" if any(row.axes) else ""
        texts[id(leaf.value)] = f"{array_of(row)}{names}"
    parts = treescope.rendering_parts

    def with_axes(node: object, path: str | None, node_renderer: Any) -> Any:
        text = texts.get(id(node))
        if text is None:
            return NotImplemented
        rendered = node_renderer(node, path=path)
        comment = parts.comment_color(parts.text(f"  # {text}"))
        return parts.RenderableAndLineAnnotations(
            rendered.renderable, parts.siblings(rendered.annotations, comment)
        )

    renderer = treescope.active_renderer.get()
    # The handler that appends an object's `_repr_html_` is dropped, since functree defines it here.
    added = treescope.handlers.append_repr_html_when_present
    hooks = [with_axes, *(hook for hook in renderer.wrapper_hooks if hook is not added)]
    renderer = dataclasses.replace(renderer, wrapper_hooks=hooks)
    with treescope.active_renderer.set_scoped(renderer):
        return treescope.render_to_html(tree)


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
