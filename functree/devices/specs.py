"""This module reads, builds and formats specs: a `PartitionSpec` ─► its mesh axes and its text."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax
from jax.sharding import AxisType, PartitionSpec

from functree.tree.arrays import AnyArray

Entry = str | tuple[str, ...] | None
"""One entry of a spec: a mesh axis, several mesh axes, or `None` for an unsharded dimension."""


def mesh_axes(entry: object) -> tuple[str, ...]:
    """Return the mesh axes in an entry of a spec. `None` and `P.UNCONSTRAINED` contain none."""
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple):
        return entry
    return ()


def entry(axes: Sequence[str]) -> Entry:
    """Return the entry of a spec for some mesh axes."""
    if not axes:
        return None
    if len(axes) == 1:
        return axes[0]
    return tuple(axes)


def named_axes(spec: PartitionSpec) -> set[str]:
    """Return all mesh axes that a spec names."""
    return {axis for one in spec.partitions for axis in mesh_axes(one)}


def without(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """Return a spec without some mesh axes."""
    entries: list[Entry] = []
    for one in spec.partitions:
        kept = [axis for axis in mesh_axes(one) if axis not in axes]
        entries.append(entry(kept))
    return PartitionSpec(*entries)


def of_rank(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Return a spec with one entry for each dimension."""
    return PartitionSpec(*spec.partitions, *[None] * (ndim - len(spec.partitions)))


def parts_over(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the number of shards that mesh axes divide an array into.

    A mesh axis without a size is ignored. If a mesh lacks it, this is reported separately.
    """
    return math.prod([sizes.get(axis, 1) for axis in axes])


def typed_spec(array: AnyArray) -> PartitionSpec | None:
    """Return the spec in an array's type, with one entry for each dimension.

    The spec names only Explicit mesh axes. It is None if the array's mesh has no such axes.
    """
    sharding = jax.typeof(array).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return of_rank(sharding.spec, array.ndim)


def axes_text(axes: Sequence[str]) -> str:
    """Format mesh axes for messages: `data`, `(data, model)`, or `None`."""
    if not axes:
        return "None"
    if len(axes) == 1:
        return axes[0]
    return f"({', '.join(axes)})"


def spec_text(spec: PartitionSpec) -> str:
    """Format a spec as a user writes it: `P('data', None)`."""
    parts: list[str] = []
    for one in spec.partitions:
        if one is PartitionSpec.UNCONSTRAINED:
            parts.append("P.UNCONSTRAINED")  # its `repr` lacks the `P.`
        else:
            parts.append(repr(one))
    if spec.unreduced:
        parts.append(f"unreduced={set(spec.unreduced)!r}")
    if spec.reduced:
        parts.append(f"reduced={set(spec.reduced)!r}")
    return f"P({', '.join(parts)})"


def invalid_entry(spec: PartitionSpec) -> str | None:
    """Explain which entry of a spec is invalid, or return None if all entries are valid."""
    # JAX does not check the values in a spec.
    for item in spec.partitions:
        if item is None or item is PartitionSpec.UNCONSTRAINED:
            continue
        names = item if isinstance(item, tuple) else (item,)
        if not all(isinstance(name, str) for name in names):
            return f"{item!r} is not a mesh axis, a tuple of mesh axes, or `None`"
    return None
