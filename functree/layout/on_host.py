"""A layout ─► the same layout, changed: `Modifier`, and `on_host`, in the pinned memory of the
host."""

from dataclasses import dataclass

from functree.devices.meshes import MeshView
from functree.errors import RuleError
from functree.labels.leaf import Leaf
from functree.layout.decision import Decision
from functree.layout.layout import Layout, LayoutLike, as_layout


@dataclass(frozen=True, repr=False, eq=False)
class Modifier(Layout):
    """The base of layouts that change another one."""

    layout: Layout

    @property
    def inner(self) -> tuple[Layout, ...]:
        return (self.layout,)

    @property
    def rules(self) -> Layout | None:
        return self.layout.rules

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        return self.layout.decide(leaf, so_far, mesh)


@dataclass(frozen=True, repr=False)
class OnHost(Modifier):
    """Another layout in the pinned memory of the host; made by `ft.on_host`."""

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        decision = self.layout.decide(leaf, so_far, mesh)
        return decision._replace(memory_kind="pinned_host")

    def __repr__(self) -> str:
        return f"on_host({self.layout!r})"


def on_host(layout: LayoutLike) -> Layout:
    """The same layout in the pinned memory of the host.

    Args:
        layout: any layout.

    Raises:
        RuleError: the argument is not a layout, or is None.

    Examples:
        >>> ft.plan(jnp.ones((4, 8)), ft.on_host(ft.P("data")), {"data": 2})[
        ...     ()
        ... ].memory_kind
        'pinned_host'
    """
    if layout is None:
        raise RuleError("`on_host` takes a layout, and `None` is not one: write `P()` to replicate")
    return OnHost(as_layout(layout))
