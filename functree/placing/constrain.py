"""`ft.constrain` constrains traced arrays to the shardings of a layout.

`with ft.axis_rules(rules):` makes rules ambient, so that traced functions can find them.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.argument_checks import check_tree
from functree.devices.constraint import with_constraint
from functree.devices.meshes import (
    MeshView,
    current_mesh,
    devices_along,
    local_view,
    mesh_axes,
    mesh_view,
    traced_under,
    tracing,
    without,
)
from functree.devices.placement import check_deleted, first_mesh
from functree.errors import AxesError, Problem, ShardingError, count, users_frame, warn
from functree.layout.decide import decide_parts
from functree.layout.decision import Decision, refuse
from functree.layout.layout import Layout, LayoutLike, LayoutTree, as_layout, own_meshes, read_for
from functree.layout.rules import activation, activation_spec, spec_of_axes
from functree.tree.arrays import AnyArray, is_array
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


T = TypeVar("T")


def constrain(tree: T, layout: str | Axes | LayoutTree, rules: LayoutLike = None) -> T:
    """Constrain the sharding of arrays inside jit.

    On Auto mesh axes, this function constrains the compiler. On Explicit mesh axes, it reshards the
    arrays. Manual mesh axes in specs are ignored. Without a mesh, the function does nothing, so the
    same model runs on one device.

    Under `jax.vmap`, the compiler decides how to shard the mapped dimension, unless
    `spmd_axis_name=` names a mesh axis for it. JAX raises a `ValueError` if a rule uses that mesh
    axis too, so use different rules inside `jax.vmap`.

    Args:
        tree: an array, or a tree of arrays.
        layout: the axes of a bare array (`"batch seq embed"`), or a layout for a tree.
        rules: the rules for these axes; by default the ambient rules. Only the `AxisRules` of a
            layout are used, since `FSDP` and specs describe parameters.

    Raises:
        ShardingError: if mesh axes do not divide a size. JAX alone would silently replicate the
            array.
        ShardingError: if no rule lays out an axis.
        ShardingError: if `layout` names axes, but `tree` is not an array.
        ShardingError: if the number of axes differs from the number of dimensions.
        ShardingError: if there is a mesh but no rules.
        ShardingError: if the mesh was entered with the deprecated `with mesh:`.
        FunctreeError: if an array is deleted.

    Warns:
        FunctreeWarning: if `batch` has no rule except `...: None`, and `FSDP` in the same layout
            shards parameters over a mesh axis that no rule uses. A batch that is sharded over
            that mesh axis would be gathered.

    Examples:
        >>> rules = ft.AxisRules({"batch": "data", "embed": None})
        >>> double = jax.jit(lambda x: ft.constrain(x * 2, "batch embed"))
        >>> with jax.set_mesh(ft.make_mesh(data=8)), ft.axis_rules(rules):
        ...     double(jnp.ones((8, 4))).sharding.spec
        P('data',)
    """
    if isinstance(layout, str | Axes):
        return _by_axes(tree, Axes.of(layout), rules)
    check_tree("constrain", tree)
    if rules is not None:
        as_layout(rules)
    leaves, parts = read_for(tree, layout)
    check_deleted("constrain", tree)
    own = own_meshes(parts)
    mesh = find_mesh(own, leaves.values)
    if mesh is None:
        return tree
    view = local_view(mesh, own)
    decided = decide_parts(leaves, parts, view)
    if decided.problems:
        raise _refused(decided.problems, view)
    pairs = zip(leaves.leaves, decided.decisions, strict=True)
    return leaves.skeleton.fill(
        [with_decision(leaf.value, decision, mesh) for leaf, decision in pairs]
    )


def with_decision(value: AnyArray, decision: Decision, mesh: Mesh | AbstractMesh) -> AnyArray:
    """Constrain an array according to its decision."""
    spec = decision.spec if decision.specified else PartitionSpec()
    return with_constraint(value, mesh, spec, decision.memory_kind)


def _by_axes(x: Any, axes: Axes, rules: LayoutLike) -> Any:
    """Constrain an array using the names of its dimensions.

    Models constrain many activations, so this function reads no tree and makes no plan.
    """
    layout = ambient_rules() if rules is None else as_layout(rules)
    if not is_array(x):
        kind = type(x).__name__
        raise ShardingError(
            f'constrain: "{axes}" names the dimensions of a bare array, but the value has type '
            f"{kind}: pass a layout"
        )
    check_deleted("constrain", x)
    if len(axes) != len(x.shape):
        why = f'"{axes}" names {count(len(axes), "dimension")}, but the array has {len(x.shape)}'
        problem = activation(axes, x).problem(why, "name each dimension")
        raise ShardingError("constrain: the axes do not fit the array", [problem])
    own = None if layout is None else layout.own_mesh
    mesh = find_mesh([own], [x])
    if mesh is None:
        return x
    if layout is None or layout.rules is None:
        raise ShardingError(_no_rules(layout, axes, mesh))
    spec, problems, warnings = activation_spec(layout, axes, x, mesh)
    for text in warnings:
        warn(text)
    if problems:
        raise _refused(problems, mesh_view(mesh))
    return with_constraint(x, mesh, spec)


def _refused(problems: Sequence[Problem], view: MeshView) -> ShardingError:
    """Build the error for arrays that cannot be constrained.

    The error names a line of the user's program, since an activation has no path.
    """
    _, frame = users_frame()
    line = "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return refuse(problems, view, f"ft.constrain{line}: ")


def _no_rules(layout: Layout | None, axes: Axes, mesh: Mesh | AbstractMesh) -> str:
    """Write the message for an array without rules for its axes."""
    text = (
        f"constrain: no rules lay out `{axes}` on mesh {mesh_view(mesh)}: enter "
        "`with ft.axis_rules(rules):`, where `rules` are `AxisRules`, or pass them as `rules=`"
    )
    # A layout for parameters, such as `FSDP`, has no rules for activations.
    if layout is not None:
        text += f"; {layout!r} has no rules for axes, so combine it as `AxisRules(...) | layout`"
    return text


def find_mesh(
    own: Sequence[Mesh | AbstractMesh | None], values: Sequence[AnyArray]
) -> Mesh | AbstractMesh | None:
    """Return the ambient mesh, or otherwise the mesh of the layouts (`own`) or of the arrays."""
    mesh = current_mesh()
    written = next((one for one in own if one is not None), None)
    if mesh is not None:
        # A trace's ambient mesh may be abstract, while the layout has the same mesh with devices.
        if isinstance(written, Mesh) and written.abstract_mesh == mesh:
            return written
        return mesh
    if written is not None:
        return written
    return first_mesh([value for value in values if isinstance(value, jax.Array)])


def axes_of_name(name: str, rules: Layout, mesh: Mesh | AbstractMesh) -> tuple[str, ...] | None:
    """Return the mesh axes that shard a dimension of this name, or None if no rule covers it."""
    if rules.rules is None:
        return None
    try:
        spec = spec_of_axes(rules, Axes(name), None, local_view(mesh))
    except ShardingError:
        return None
    return mesh_axes(spec.partitions[0])


class AxisShards(NamedTuple):
    """The sharding of dimensions with one name.

    Attributes:
        mesh_axes: the mesh axes that shard these dimensions, outermost first; empty if they
            are not sharded.
        parts: the number of shards of each dimension; 1 if it is not sharded.
    """

    mesh_axes: tuple[str, ...]
    parts: int


def axis_shards(name: str, axes: str | Axes | None = None) -> AxisShards:
    """Look up how the ambient rules shard an axis over the current mesh.

    Use it in functions that compute differently when a dimension is sharded, such as a mixture of
    experts, attention over a sequence, or a pipeline.

    Without ambient `AxisRules` or a current mesh, nothing is sharded. Inside a `shard_map`, the
    result omits its Manual mesh axes, because an array is already a shard along them.

    Args:
        name: the name of the dimension.
        axes: all axes of the array that has the dimension; by default only `name`. A mesh axis
            shards at most one dimension of an array, so another dimension may already use it.

    Raises:
        AxesError: if `axes` does not contain `name`.
        ShardingError: if the rules do not lay out these axes.

    Examples:
        >>> table = [
        ...     ("experts", ("data", "model")),
        ...     ("hidden", "model"),
        ...     ("hidden", None),
        ... ]
        >>> rules = ft.AxisRules(table)
        >>> mesh = ft.make_mesh(data=2, model=4)
        >>> with jax.set_mesh(mesh), ft.axis_rules(rules):
        ...     ft.axis_shards("experts")
        ...     ft.axis_shards("hidden", "experts hidden")
        AxisShards(mesh_axes=('data', 'model'), parts=8)
        AxisShards(mesh_axes=(), parts=1)
    """
    of_array = Axes.of(name if axes is None else axes)
    if name not in of_array:
        raise AxesError(
            f'axis_shards("{name}", "{of_array}"): the axes do not contain `{name}`: '
            "name one of these axes"
        )
    mesh = current_mesh()
    if mesh is None or not has_axis_rules():
        return AxisShards((), 1)
    entry = spec(of_array)[tuple(of_array).index(name)]
    sharded_over = mesh_axes(entry)
    return AxisShards(sharded_over, devices_along(sharded_over))
