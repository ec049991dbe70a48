"""A `Row` holds a plan's figures for one array.

`array_of` renders the array with its mesh axes.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.devices.specs import mesh_axes, of_rank, spec_text
from functree.labels.leaf import Leaf
from functree.tree.arrays import DType, dtype_text
from functree.tree.axes import Axes
from functree.tree.paths import Path


class Row(NamedTuple):
    """The figures of one array in a plan.

    Attributes:
        path: the path of the array in the tree.
        shape: the global shape of the array.
        dtype: the dtype of the array.
        axes: the names of its dimensions.
        spec: its spec, with one entry for each dimension; None if its sharding has no spec.
        reason: the reason for the spec.
        local_shape: the shape of the shard on one device.
        bytes_global: the bytes of the whole array.
        bytes_per_device: the bytes of the shard on one device.
        copies: the number of devices that hold each byte.
        memory_kind: `"pinned_host"` for host memory; None for the default.
        mesh: the array's mesh if it differs from the plan's, and None otherwise. A row has its
            own mesh only in a plan that shows how arrays are sharded now.
        follows: the path of the parameter whose dimensions and spec the array shares, as an
            optimizer's moment does; None if the array follows no parameter.

    Examples:
        >>> row = ft.plan(
        ...     jnp.ones((4, 8)), ft.P("data"), {"data": 2, "model": 4}
        ... )[()]
        >>> row.local_shape, row.bytes_per_device, row.copies
        ((2, 8), 64, 4)
    """

    path: Path
    shape: tuple[int, ...]
    dtype: DType
    axes: Axes
    spec: PartitionSpec | None
    reason: str
    local_shape: tuple[int, ...]
    bytes_global: int
    bytes_per_device: int
    copies: int
    memory_kind: str | None = None
    mesh: Mesh | AbstractMesh | None = None
    follows: Path | None = None


def row_of(
    leaf: Leaf,
    spec: PartitionSpec | None,
    reason: str,
    local_shape: tuple[int, ...],
    copies: int = 1,
    memory_kind: str | None = None,
) -> Row:
    """Return the row of an array, with its bytes."""
    shape, dtype = leaf.value.shape, leaf.value.dtype
    whole, part = math.prod(shape) * dtype.itemsize, math.prod(local_shape) * dtype.itemsize
    array = leaf.path, shape, dtype, leaf.axes
    return Row(*array, spec, reason, local_shape, whole, part, copies, memory_kind)


def rows_by_path(rows: Iterable[Row]) -> dict[Path, Row]:
    """Return the rows, keyed by the paths of their arrays."""
    return {row.path: row for row in rows}


def saved_by_sharding(row: Row) -> int:
    """Return the bytes per device that sharding would save if only one device held each byte."""
    return row.bytes_per_device - row.bytes_per_device // max(row.copies, 1)


def array_of(row: Row) -> str:
    """Return a row's array, with the mesh axes that divide each size: `f32[32000/model, 512]`.

    If several mesh axes divide a size, the outermost comes first: `64/data/model`. A missing spec,
    partial sums and host memory follow the sizes.
    """
    sizes: list[str] = []
    for size, axes in zip(row.shape, axes_of(row), strict=True):
        sizes.append("/".join((str(size), *axes)))
    text = f"{dtype_text(row.dtype)}[{', '.join(sizes)}]"
    if row.spec is None:
        text += " no spec"
    elif row.spec.unreduced or row.spec.reduced:
        text += f" {spec_text(row.spec)}"
    if row.memory_kind is not None:
        text += f" {row.memory_kind}"
    return text


def axes_of(row: Row) -> list[tuple[str, ...]]:
    """Return the mesh axes that divide each dimension of an array."""
    spec = PartitionSpec() if row.spec is None else row.spec
    # In a plan with problems, a spec may have more entries than the array has dimensions.
    entries = of_rank(spec, len(row.shape)).partitions
    return [mesh_axes(entry) for entry in entries[: len(row.shape)]]
