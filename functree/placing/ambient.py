"""Ambient rules: used while a function is traced, without being passed to it (`with ft.axis_rules(rules):`)."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.errors import ShardingError
from functree.layout.layout import Layout, LayoutLike, as_layout
from functree.layout.meshes import current_mesh, mesh_view, traced_under
from functree.layout.placement import first_mesh
from functree.layout.specs import without
from functree.layout.validation import spec_of_axes
from functree.tree.axes import Axes

# A user context is part of the key of every trace that JAX caches. So JAX does not reuse under one set of rules what
# was traced under another, as it would with a plain `ContextVar`.
_RULES = jax.make_user_context(None)


@contextmanager
def axis_rules(rules: LayoutLike) -> Iterator[None]:
    """Make rules ambient for `constrain`, `spec` and the layers of `ft.nn`, while they are traced.

    Args:
        rules: a layout. Gradients are laid out by the whole of it. Activations, whose axes have names, are laid out
            by its `AxisRules` only: of a composition these, and of a `StateSharding` those of its last `...`.

    Raises:
        RuleError: `rules` is not a layout.

    Examples:
        >>> with ft.axis_rules(ft.AxisRules({"batch": "data", "embed": None})):
        ...     ft.spec("batch embed")
        P('data', None)
    """
    # The filters of a `StateSharding` were written for a whole tree. Ambient rules lay out a single array or gradient,
    # so a filter that matches nothing there is not an error.
    layout = None if rules is None else as_layout(rules).tolerant
    with _RULES(layout):
        yield


def ambient_rules() -> Layout | None:
    """The rules of the innermost `axis_rules`; None if there are none."""
    return _RULES.value


def ambient_axis_rules() -> Layout | None:
    """The `AxisRules` of the ambient rules, which lay out activations; None if they have none."""
    rules = ambient_rules()
    return None if rules is None else rules.by_axes


def spec(axes: str | Axes) -> PartitionSpec:
    """The spec of an array with these axes by the ambient rules, for example for JAX's `out_sharding=`.

    Args:
        axes: the names of the axes, as a string or `Axes`.

    Raises:
        ShardingError: there are no ambient rules, or they do not lay out these axes.

    Examples:
        >>> with ft.axis_rules(ft.AxisRules({"batch": "data", "hidden": "model"})):
        ...     ft.spec("batch hidden")
        P('data', 'model')
    """
    rules = ambient_axis_rules()
    if rules is None:
        raise ShardingError(
            "there are no ambient rules: enter `with ft.axis_rules(rules):`, with `AxisRules`, around the call that "
            "traces this"
        )
    mesh = current_mesh()
    view = None if mesh is None else mesh_view(mesh)
    found = spec_of_axes(rules, Axes.of(axes), None, view)
    if mesh is None:
        return found
    # Inside `shard_map` arrays are local along Manual axes, and JAX rejects a spec that names one.
    return without(found, set(getattr(mesh, "manual_axes", ())))


class Surroundings(NamedTuple):
    """The mesh and the rules that are ambient in a function's body.

    Attributes:
        mesh: the ambient mesh; None for the mesh of the arguments.
        rules: the ambient rules; None to leave those of the caller.
    """

    mesh: Mesh | AbstractMesh | None
    rules: Layout | None

    @contextmanager
    def entered(self, arrays: Sequence[Any]) -> Iterator[None]:
        """Make the mesh and the rules ambient, while the body is traced."""
        mesh = self.mesh if self.mesh is not None else first_mesh(arrays)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        with ExitStack() as stack:
            # Inside `shard_map` the ambient mesh has Manual axes, which our mesh does not have: keep it.
            if mesh is not None and not manual:
                stack.enter_context(traced_under(mesh))
            if self.rules is not None:
                stack.enter_context(axis_rules(self.rules))
            yield
