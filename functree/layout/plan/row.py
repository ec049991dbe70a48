"""What a plan says of one array."""

from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from functree.tree.axes import Axes
from functree.tree.paths import Path


class Row(NamedTuple):
    """What a plan says of one array.

    Attributes:
        path: where it stands in the tree.
        shape: of the whole array.
        dtype: of its elements.
        axes: the names of its dimensions.
        spec: where it goes, with one entry for each dimension; None where no spec can say it.
        reason: why.
        local_shape: of one device's part.
        bytes_global: of the whole array.
        bytes_per_device: of one device's part.
        copies: on how many devices each byte is kept.
        memory_kind: `"pinned_host"` for host memory; None for the default.

    Examples:
        >>> row = ft.plan(jnp.ones((4, 8)), ft.P("data"), {"data": 2, "model": 4})[()]
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
