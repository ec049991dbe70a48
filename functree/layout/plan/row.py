"""`Row`: what a plan says about one array; and its array as text."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from functree.devices.specs import mesh_axes, of_rank, spec_text
from functree.labels.leaf import Leaf
from functree.tree.arrays import DType, dtype_text
from functree.tree.axes import Axes
from functree.tree.paths import Path


class Row(NamedTuple):
    """What a plan says about one array.

    Attributes:
        path: the path of the array in the tree.
        shape: the shape of the whole array.
        dtype: the dtype of the array.
        axes: the names of its dimensions.
        spec: its spec, with one entry for each dimension; None if its sharding has no spec.
        reason: the reason for the spec.
        local_shape: the shape of the shard on one device.
        bytes_global: the bytes of the whole array.
        bytes_per_device: the bytes of the shard on one device.
        copies: the number of devices that have each byte.
        memory_kind: `"pinned_host"` for host memory; None for the default.
        mesh: the mesh of an array that is on another mesh than the plan's; else None. Only a plan
            of how arrays are sharded now has such rows.
        follows: the path of the parameter whose dimensions it has, and with it the spec, as the
            moments of an optimizer do; else None.

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
    """The row of an array, with its bytes."""
    shape, dtype = leaf.value.shape, leaf.value.dtype
    whole, part = math.prod(shape) * dtype.itemsize, math.prod(local_shape) * dtype.itemsize
    array = leaf.path, shape, dtype, leaf.axes
    return Row(*array, spec, reason, local_shape, whole, part, copies, memory_kind)


def rows_by_path(rows: Iterable[Row]) -> dict[Path, Row]:
    """Rows by the paths of their arrays."""
    return {row.path: row for row in rows}


def saved_by_sharding(row: Row) -> int:
    """The bytes that one device would not have if each byte of an array were on one device."""
    return row.bytes_per_device - row.bytes_per_device // max(row.copies, 1)


def array_of(row: Row) -> str:
    """The array of a row, each size with the mesh axes that divide it: `f32[32000/model, 512]`.

    The outermost of several mesh axes comes first: `64/data/model`.
    """
    return sizes_of(row, str) + beside_array(row)


def sizes_of(row: Row, axis_text: Callable[[str], str]) -> str:
    """The dtype and the sizes of an array, with a text for each mesh axis that divides one."""
    sizes = list(map(str, row.shape))
    for dim, axes in enumerate(axes_of(row)):
        for axis in axes:
            sizes[dim] += f"/{axis_text(axis)}"
    return f"{dtype_text(row.dtype)}[{', '.join(sizes)}]"


def axes_of(row: Row) -> list[tuple[str, ...]]:
    """For each dimension of an array, the mesh axes that divide it."""
    spec = PartitionSpec() if row.spec is None else row.spec
    # A plan with problems may have a spec with more entries than the array has dimensions.
    entries = of_rank(spec, len(row.shape)).partitions
    return [mesh_axes(entry) for entry in entries[: len(row.shape)]]


def beside_array(row: Row) -> str:
    """What the sizes of an array do not say: that it has no spec, or is in host memory."""
    text = ""
    if row.spec is None:
        text += " no spec"
    elif row.spec.unreduced or row.spec.reduced:
        text += f" {spec_text(row.spec)}"
    if row.memory_kind is not None:
        text += f" {row.memory_kind}"
    return text
