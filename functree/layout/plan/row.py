"""`Row`: what a plan says about one array."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

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
    dtype: Any
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


def rows_by_path(rows: Iterable[Row]) -> dict[Path, Row]:
    """Rows by the paths of their arrays."""
    return {row.path: row for row in rows}
