"""A tree of arrays ─► its short forms: how the arrays are sharded now, in a notebook and as text.

They read shapes and shardings only, never values: also of arrays that are donated, or traced.
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
    """A module that a notebook shows as the plan of its arrays: how they are sharded now."""

    def _repr_html_(self) -> str | None:
        return notebook_html(self)


def notebook_html(tree: Tree) -> str | None:
    """A tree as HTML for a notebook; None if it holds no arrays, or specs.

    That is treescope's if it is what the notebook shows objects with, and then each array has its
    axes and its sharding as a comment.
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
    """The module of treescope if IPython shows all objects with it."""
    # Whoever has not imported both shows nothing with them.
    ipython, treescope = sys.modules.get("IPython"), sys.modules.get("treescope")
    if ipython is None or treescope is None:
        return None
    shell = ipython.get_ipython()
    if shell is None:
        return None
    formatter = shell.display_formatter.formatters["text/html"]
    # `treescope.basic_interactive_setup` sets this; it leaves objects with a form of their own,
    # such as ours, to that.
    name = getattr(formatter.type_printers.get(object), "__module__", "")
    return treescope if name.split(".")[0] == "treescope" else None


def treescope_html(treescope: Any, tree: Tree, shown: Plan) -> str:
    """A tree as treescope shows it, with the axes and the sharding of each array as a comment.

    Args:
        treescope: its module.
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
    # Not what adds the `_repr_html_` of objects to them: this is ours.
    added = treescope.handlers.append_repr_html_when_present
    hooks = [with_axes, *(hook for hook in renderer.wrapper_hooks if hook is not added)]
    renderer = dataclasses.replace(renderer, wrapper_hooks=hooks)
    with treescope.active_renderer.set_scoped(renderer):
        return treescope.render_to_html(tree)


def short_text(tree: Tree) -> str | None:
    """The fields of a module, one in each line, with what they hold and how many bytes; None if the
    tree holds no arrays, or specs."""
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
    """The plan of a tree as it is sharded now, as text; None if the tree holds no arrays, or
    specs."""
    if not _is_of_arrays(tree):
        return None
    return str(plan(tree))


def _field_text(value: Tree) -> str:
    if value is None:
        return "None"
    if is_array(value):
        return array_text(value)
    arrays = [leaf for leaf in jax.tree.leaves(value) if is_array(leaf)]
    size = sum(math.prod(one.shape) * one.dtype.itemsize for one in arrays)
    return f"{type(value).__name__} of {count(len(arrays), 'array')}, {bytes_text(size)}"
