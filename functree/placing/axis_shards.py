"""The name of an axis ─► the mesh axes over which the ambient rules shard it, and the number of
parts."""

from typing import NamedTuple

from functree.devices.meshes import current_mesh, devices_along
from functree.devices.specs import mesh_axes
from functree.errors import AxesError
from functree.placing.ambient import has_axis_rules, spec
from functree.tree.axes import Axes


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
