"""`FSDP` shards the largest unsharded dimension of each parameter.

A leaf ─► a decision that shards one dimension. The parameters are gathered for each use.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from functree.argument_checks import EXTENT, is_name
from functree.devices.meshes import MeshView, axes_text, parts_over, spec_text
from functree.errors import Problem, RuleError, near_name
from functree.labels.leaves import Leaf
from functree.layout.decision import (
    Decision,
    Named,
    Source,
    apply_spec,
    present_axes,
    undecided,
)
from functree.layout.layout import Layout, as_layout, walk
from functree.tree.axes import is_axis_name


@dataclass(frozen=True, init=False, repr=False)
class FSDP(Layout):
    """A layout that shards the largest unsharded dimension that the mesh axis divides.

    If several dimensions are equally large, `FSDP` shards the outermost. It never shards the
    dimension that stacks layers. A leaf is unchanged if it has fewer than `min_size` elements, has
    no dimension that `FSDP` may shard, or is already sharded over the mesh axis.

    Args:
        axis: the mesh axis, or several mesh axes.
        min_size: the number of elements below which leaves are unchanged.
        axes: the axes that may be sharded; by default all.
        otherwise: the spec of a leaf if the mesh axis divides none of the dimensions that may be
            sharded. By default, such a leaf raises an error.

    Raises:
        RuleError: if an argument is invalid.

    Examples:
        >>> ft.plan(
        ...     jnp.ones((4, 1024)), ft.FSDP("data", min_size=0), {"data": 2}
        ... ).specs
        P(None, 'data')
        >>> ft.FSDP("data")
        FSDP('data')
    """

    axis: str | tuple[str, ...]
    min_size: int
    axes: tuple[str, ...] | None
    otherwise: PartitionSpec | None

    def __init__(
        self,
        axis: str | Sequence[str],
        min_size: int = 2**18,
        axes: Sequence[str] | str | None = None,
        otherwise: PartitionSpec | None = None,
    ):
        if isinstance(axis, str):
            mesh_axes = _names((axis,))
        else:
            mesh_axes = _names(axis)
        if not mesh_axes or len(set(mesh_axes)) < len(mesh_axes):
            raise RuleError(
                f"FSDP: axis={axis!r} is invalid: write a mesh axis, or several different mesh axes"
            )
        if isinstance(axes, str):
            named = _names(axes.split())
        else:
            named = _names(axes)
        if axes is not None and not (named and all(map(is_axis_name, named))):
            raise RuleError(
                f"FSDP: axes={axes!r} is not a list of axis names: write names, as in `('embed', "
                "'hidden')` or `'embed hidden'`, or omit `axes=` to allow every axis"
            )
        if not EXTENT.fits(min_size):
            raise RuleError(
                f"FSDP: min_size={min_size!r} is not a number of elements: "
                "pass a non-negative integer"
            )
        if otherwise is not None and not isinstance(otherwise, PartitionSpec):
            raise RuleError(
                f"FSDP: otherwise={otherwise!r} is not a PartitionSpec: "
                "write `P()` to skip leaves that FSDP cannot shard"
            )
        as_layout(otherwise)  # raises for a spec with an invalid entry
        vars(self).update(
            # `FSDP("data")` and `FSDP(("data",))` are equal.
            axis=mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes,
            min_size=int(min_size),
            axes=named or None,
            otherwise=otherwise,
        )

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes, as a tuple."""
        if isinstance(self.axis, str):
            return (self.axis,)
        return self.axis

    def decide(self, leaf: Leaf, so_far: Decision | None, mesh: MeshView) -> Decision:
        start = so_far or undecided(leaf)
        if leaf.misfit is not None and not start.faults:
            # Layers stacked without `ft.Stacked` do not fit their annotations. Without this fault,
            # the dimension that stacks them could be sharded.
            return start.wrong(leaf.misfit)
        start = self._mentioned(leaf, start)
        free = self._free(leaf, start)
        stays = self._stays(leaf, start, free)
        if stays:
            return start.because(f"FSDP: {stays}")
        parts = parts_over(self.mesh_axes, mesh.sizes)
        fitting = [dim for dim in free if leaf.shape[dim] % parts == 0]
        if not fitting:
            return self._unfit(leaf, start, free, parts)
        # If several dimensions are equally large, `max` selects the outermost.
        largest = max(fitting, key=lambda dim: (leaf.shape[dim], -dim))
        dimension = start.dimensions[largest]
        split = dimension._replace(
            mesh_axes=self.mesh_axes, source=Source((f"FSDP({self.axis!r})",), is_rule=True)
        )
        if self.axes is not None:
            # The dimension's axis is in `axes`, so sharding it resolves its blocked rules.
            split = split._replace(blocked=None)
        return start.with_dimension(largest, split).because(
            f"FSDP: {leaf.dimension(largest)} is the largest dimension it can shard"
        )

    def _mentioned(self, leaf: Leaf, start: Decision) -> Decision:
        """Mark the names in `axes` as mentioned, so that they need no rule.

        The names need no rule even if their dimensions stay unsharded. A name whose rules are all
        blocked is still a fault, unless its dimension is sharded.
        """
        for dim, (name, dimension) in enumerate(zip(leaf.axes, start.dimensions, strict=True)):
            if name in (self.axes or ()) and dimension.named < Named.MENTIONED:
                start = start.with_dimension(dim, dimension._replace(named=Named.MENTIONED))
        return start

    def _stays(self, leaf: Leaf, start: Decision, free: Sequence[int]) -> str:
        """Return why a leaf stays unchanged, or an empty string if it changes."""
        if leaf.value.size < self.min_size:
            return f"fewer than {self.min_size} elements"
        # A mesh axis can shard only one dimension of an array.
        if not start.used.isdisjoint(self.mesh_axes):
            return f"already sharded over {axes_text(self.mesh_axes)}"
        if not free:
            return "no dimension it can shard"
        return ""

    def _free(self, leaf: Leaf, start: Decision) -> list[int]:
        """Return the dimensions that may be sharded."""
        free: list[int] = []
        # If a stack's dimension were sharded, a scan would gather the whole stack for each layer.
        for dim in range(leaf.stacked, len(start.dimensions)):
            if start.dimensions[dim].mesh_axes:
                continue
            if self.axes is None or leaf.axes[dim] in self.axes:
                free.append(dim)
        return free

    def _unfit(self, leaf: Leaf, start: Decision, free: Sequence[int], parts: int) -> Decision:
        """Return the decision for a leaf if the mesh axis divides no dimension in `free`."""
        if self.otherwise is not None:
            spec = spec_text(self.otherwise)
            reason = f"FSDP: no dimension it can shard, hence `otherwise={spec}`"
            # `otherwise` applies to sizes only: a name that no rule mentions is still a fault.
            return apply_spec(leaf, self.otherwise, start, reason, settles=False)
        sizes = ", ".join(f"{leaf.dimension(dim)}={leaf.shape[dim]}" for dim in free)
        wanted = f"a multiple of {axes_text(self.mesh_axes)}={parts}"
        why = f"FSDP({self.axis!r}): none of the dimensions it may shard ({sizes}) is {wanted}"
        otherwise = "pass `otherwise=P()` to skip leaves that FSDP cannot shard"
        return start.wrong((why, f"pad one of these dimensions, raise `min_size`, or {otherwise}"))

    def __repr__(self) -> str:
        given = [repr(self.axis)]
        if self.min_size != 2**18:
            given.append(f"min_size={self.min_size}")
        if self.axes is not None:
            given.append(f"axes={self.axes!r}")
        if self.otherwise is not None:
            given.append(f"otherwise={spec_text(self.otherwise)}")
        return f"FSDP({', '.join(given)})"


def misspelt_axes(layout: FSDP, leaves: Sequence[Leaf]) -> Iterator[Problem]:
    """Yield a problem for each name in `axes` that no leaf has, but that resembles a leaf's name.

    Without this check, a misspelled name would silently shard nothing.
    """
    if layout.axes is None:
        return
    present = sorted(filter(None, present_axes(leaves)))
    for name in layout.axes:
        near = None if name in present else near_name(name, present)
        # If no leaf has a similar name, the name may be for another model that uses this layout.
        if near is not None:
            why = f"no leaf has the axis `{name}`; did you mean `{near}`?"
            yield Problem(None, None, repr(layout), why, "correct the name in `axes=`")


def fsdp_axes(layout: Layout) -> Iterator[str]:
    """Yield the mesh axes of every `FSDP` in a layout.

    These mesh axes usually shard the batch, too.
    """
    for part in walk(layout):
        if isinstance(part, FSDP):
            yield from part.mesh_axes


def _names(given: object) -> tuple[str, ...]:
    """Return a list or tuple of names as a tuple, and an empty tuple for anything else."""
    if not isinstance(given, tuple | list):
        return ()
    if not all(map(is_name, given)):
        return ()
    return tuple(given)
