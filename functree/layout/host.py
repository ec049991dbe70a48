"""A layout ─► the same layout in the pinned memory of the host."""

from collections.abc import Sequence
from dataclasses import dataclass

from functree.errors import RuleError
from functree.layout.decision import Decision
from functree.layout.layout import Layout, LayoutLike, Modified, Resolution, as_layout
from functree.layout.meshes import MeshView
from functree.tree.leaf import Leaf


@dataclass(frozen=True, repr=False)
class OnHost(Modified):
    """Another layout in host memory; made by `ft.on_host`."""

    @property
    def by_axes(self) -> Layout | None:
        return self.layout.by_axes

    @property
    def tolerant(self) -> Layout:
        return OnHost(self.layout.tolerant)

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        found = self.layout.resolve(leaves, mesh, before)
        return found._replace(decisions=[d._replace(memory_kind="pinned_host") for d in found.decisions])

    def __repr__(self) -> str:
        return f"on_host({self.layout!r})"


def on_host(layout: LayoutLike) -> Layout:
    """The same layout in the pinned memory of the host.

    Args:
        layout: any layout.

    Raises:
        RuleError: the argument is not a layout, or is None.

    Examples:
        >>> ft.plan(jnp.ones((4, 8)), ft.on_host(ft.P("data")), {"data": 2})[()].memory_kind
        'pinned_host'
    """
    if layout is None:
        raise RuleError("`on_host` takes a layout, and `None` is not one: write `P()` to replicate")
    return OnHost(as_layout(layout))
