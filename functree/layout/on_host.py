"""A layout ─► the same layout, changed: `Modifier`, and `on_host`, in the pinned memory of the
host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh, Mesh

from functree.devices.meshes import MeshView
from functree.errors import RuleError
from functree.labels.leaf import Leaf
from functree.layout.decision import Decision
from functree.layout.layout import Layout, LayoutLike, Resolution, as_layout
from functree.tree.axes import Names


@dataclass(frozen=True, repr=False, eq=False)
class Modifier(Layout):
    """The base of layouts that change another one."""

    layout: Layout

    @property
    def given_names(self) -> Mapping[type, Names]:
        return self.layout.given_names

    @property
    def own_mesh(self) -> Mesh | AbstractMesh | None:
        return self.layout.own_mesh

    @property
    def for_activations(self) -> bool:
        return self.layout.for_activations

    @property
    def has_filters(self) -> bool:
        return self.layout.has_filters

    def claims(self, leaf: Leaf) -> bool:
        return self.layout.claims(leaf)

    def unsharded(self, axis: str) -> Layout:
        return replace(self, layout=self.layout.unsharded(axis))

    def resolve(
        self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None
    ) -> Resolution:
        return self.layout.resolve(leaves, mesh, before)


@dataclass(frozen=True, repr=False)
class OnHost(Modifier):
    """Another layout in the pinned memory of the host; made by `ft.on_host`."""

    def resolve(
        self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None
    ) -> Resolution:
        found = self.layout.resolve(leaves, mesh, before)
        decisions: list[Decision] = []
        for leaf, decision in zip(leaves, found.decisions, strict=True):
            # Activations are computed with at once, on the device.
            kind = decision.memory_kind if leaf.activation else "pinned_host"
            decisions.append(decision._replace(memory_kind=kind))
        return found._replace(decisions=decisions)

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
