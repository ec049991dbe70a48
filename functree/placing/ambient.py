"""`with ft.axis_rules(rules):` makes rules ambient, so that traced functions can find them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.devices.meshes import current_mesh, mesh_view, traced_under, tracing
from functree.devices.placement import first_mesh
from functree.devices.specs import without
from functree.errors import ShardingError
from functree.layout.layout import Layout, LayoutLike, as_layout
from functree.layout.rules import spec_of_axes
from functree.tree.axes import Axes

# The rules of the current asyncio task, or of the thread outside any task.
_RULES: ContextVar[Layout | None] = ContextVar("functree.axis_rules", default=None)

# A user context is part of the key of every trace that JAX caches, so JAX does not reuse a trace
# under different rules. Each thread has one value of the context: the most recently entered rules
# that no task has left.
_OF_THREAD = jax.make_user_context(None)


class _RuleStack(threading.local):
    """The rules that the tasks of this thread have entered, in order."""

    def __init__(self) -> None:
        self.rules: list[list[Layout | None]] = []


_STACK = _RuleStack()


@contextmanager
def axis_rules(rules: LayoutLike) -> Iterator[None]:
    """Make rules ambient, so that `constrain`, `spec` and `ft.nn` use them when they are traced.

    Args:
        rules: a layout, or None for no rules. The whole layout applies to gradients, but only its
            `AxisRules` apply to activations. In a `StateSharding`, these are the `AxisRules` of its
            final `...`.

    Raises:
        RuleError: if `rules` is not a layout.

    Examples:
        >>> with ft.axis_rules(ft.AxisRules({"batch": "data", "embed": None})):
        ...     ft.spec("batch embed")
        P('data', None)
    """
    layout = None if rules is None else as_layout(rules)
    before, entry = _RULES.get(), [layout]
    try:
        _RULES.set(layout)
        _STACK.rules.append(entry)
        _tell_jax()
        yield
    finally:
        _RULES.set(before)
        # Entries are compared by identity: another task may have entered equal rules meanwhile.
        _STACK.rules[:] = [other for other in _STACK.rules if other is not entry]
        _tell_jax()


def _tell_jax() -> None:
    """Make the rules that were entered last the rules of the thread."""
    # JAX's contexts must be left in reverse order, which tasks may not follow. The context is
    # therefore only entered, and never left.
    last = _STACK.rules[-1][0] if _STACK.rules else None
    _OF_THREAD(last).__enter__()


def ambient_rules() -> Layout | None:
    """Return the rules of the innermost `axis_rules` of this task, or None if there are none.

    Raises:
        ShardingError: if JAX would cache the current trace under the rules of another task.
    """
    rules = _RULES.get()
    if rules is not _OF_THREAD.value and rules != _OF_THREAD.value and tracing():
        raise ShardingError(
            "another asyncio task of this thread is in `ft.axis_rules`, or this thread was started "
            "in such a block, so `jax.jit` would cache this trace under the wrong rules: "
            "use `ft.jit(rules=...)`, or leave `ft.axis_rules` before `await`"
        )
    return rules


def has_axis_rules() -> bool:
    """Return whether the ambient layout has `AxisRules`, which apply to activations."""
    rules = ambient_rules()
    return rules is not None and rules.rules is not None


def spec(axes: str | Axes) -> PartitionSpec:
    """Return the ambient rules' spec for these axes, for example for JAX's `out_sharding=`.

    Args:
        axes: the names of the axes, as a string or `Axes`.

    Raises:
        ShardingError: if there are no ambient `AxisRules`.
        ShardingError: if the rules do not lay out these axes.

    Examples:
        >>> with ft.axis_rules(
        ...     ft.AxisRules({"batch": "data", "hidden": "model"})
        ... ):
        ...     ft.spec("batch hidden")
        P('data', 'model')
    """
    rules = ambient_rules()
    if rules is None or rules.rules is None:
        raise ShardingError(
            "spec: there are no ambient `AxisRules`: enter `with ft.axis_rules(rules):` around the "
            "function that calls `ft.spec`"
        )
    mesh = current_mesh()
    if mesh is None:
        return spec_of_axes(rules, Axes.of(axes), None, None)
    found = spec_of_axes(rules, Axes.of(axes), None, mesh_view(mesh))
    # Inside `shard_map`, JAX rejects a spec that names a Manual mesh axis.
    return without(found, set(getattr(mesh, "manual_axes", ())))


class Surroundings(NamedTuple):
    """The mesh and the rules that are ambient in a function's body.

    Attributes:
        mesh: the ambient mesh; None for the mesh of the arguments.
        rules: the function's rules, or otherwise the caller's ambient rules.
    """

    mesh: Mesh | AbstractMesh | None
    rules: Layout | None

    @contextmanager
    def entered(self, arrays: Sequence[Any]) -> Iterator[None]:
        """Make the mesh and the rules ambient while the body is traced."""
        mesh = self.mesh if self.mesh is not None else first_mesh(arrays)
        # Inside `shard_map`, keep the ambient mesh: its Manual mesh axes are not Manual in `mesh`.
        if mesh is None or jax.sharding.get_abstract_mesh().manual_axes:
            with axis_rules(self.rules):
                yield
        else:
            with traced_under(mesh), axis_rules(self.rules):
                yield
