"""Shard the largest dimension that is left: `FSDP`, the layout of parameters that are gathered where they are used."""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from functree.errors import Problem, RuleError, near_name
from functree.layout.decision import Decision, apply_spec, decide_each, undecided, unreadable
from functree.layout.layout import Layout, Resolution, as_layout
from functree.layout.meshes import MeshView
from functree.layout.specs import axes_text, spec_text
from functree.layout.validation import RULE, missing_axes
from functree.tree.leaf import Leaf
from functree.values import Value


class FSDP(Value, Layout):
    """Shards the largest dimension that is still whole and that the mesh axis divides; the outermost of equals.

    Never the axis of a stack. Leaves that are smaller than `min_size`, have no whole dimension left, or use the mesh
    axis already, stay as they are.

    Args:
        axis: the mesh axis, or several.
        min_size: elements; smaller leaves stay.
        axes: only dimensions with these axis names are taken, if given.
        otherwise: the spec of a leaf none of whose whole dimensions divides; without it, that is an error.

    Raises:
        RuleError: an argument that means nothing.

    Examples:
        >>> ft.plan(jnp.ones((4, 1024)), ft.FSDP("data", min_size=0), {"data": 2}).specs
        P(None, 'data')
        >>> ft.FSDP("data")
        FSDP('data')
    """

    __slots__ = ("axes", "axis", "min_size", "otherwise")
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
        mesh_axes = _names((axis,) if isinstance(axis, str) else axis)
        if not mesh_axes or len(set(mesh_axes)) < len(mesh_axes):
            raise RuleError(f"FSDP({axis!r}): the first argument is a mesh axis, or several different ones")
        named = _names(axes.split() if isinstance(axes, str) else axes)
        if axes is not None and not named:
            raise RuleError(f"FSDP: axes={axes!r} is no list of axis names; leave it out for every axis")
        if type(min_size) is not int or min_size < 0:
            raise RuleError(f"FSDP: min_size={min_size!r} is a number of elements, 0 or more")
        if otherwise is not None and not isinstance(otherwise, PartitionSpec):
            raise RuleError(f"FSDP: otherwise={otherwise!r} is no PartitionSpec; write `P()` for whole")
        as_layout(otherwise)  # an invalid entry is found here
        self._set(
            axis=mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes,
            min_size=min_size,
            axes=named or None,
            otherwise=otherwise,
        )

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes, as a tuple."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        decisions = decide_each(leaves, before, _alike, lambda leaf, start: self._decide(leaf, mesh, start))
        problems = [
            *missing_axes(repr(self), self.mesh_axes, mesh, "name an axis of the mesh"),
            *self._misspelt(leaves),
        ]
        return Resolution(decisions, tuple(problems))

    def _misspelt(self, leaves: Sequence[Leaf]) -> list[Problem]:
        """Names in `axes` that no leaf has, and that are a near miss of one: nothing would be sharded, in silence."""
        if self.axes is None:
            return []
        present = sorted({name for leaf in leaves for name in leaf.axes if name is not None})
        near = {name: near_name(name, present) for name in self.axes if name not in present}
        return [
            Problem(None, None, repr(self), f"no leaf has the axis `{name}`; did you mean `{found}`?", "mend `axes=`")
            for name, found in near.items()
            if found
        ]

    def _decide(self, leaf: Leaf, mesh: MeshView, before: Decision | None) -> Decision:
        start = undecided(leaf) if before is None else before
        if leaf.misfit is not None and not start.faults:
            # A stack that no annotation tells of would be sharded along its layers.
            return start.wrong(unreadable(leaf))
        start = self._mentioned(leaf, start)
        stays = self._stays(leaf, start)
        if stays:
            return start.because(f"FSDP: {stays}")
        parts = math.prod(mesh.sizes.get(axis, 1) for axis in self.mesh_axes)
        fitting = [dim for dim in self._free(leaf, start) if leaf.shape[dim] % parts == 0]
        if not fitting:
            return self._unfit(leaf, start, parts)
        largest = max(fitting, key=lambda dim: (leaf.shape[dim], -dim))
        split = start.dimensions[largest]._replace(mesh_axes=self.mesh_axes, source=f"{RULE}FSDP({self.axis!r})")
        decision = start.each(lambda dim, dimension: split if dim == largest else dimension)
        return decision.because(f"FSDP: {leaf.dimension(largest)} is the largest left")

    def _mentioned(self, leaf: Leaf, start: Decision) -> Decision:
        """A decision in which the axes that FSDP names are mentioned."""
        if self.axes is None:
            return start
        mine = self.axes
        return start.each(
            lambda dim, dimension: dimension._replace(settled=True, fault=None) if leaf.axes[dim] in mine else dimension
        )

    def _stays(self, leaf: Leaf, start: Decision) -> str:
        """Why a leaf stays as it is; empty where it does not."""
        if leaf.value.size < self.min_size:
            return f"smaller than {self.min_size} elements"
        if not start.used().isdisjoint(self.mesh_axes):
            return f"uses {axes_text(self.mesh_axes)} already"
        return "" if self._free(leaf, start) else "no dimension left"

    def _free(self, leaf: Leaf, start: Decision) -> list[int]:
        """The dimensions that it may shard."""
        free = [dim for dim, axes in enumerate(start.mesh_axes) if not axes and dim >= leaf.stacked]
        return free if self.axes is None else [dim for dim in free if leaf.axes[dim] in self.axes]

    def _unfit(self, leaf: Leaf, start: Decision, parts: int) -> Decision:
        if self.otherwise is not None:
            applied = apply_spec(
                leaf, self.otherwise, start, f"FSDP: none divides, otherwise {spec_text(self.otherwise)}"
            )
            # It is no word about names: what was wrong with them before still is.
            return applied.each(
                lambda dim, dimension: dimension._replace(
                    settled=start.dimensions[dim].settled, fault=start.dimensions[dim].fault
                )
            )
        sizes = ", ".join(f"{leaf.dimension(dim)}={leaf.shape[dim]}" for dim in self._free(leaf, start))
        wanted = f"a multiple of {axes_text(self.mesh_axes)}={parts}"
        why = f"FSDP({self.axis!r}): none of its whole dimensions ({sizes}) is {wanted}"
        remedy = "pad one of them, raise `min_size`, or write `otherwise=P()` to leave such leaves as they are"
        return start.wrong((why, remedy))

    def _parts(self) -> tuple[Any, ...]:
        return (self.axis, self.min_size, self.axes, self.otherwise)

    def __repr__(self) -> str:
        given = [repr(self.axis)]
        given += [f"min_size={self.min_size}"] if self.min_size != 2**18 else []
        given += [f"axes={self.axes!r}"] if self.axes is not None else []
        given += [f"otherwise={spec_text(self.otherwise)}"] if self.otherwise is not None else []
        return f"FSDP({', '.join(given)})"


def _alike(leaf: Leaf) -> tuple[Any, ...]:
    """All of a leaf that FSDP decides by."""
    return (leaf.axes, leaf.shape, leaf.stacked, leaf.spec, leaf.misfit)


def _names(given: Any) -> tuple[str, ...]:
    """Names as a tuple; none at all where one is no name."""
    several = tuple(given) if isinstance(given, tuple | list) else ()
    return several if all(isinstance(name, str) and name for name in several) else ()
