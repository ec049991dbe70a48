"""`trials` pairs the meshes and the layouts that an exploration tries."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
from jax.tree_util import tree_leaves

from functree.argument_checks import SIZE, shown
from functree.devices.meshes import mesh_view
from functree.devices.specs import mesh_axes as entry_axes
from functree.devices.targets import Target
from functree.errors import RuleError, ShardingError, count
from functree.layout.fsdp import FSDP
from functree.layout.layout import (
    Composition,
    FunctionLayout,
    Layout,
    LayoutTree,
    Modifier,
    SpecLayout,
    as_layout,
    is_layout,
)
from functree.layout.plan.plan import Plan
from functree.layout.rules import AxisRules
from functree.layout.state_sharding import StateSharding


class Trial(NamedTuple):
    """A mesh and a layout to try.

    Attributes:
        sizes: the sizes of the mesh axes.
        name: the name of the layout.
    """

    sizes: Mapping[str, int]
    name: str


def trials(meshes: Any, layouts: Mapping[str, LayoutTree], target: Target | None) -> list[Trial]:
    """Pair meshes with layouts, in the given order.

    Each given mesh is paired with each layout. A mesh made from a number of devices is paired only
    with the layouts that name all its mesh axes of size above 1.

    Raises:
        ShardingError: if an entry of `meshes` is not a mesh.
        ShardingError: if a mesh does not have the target's number of devices.
        ShardingError: if a mesh has more devices than this machine.
        RuleError: if `meshes` contains a number of devices, but the layouts name no mesh axes.
    """
    by_key: dict[tuple[tuple[tuple[str, int], ...], str], Trial] = {}
    for mesh in _listed(meshes):
        if isinstance(mesh, Mapping):
            pairs = [(mesh_view(mesh).sizes, name) for name in layouts]
        else:
            pairs = list(_factored(mesh, layouts))
        for sizes, name in pairs:
            _check_devices(sizes, target)
            by_key[tuple(sizes.items()), name] = Trial(sizes, name)
    return list(by_key.values())


def _listed(meshes: Any) -> Sequence[Mapping[str, int] | int]:
    """Return a list of meshes, from one mesh or several."""
    if isinstance(meshes, Mapping) or SIZE.fits(meshes):
        meshes = [meshes]
    is_list = isinstance(meshes, Iterable) and not isinstance(meshes, str)
    entries: list[Any] = list(meshes) if is_list else []
    for entry in entries:
        if not isinstance(entry, Mapping) and not SIZE.fits(entry):
            raise ShardingError(f"explore: {shown(entry)} is not a mesh: {_MESHES}")
    if not entries:
        raise ShardingError(f"explore: invalid meshes={shown(meshes)}: {_MESHES}")
    return entries


_MESHES = 'give dicts of sizes, such as `[{"data": 8, "model": 4}]`, or the total number of devices'


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
    for sizes in _factorings(devices, len(names)):
        mesh = dict(zip(names, sizes, strict=True))
        for name, axes in used.items():
            # Along a mesh axis that the layout does not name, all devices would do the same work.
            if all(size == 1 or axis in axes for axis, size in mesh.items()):
                yield mesh, name


def _factorings(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all factorings of a number into `parts` factors, the largest first factor first."""
    if parts == 1:
        yield (number,)
        return
    for first in range(number, 0, -1):
        if number % first == 0:
            for others in _factorings(number // first, parts - 1):
                yield (first, *others)


def named_mesh_axes(layouts: LayoutTree) -> tuple[str, ...]:
    """Return the mesh axes that a layout, or a tree of layouts, names, in order of appearance."""
    names: dict[str, None] = {}
    for layout in tree_leaves(layouts, is_leaf=is_layout):
        if is_layout(layout):
            names |= dict.fromkeys(_named(as_layout(layout)))
    return tuple(names)


def _named(layout: Layout) -> Iterator[str]:
    match layout:
        case AxisRules():
            for rule in layout.table:
                yield from rule.mesh_axes
        case FSDP():
            yield from layout.mesh_axes
        case SpecLayout():
            for entry in layout.spec.partitions:
                yield from entry_axes(entry)
        case Composition():
            for part in layout.parts:
                yield from _named(part)
        case StateSharding():
            yield from named_mesh_axes(list(layout.layouts))
        case Modifier():
            yield from _named(layout.layout)
        case Plan():
            yield from named_mesh_axes([row.spec for row in layout.rows])
        case FunctionLayout():
            pass  # its mesh axes are unknown


def _check_devices(sizes: Mapping[str, int], target: Target | None) -> None:
    """Raise ShardingError if a mesh does not fit the target, or this machine lacks devices."""
    needed = math.prod(sizes.values())
    asked = " × ".join(f"{name}={size}" for name, size in sizes.items())
    have = f"explore: the mesh {asked} has {count(needed, 'device')}"
    if target is not None and needed != target.size:
        raise ShardingError(
            f"{have}, but target={target.text!r} has {target.size}: give a mesh with "
            f"{count(target.size, 'device')}, or a different target"
        )
    if target is None and needed > len(jax.devices()):
        verb = "is" if len(jax.devices()) == 1 else "are"
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        raise ShardingError(
            f"{have}, but there {verb} {len(jax.devices())}: give a target, such as "
            f'`target="tpu:v5e:2x4"`, or set {flag} before importing jax'
        )
