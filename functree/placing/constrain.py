"""Traced arrays and a layout ─► the same arrays, constrained to the shardings of the layout."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.argument_checks import check_tree
from functree.devices.constraint import with_constraint
from functree.devices.meshes import MeshView, agreed_mesh, current_mesh, devices_along, mesh_view
from functree.devices.placement import check_deleted, first_mesh
from functree.devices.specs import mesh_axes
from functree.errors import AxesError, Problem, ShardingError, count, users_frame, warn
from functree.layout.decide import decide_parts
from functree.layout.decision import Decision, refuse
from functree.layout.layout import Layout, LayoutLike, LayoutTree, as_layout, own_meshes
from functree.layout.plan.make_plan import read_for
from functree.layout.rules import activation, array_spec, forgotten_axes, forgotten_text, renamed
from functree.placing.ambient import ambient_rules, has_axis_rules, is_told_first, spec
from functree.tree.arrays import AnyArray, is_array
from functree.tree.axes import Axes

T = TypeVar("T")


def constrain(tree: T, layout: str | Axes | LayoutTree, rules: LayoutLike = None) -> T:
    """Constrain the sharding of arrays inside jit.

    On Auto mesh axes this is a constraint for the compiler, on Explicit mesh axes a reshard. Manual
    mesh axes are left out of the specs. Without a mesh it does nothing, so the same model also runs
    on one device. Under `jax.vmap` the mapped dimension is left to the compiler, unless
    `spmd_axis_name=` says its mesh axis. JAX raises a `ValueError` if a rule uses that mesh axis
    too: give the axes of one learner other rules.

    Args:
        tree: an array, or a tree of arrays.
        layout: the axes of a bare array (`"batch seq embed"`), or a layout for a tree.
        rules: the rules for these axes; the ambient rules if not given. Only the `AxisRules` of a
            layout are used: `FSDP` and specs are written for parameters.

    Raises:
        ShardingError: a size that its mesh axes do not divide (JAX alone replicates such an array
            silently); an axis that no rule lays out; a mesh but no rules; a mesh that was entered
            by `with mesh:`.
        FunctreeError: an array is deleted.

    Warns:
        FunctreeWarning: a dimension is called `batch` and has no rule but `...: None`, while `FSDP`
            in the same layout shards parameters over a mesh axis that no rule uses: a batch that is
            sharded over it would be gathered. Once for each layout, in each trace.

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
    view = local_view(agreed_mesh(mesh, own))
    decided = decide_parts(leaves, parts, view)
    if decided.problems:
        raise _refused(decided.problems, view)
    pairs = zip(leaves.leaves, decided.decisions, strict=True)
    return leaves.skeleton.fill([with_decision(leaf.value, one, mesh) for leaf, one in pairs])


def with_decision(value: AnyArray, decision: Decision, mesh: Mesh | AbstractMesh) -> AnyArray:
    """An array, constrained as was decided about it."""
    spec = decision.spec if decision.specified else PartitionSpec()
    return with_constraint(value, mesh, spec, decision.memory_kind)


def _by_axes(x: Any, axes: Axes, rules: LayoutLike) -> Any:
    """An array constrained by the names of its dimensions.

    This runs for each activation that a model constrains, so it reads no tree and makes no plan.
    """
    layout = ambient_rules() if rules is None else as_layout(rules)
    if not is_array(x):
        kind = type(x).__name__
        raise ShardingError(
            f'"{axes}" names the dimensions of a bare array, but this is a {kind}: give a layout'
        )
    check_deleted("constrain", x)
    leaf = activation(axes, x)
    if len(axes) != len(x.shape):
        why = f'"{axes}" names {count(len(axes), "dimension")}, but the array has {len(x.shape)}'
        raise ShardingError("the axes do not fit", [leaf.problem(why, "name each dimension")])
    own = None if layout is None else layout.own_mesh
    mesh = find_mesh([own], [x])
    if mesh is None:
        return x
    if layout is None or layout.rules is None:
        raise ShardingError(_no_rules(layout, axes, mesh))
    view = local_view(agreed_mesh(mesh, [own]))
    try:
        spec = array_spec(layout, axes, x.shape, view)
    except ShardingError as error:
        raise _refused(renamed(error.problems, what=leaf.text), view) from None
    forgotten = forgotten_axes(layout, axes, view)
    if forgotten and is_told_first(layout):
        what = f'the activation "{axes}"'
        warn(f"constrain: {forgotten_text(what, forgotten)}")
    return with_constraint(x, mesh, spec)


