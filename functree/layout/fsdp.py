"""Shard the largest dimension that is left: `FSDP`, the layout of parameters that are gathered where they are used."""

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from functree.errors import Problem, RuleError, near_name
from functree.layout.checks import lacking
from functree.layout.layouts import (
    Decision,
    Layout,
    Resolution,
    apply_spec,
    as_layout,
    dim_text,
    misread,
    undecided,
)
from functree.layout.meshes import MeshView
from functree.layout.specs import axes_text, spec_text
from functree.tree.leaf import Leaf


class FSDP(Layout):
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
        as_layout(otherwise)  # a spec of what is no mesh axis is found here
        object.__setattr__(self, "axis", mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes)
        object.__setattr__(self, "min_size", min_size)
        object.__setattr__(self, "axes", named or None)
        object.__setattr__(self, "otherwise", otherwise)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("FSDP is immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return FSDP, self._key

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes, as a tuple."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    def resolve(self, leaves: Sequence[Leaf], mesh: MeshView, before: Sequence[Decision] | None = None) -> Resolution:
        known: dict[tuple[object, ...], Decision] = {}
        decisions = []
        for i, leaf in enumerate(leaves):
            start = before[i] if before is not None else None
            key = (leaf.axes, leaf.shape, leaf.stacked, leaf.spec, leaf.problem, start)
            if key not in known:
                known[key] = self._decide(leaf, mesh, start if start is not None else undecided(leaf))
            decisions.append(known[key])
        problems = [*lacking(repr(self), self.mesh_axes, mesh, "name an axis of the mesh"), *self._misspelt(leaves)]
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

    def _decide(self, leaf: Leaf, mesh: MeshView, start: Decision) -> Decision:
        if leaf.problem is not None and not start.problems:
            # A stack that nothing tells of would be sharded along its layers.
            return start._replace(problems=(misread(leaf, leaf.problem),))
        if self.axes is not None:
            start = self._settled(leaf, start)
        stay = self._stays(leaf, start)
        if stay:
            return _because(start, f"FSDP: {stay}")
        free = self._free(leaf, start)
        parts = math.prod(mesh.sizes.get(axis, 1) for axis in self.mesh_axes)
        fitting = [dim for dim in free if leaf.shape[dim] % parts == 0]
        if fitting:
            return self._shard(leaf, start, max(fitting, key=lambda dim: (leaf.shape[dim], -dim)))
        return self._unfit(leaf, start, free, parts)

    def _settled(self, leaf: Leaf, start: Decision) -> Decision:
        """FSDP mentions the axes that it names."""
        mine = {dim for dim, name in enumerate(leaf.axes) if name in (self.axes or ())}
        return start._replace(
            unsettled=tuple(dim for dim in start.unsettled if dim not in mine),
            pending=tuple(p for p in start.pending if p[0] not in mine),
        )

    def _stays(self, leaf: Leaf, start: Decision) -> str:
        used = {axis for entry in start.entries for axis in entry}
        if leaf.value.size < self.min_size:
            return f"smaller than {self.min_size} elements"
        if not used.isdisjoint(self.mesh_axes):
            return f"uses {axes_text(self.mesh_axes)} already"
        return "" if self._free(leaf, start) else "no dimension left"

    def _free(self, leaf: Leaf, start: Decision) -> list[int]:
        return [
            dim
            for dim, entry in enumerate(start.entries)
            if not entry and dim >= leaf.stacked and (self.axes is None or leaf.axes[dim] in self.axes)
        ]

    def _shard(self, leaf: Leaf, start: Decision, dim: int) -> Decision:
        entries, rules = list(start.entries), list(start.rules)
        entries[dim], rules[dim] = self.mesh_axes, f"rule FSDP({self.axis!r})"
        reason = f"FSDP: {dim_text(leaf, dim)} is the largest left"
        return _because(start, reason)._replace(entries=tuple(entries), rules=tuple(rules))

    def _unfit(self, leaf: Leaf, start: Decision, free: Sequence[int], parts: int) -> Decision:
        if self.otherwise is not None:
            kept = apply_spec(leaf, self.otherwise, start, f"FSDP: none divides, otherwise {spec_text(self.otherwise)}")
            return kept._replace(pending=start.pending, unsettled=start.unsettled)
        sizes = ", ".join(f"{dim_text(leaf, dim)}={leaf.shape[dim]}" for dim in free)
        wanted = f"a multiple of {axes_text(self.mesh_axes)}={parts}"
        why = f"FSDP({self.axis!r}): none of its whole dimensions ({sizes}) is {wanted}"
        remedy = "pad one of them, raise `min_size`, or write `otherwise=P()` to leave such leaves as they are"
        return start._replace(problems=(*start.problems, (why, remedy)))

    @property
    def _key(self) -> tuple[object, ...]:
        return (self.axis, self.min_size, self.axes, self.otherwise)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FSDP) and self._key == other._key

    def __hash__(self) -> int:
        return hash((FSDP, self._key))

    def __repr__(self) -> str:
        given = [repr(self.axis)]
        given += [f"min_size={self.min_size}"] if self.min_size != 2**18 else []
        given += [f"axes={self.axes!r}"] if self.axes is not None else []
        given += [f"otherwise={spec_text(self.otherwise)}"] if self.otherwise is not None else []
        return f"FSDP({', '.join(given)})"


def _names(given: Any) -> tuple[str, ...]:
    """Names as a tuple; none at all where one is no name."""
    several = tuple(given) if isinstance(given, tuple | list) else ()
    return several if all(isinstance(name, str) and name for name in several) else ()


def _because(decision: Decision, reason: str) -> Decision:
    return decision._replace(reason="; ".join(filter(None, (decision.reason, reason))))
