"""Rules that hold while tracing, without being handed on: `with ft.axis_rules(rules):`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import PartitionSpec

from functree.errors import ShardingError
from functree.layout.checks import spec_of_axes
from functree.layout.layouts import Layout, as_layout
from functree.layout.meshes import MeshView, current_mesh
from functree.layout.state_sharding import StateSharding
from functree.tree.axes import Axes

# A user context is part of the key of every trace: what was traced under some rules is not reused under others.
_RULES = jax.make_user_context(None)


@contextmanager
def axis_rules(rules: Any) -> Iterator[None]:
    """Make rules ambient for `constrain`, `spec` and the layers of `ft.nn`, while they are traced.

    Args:
        rules: `AxisRules`, or a composition that begins with them.

    Raises:
        RuleError: not a layout.

    Examples:
        >>> with ft.axis_rules(ft.AxisRules({"batch": "data", "embed": None})):
        ...     ft.spec("batch embed")
        P('data', None)
    """
    layout = None if rules is None else as_layout(rules)
    if isinstance(layout, StateSharding):
        # Its filters speak of a whole tree; what is laid out by ambient rules is one array, or one gradient.
        layout = layout.tolerant
    with _RULES(layout):
        yield


def ambient_rules() -> Layout | None:
    """The rules of the innermost `axis_rules`, or None."""
    return _RULES.value


def spec(axes: str | Axes) -> PartitionSpec:
    """The spec of an array with these axes, by the ambient rules: for JAX's `out_sharding=`.

    Args:
        axes: the names, as text or `Axes`.

    Raises:
        ShardingError: there are no ambient rules, or they do not place these axes.

    Examples:
        >>> with ft.axis_rules(ft.AxisRules({"batch": "data", "hidden": "model"})):
        ...     ft.spec("batch hidden")
        P('data', 'model')
    """
    rules = ambient_rules()
    if rules is None:
        raise ShardingError(
            "there are no ambient rules: enter `with ft.axis_rules(rules):` around the call that traces this"
        )
    mesh = current_mesh()
    view = None if mesh is None else MeshView(dict(mesh.shape), mesh)
    found = spec_of_axes(rules, Axes.of(axes), None, view)
    return found if mesh is None else without(found, set(getattr(mesh, "manual_axes", ())))


def without(spec: PartitionSpec, mesh_axes: set[str]) -> PartitionSpec:
    """A spec that leaves some mesh axes out."""

    def kept(entry: Any) -> Any:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        left = tuple(axis for axis in axes if axis not in mesh_axes)
        return None if not left else left[0] if len(left) == 1 else left

    return PartitionSpec(*map(kept, spec))