def _refused(problems: Sequence[Problem], view: MeshView) -> ShardingError:
    """The error of arrays that cannot be constrained, with the line of the user's program: an
    activation has no path that says which it is."""
    _, frame = users_frame()
    line = "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return refuse(problems, view, f"ft.constrain{line}: ")


def _no_rules(layout: Layout | None, axes: Axes, mesh: Mesh | AbstractMesh) -> str:
    """The error for an array whose axes no rule is about."""
    text = (
        f"there is a mesh {mesh_view(mesh)} but no rules to lay out `{axes}`: enter "
        "`with ft.axis_rules(rules):` with `AxisRules`, or pass them as `rules=`"
    )
    # There may be a layout all the same, which is for parameters, such as `FSDP`.
    if layout is not None:
        text += f"; {layout!r} knows no names of axes, and `AxisRules(...) | layout` knows them"
    return text


def local_view(view: MeshView) -> MeshView:
    """A mesh in which Manual axes count as one device: shapes are local along these."""
    manual = getattr(view.mesh, "manual_axes", ())
    if not manual:
        return view
    return MeshView({**view.sizes, **dict.fromkeys(manual, 1)}, view.mesh)


def find_mesh(
    own: Sequence[Mesh | AbstractMesh | None], values: Sequence[AnyArray]
) -> Mesh | AbstractMesh | None:
    """The ambient mesh, else that of the layouts (`own`), else that of the arrays."""
    mesh = current_mesh()
    written = next((one for one in own if one is not None), None)
    if mesh is not None:
        # The ambient mesh of a trace may be abstract, and the same mesh in the layout have its
        # devices.
        if isinstance(written, Mesh) and written.abstract_mesh == mesh:
            return written
        return mesh
    if written is not None:
        return written
    return first_mesh([value for value in values if isinstance(value, jax.Array)])


class AxisShards(NamedTuple):
    """How the dimensions of one name are sharded.

    Attributes:
        mesh_axes: the mesh axes that shard them, the outermost first; none if they are unsharded.
        parts: the number of parts, 1 if they are unsharded.
    """

    mesh_axes: tuple[str, ...]
    parts: int


def axis_shards(name: str, axes: str | Axes | None = None) -> AxisShards:
    """Over which mesh axes of the current mesh the ambient rules shard a name, and into how many
    parts, for a function whose way to compute depends on it: experts that are somewhere else, a
    sequence in parts, stages of a pipeline.

    Without ambient `AxisRules`, or without a current mesh, nothing is sharded. Inside of a
    `shard_map` the axes that it maps are left out: along these an array is a part already.

    Args:
        name: the name of the dimension.
        axes: all axes of the array whose dimension this is; by default it has no other. A mesh axis
            shards one dimension of an array, so others that come before may have taken it.

    Raises:
        AxesError: `axes` does not have the name.
        ShardingError: the rules do not lay out these axes.

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
        raise AxesError(f'axis_shards("{name}", "{of_array}"): the axes do not have the name')
    mesh = current_mesh()
    if mesh is None or not has_axis_rules():
        return AxisShards((), 1)
    entry = spec(of_array)[tuple(of_array).index(name)]
    found = mesh_axes(entry)
    return AxisShards(found, devices_along(found))
