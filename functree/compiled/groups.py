"""The replica groups of a collective ─► the mesh axes over which it communicates.

The compilers write groups in several spellings, side by side in one text. All of them list positions in the mesh that
the program was compiled for, and not the ids of devices. The mesh that a spelling names may have other axes than the
user's, with names that the compiler made up, so the groups are always written out and compared with the user's mesh.
"""

import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

Group = tuple[int, ...]
"""Positions in a mesh, in row-major order, that communicate with each other."""

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}")
_SIZE = re.compile(r"'?([^',=]+)'?=(\d+)")
_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
_LIST = re.compile(r"\{([\d,]*)\}")


def groups_of(text: str, devices: int) -> tuple[Group, ...] | None:
    """The groups of `replica_groups=`, or the pairs of `source_target_pairs=`; None for a spelling that is not known.

    Args:
        text: the value of the attribute.
        devices: the number of devices.
    """
    text = text.strip()
    if text == "{}":
        return (tuple(range(devices)),)
    if re.fullmatch(r"\{(\{[\d,]*\},?)*\}", text):
        return tuple(_numbers(inner) for inner in _LIST.findall(text[1:-1]))
    if (iota := _IOTA.fullmatch(text)) is not None:
        ids = _iota(*iota.groups())
        return None if ids.ndim != 2 else _rows(ids)
    if (mesh := _MESH.fullmatch(text)) is not None:
        return _of_mesh(*mesh.groups())
    return None


def mesh_axes_of(groups: Iterable[Group], sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes that vary within a group, in the order of the mesh; None if the mesh has other positions.

    A group may be a part of an axis only; the axis varies nevertheless.

    Args:
        groups: the groups.
        sizes: the mesh axes with their sizes.
    """
    shape = tuple(sizes.values())
    varying: set[int] = set()
    for group in set(groups):
        if any(position >= math.prod(shape) for position in group):
            return None
        coordinates = np.unravel_index(np.asarray(group, int), shape) if group else ()
        varying.update(i for i, along in enumerate(coordinates) if len(set(along.tolist())) > 1)
    return tuple(name for i, name in enumerate(sizes) if i in varying)


def _numbers(text: str) -> Group:
    return tuple(int(number) for number in text.split(",") if number)


def _rows(ids: np.ndarray) -> tuple[Group, ...]:
    return tuple(map(tuple, ids.tolist()))


def _iota(shape: str, order: str, transposed: str | None) -> np.ndarray:
    """`[4,2]<=[2,4]T(1,0)`: the numbers from 0 in the shape (2, 4), transposed, in the shape (4, 2)."""
    ids = np.arange(math.prod(_numbers(order))).reshape(_numbers(order))
    if transposed is not None:
        ids = ids.transpose(_numbers(transposed))
    return ids.reshape(_numbers(shape))


_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


def _of_mesh(axes: str, order: str | None, chosen: str) -> tuple[Group, ...] | None:
    """`mesh['x'=4,'y'=2] {'x'}`: positions that differ along x only; `{'x':(2)2}` is the minor half of x.

    The part of an axis behind its name is (the product of the sizes of the parts before it) and its own size.
    """
    sizes = {name: int(size) for name, size in _SIZE.findall(axes)}
    shape = tuple(sizes.values())
    ids = np.arange(math.prod(shape))
    if order is not None:
        known = _ORDER.fullmatch(order)
        ids = _iota(str(len(ids)), *known.groups()) if known is not None else np.asarray(_numbers(order))
        if ids.size != math.prod(shape):
            return None
    # Each axis in its parts: those before the chosen part, the part itself, those behind it.
    parts = {name: [size] for name, size in sizes.items()}
    moved: list[tuple[str, int]] = []
    for name, before, size in _AXIS.findall(chosen):
        if name not in sizes:
            return None
        if not before:
            moved.append((name, 0))
            continue
        if len(parts[name]) > 1:
            return None  # two parts of one axis, which no compiler has been seen to write
        parts[name] = [int(before), int(size), sizes[name] // (int(before) * int(size))]
        moved.append((name, 1))
    starts = dict(zip(parts, np.cumsum([0, *map(len, parts.values())])[:-1].tolist(), strict=True))
    ids = ids.reshape([size for several in parts.values() for size in several])
    last = [starts[name] + part for name, part in moved]
    kept = [i for i in range(ids.ndim) if i not in last]
    group = math.prod(ids.shape[i] for i in last)
    return _rows(ids.transpose(*kept, *last).reshape(-1, group))
