"""`candidates` pairs the meshes and the layouts that an exploration tries."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any

from jax.tree_util import tree_leaves

from functree.argument_checks import SIZE, Takes
from functree.devices.meshes import mesh_view
from functree.devices.specs import mesh_axes as entry_axes
from functree.errors import RuleError, count
from functree.explorer.ranking import Candidate
from functree.layout.fsdp import FSDP
from functree.layout.layout import Layout, LayoutTree, SpecLayout, as_layout, is_layout, walk
from functree.layout.plan.plan import Plan
from functree.layout.rules import AxisRules


def candidates(meshes: Any, layouts: Mapping[str, LayoutTree]) -> list[Candidate]:
    """Pair meshes with layouts, in the given order.

    Each given mesh is paired with each layout. A mesh made from a number of devices is paired only
    with the layouts that name all its mesh axes of size above 1.

    Raises:
        ShardingError: if a mesh has an invalid name or size.
        RuleError: if `meshes` contains a number of devices, but the layouts name no mesh axes.
    """
    by_key: dict[tuple[tuple[tuple[str, int], ...], str], Candidate] = {}
    for mesh in _listed(meshes):
        if isinstance(mesh, Mapping):
            pairs = [(mesh_view(mesh).sizes, name) for name in layouts]
        else:
            pairs = _factored(mesh, layouts)
        for sizes, name in pairs:
            by_key[tuple(sizes.items()), name] = Candidate(sizes, name, layout=layouts[name])
    return list(by_key.values())


def _listed(meshes: Any) -> Sequence[Any]:
    """Return a list of meshes, from one mesh or several."""
    return meshes if isinstance(meshes, list | tuple) else [meshes]


def _are_meshes(value: Any) -> bool:
    entries = _listed(value)
    return bool(entries) and all(isinstance(one, Mapping) or SIZE.fits(one) for one in entries)


MESHES = Takes(
    'dicts of sizes, such as `[{"data": 8, "model": 4}]`, or the total number of devices',
    _are_meshes,
)
"""The values that `candidates` accepts for meshes."""


def _factored(
    devices: int, layouts: Mapping[str, LayoutTree]
) -> Iterator[tuple[Mapping[str, int], str]]:
    """Yield all meshes of this many devices, each with the layouts that fit it.

    A layout fits a mesh if it names all mesh axes whose size is above 1.
    """
    used = {name: named_mesh_axes(layout) for name, layout in layouts.items()}
    # The compiled function may name a mesh axis that only some layouts use, so each mesh has all of
    # the mesh axes.
    names = list(dict.fromkeys(chain.from_iterable(used.values())))
    if not names:
        raise RuleError(
            f"explore: cannot divide {count(devices, 'device')}, because the layouts name no mesh "
            'axes that functree can read: pass dicts of sizes, such as `meshes=[{"data": 8}]`'
        )
    divisors = [size for size in range(devices, 0, -1) if devices % size == 0]
    for sizes in product(divisors, repeat=len(names)):
        if math.prod(sizes) != devices:
            continue
        mesh = dict(zip(names, sizes, strict=True))
        for name, axes in used.items():
            # Along a mesh axis that the layout does not name, all devices would do the same work.
            if all(size == 1 or axis in axes for axis, size in mesh.items()):
                yield mesh, name


def named_mesh_axes(layouts: LayoutTree) -> tuple[str, ...]:
    """Return the mesh axes that a layout, or a tree of layouts, names, in order of appearance."""
    names: dict[str, None] = {}
    for layout in tree_leaves(layouts, is_leaf=is_layout):
        if is_layout(layout):
            for part in walk(as_layout(layout)):
                names |= dict.fromkeys(_named(part))
    return tuple(names)


def _named(layout: Layout) -> Iterator[str]:
    """Yield the mesh axes that a layout names itself. Those in a function are unknown."""
    match layout:
        case AxisRules():
            for rule in layout.table:
                yield from rule.mesh_axes
        case FSDP():
            yield from layout.mesh_axes
        case SpecLayout():
            for entry in layout.spec.partitions:
                yield from entry_axes(entry)
        case Plan():
            yield from named_mesh_axes([row.spec for row in layout.rows])
