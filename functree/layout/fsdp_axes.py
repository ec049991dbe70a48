"""A layout ─► the mesh axes of every `FSDP` in it."""

from collections.abc import Iterator

from functree.layout.fsdp import FSDP
from functree.layout.layout import Composition, Layout, as_layout
from functree.layout.on_host import Modifier
from functree.layout.state_sharding import StateSharding


def fsdp_axes(layout: Layout) -> Iterator[str]:
    """The mesh axes of every `FSDP` in a layout, which are those of the batch."""
    match layout:
        case FSDP():
            yield from layout.mesh_axes
        case Composition():
            for part in layout.parts:
                yield from fsdp_axes(part)
        case Modifier():
            yield from fsdp_axes(layout.layout)
        case StateSharding():
            for one in layout.layouts:
                yield from fsdp_axes(as_layout(one))
