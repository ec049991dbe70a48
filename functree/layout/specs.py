"""A `PartitionSpec` and its entries ─► their texts, and what no mesh could have an axis for."""

from collections.abc import Sequence

from jax.sharding import PartitionSpec


def axes_text(mesh_axes: Sequence[str]) -> str:
    """Mesh axes as messages name them."""
    return mesh_axes[0] if len(mesh_axes) == 1 else f"({', '.join(mesh_axes)})" if mesh_axes else "None"


def entry(mesh_axes: Sequence[str]) -> str | tuple[str, ...] | None:
    """One entry of a PartitionSpec."""
    return None if not mesh_axes else mesh_axes[0] if len(mesh_axes) == 1 else tuple(mesh_axes)


def spec_text(spec: PartitionSpec) -> str:
    """A spec as one writes it."""
    parts = [repr(e) if e is not PartitionSpec.UNCONSTRAINED else "P.UNCONSTRAINED" for e in spec.partitions]
    parts += [f"unreduced={set(spec.unreduced)!r}"] if spec.unreduced else []
    parts += [f"reduced={set(spec.reduced)!r}"] if spec.reduced else []
    return f"P({', '.join(parts)})"


def odd_entry(spec: PartitionSpec) -> str | None:
    """What no mesh could have an axis for, among the entries of a spec; JAX takes anything."""
    for item in spec.partitions:
        axes = item if isinstance(item, tuple) else (item,)
        if item not in (None, PartitionSpec.UNCONSTRAINED) and not all(isinstance(axis, str) for axis in axes):
            return f"{item!r} is neither a mesh axis, a tuple of them, nor `None`"
    return None
