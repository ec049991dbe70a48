"""The spec of a gradient ─► the spec that it is constrained to before, where XLA would compute
wrong numbers.

A gradient is a product that is summed over the mesh axes of the batch. Where its spec scatters it
over these, and a dimension of it, or of what it is a product of, is split by two mesh axes, XLA's
partitioner may take the wrong parts of the operands, and says nothing (in jax 0.10.2 and 0.12, on
Auto axes). It does not where the sum is constrained first, and what is scattered afterwards. That
costs no byte where the gradient itself is split so: the partitioner sums and then takes a part in
any case. Where only what it is a product of is, the sum is of the whole gradient.
"""

from collections.abc import Sequence

from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from functree.devices.specs import entry, mesh_axes, without
from functree.labels.leaf import Leaf
from functree.layout.fsdp import fsdp_axes
from functree.layout.layout import Layout
from functree.placing.batch import axes_of_name

# The names of the dimensions of an activation that a gradient is summed over.
_SUMMED = ("batch", "seq")


class SummedFirst:
    """What gradients are constrained to first.

    Args:
        layouts: the ambient rules, and the layouts of the parameters.
        mesh: the mesh.
    """

    def __init__(self, layouts: Sequence[Layout], mesh: Mesh | AbstractMesh):
        self._layouts, self._mesh = layouts, mesh
        self._is_needed = AxisType.Explicit not in mesh.axis_types
        self._batch: set[str] = set()
        for layout in layouts:
            self._batch.update(fsdp_axes(layout))
        for name in _SUMMED:
            self._batch.update(self._axes_of(name))

    def spec(self, leaf: Leaf, wanted: PartitionSpec) -> PartitionSpec | None:
        """The spec that the gradient of a parameter is constrained to first; None if the one that
        is wanted is enough.

        Args:
            leaf: the parameter.
            wanted: the spec of its gradient.
        """
        entries = [axes for axes in map(mesh_axes, wanted.partitions) if axes]
        if not self._is_needed or not entries:
            return None
        if not self._batch:
            # Nobody says which mesh axes are summed over.
            several = len(entries) > 1 and any(len(axes) > 1 for axes in entries)
            return _first_of_each(wanted) if several else None
        summed = without(wanted, self._batch)
        split = [*map(mesh_axes, summed.partitions), *map(self._axes_of, filter(None, leaf.axes))]
        if summed == wanted or all(len(axes) < 2 for axes in split):
            return None
        return summed

    def _axes_of(self, name: str) -> tuple[str, ...]:
        """The mesh axes of an activation's dimension of this name."""
        known = (axes_of_name(name, layout, self._mesh) for layout in self._layouts)
        return next((axes for axes in known if axes), ())


def _first_of_each(spec: PartitionSpec) -> PartitionSpec:
    """A spec with the outermost mesh axis of each dimension."""
    return PartitionSpec(*(entry(mesh_axes(one)[:1]) for one in spec.partitions))
