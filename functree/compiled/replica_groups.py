"""The replica groups of a collective ─► the mesh axes over which it communicates.

The compilers write groups in several spellings, side by side in one text. All of them list
positions in the mesh that the program was compiled for, and not the ids of devices. The mesh that a
spelling names may have other axes than the user's, with names that the compiler made up, so the
groups are always written out and compared with the user's mesh.
"""

import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

Group = tuple[int, ...]
"""Positions in a mesh, in row-major order, that communicate with each other."""

# `[4,2]<=[2,4]T(1,0)`
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# `mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}`: the sizes, the order, the chosen axes
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}")
_SIZE = re.compile(r"'?([^',=]+)'?=(\d+)")
_AXIS = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
# `{{0,1},{2,3}}`
_LIST = re.compile(r"\{([\d,]*)\}")


def groups_of(text: str, devices: int) -> tuple[Group, ...] | None:
    """The groups of `replica_groups=`, or the pairs of `source_target_pairs=`.

    None for a spelling that is not known.

    Args:
        text: the value of the attribute.
        devices: the number of devices.
    """
    text = text.strip()
    if text == "{}":  # all devices
        return (tuple(range(devices)),)
    if re.fullmatch(r"\{(\{[\d,]*\},?)*\}", text):
        return tuple(map(_numbers, _LIST.findall(text[1:-1])))
    iota = _IOTA.fullmatch(text)
    if iota is not None:
        ids = _iota(*iota.groups())
        if ids.ndim != 2:
            return None
        return _rows(ids)
    mesh = _MESH.fullmatch(text)
    if mesh is not None:
        return _of_mesh(*mesh.groups())
    return None


def mesh_axes_of(groups: Iterable[Group], sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes that vary within a group, in the order of the mesh.

    None if there are positions that the mesh does not have. A group may be a part of an axis only;
    the axis varies nevertheless.

    Args:
        groups: the groups.
        sizes: the mesh axes with their sizes.
    """
    shape = tuple(sizes.values())
    varying: set[str] = set()
    for group in set(groups):
        if max(group, default=0) >= math.prod(shape):
            return None
        if not group:
            continue
        coordinates = np.unravel_index(np.asarray(group, int), shape)
        for name, along in zip(sizes, coordinates, strict=True):
            if along.min() < along.max():
                varying.add(name)
    return tuple(name for name in sizes if name in varying)


def _numbers(text: str) -> Group:
    return tuple(int(number) for number in text.split(",") if number)


def _rows(ids: np.ndarray) -> tuple[Group, ...]:
    return tuple(map(tuple, ids.tolist()))


def _iota(shape: str, order: str, transposed: str | None) -> np.ndarray:
    """The numbers of `[4,2]<=[2,4]T(1,0)`.

    They count from 0 in the shape (2, 4), are transposed by (1, 0), and have the shape (4, 2) then.
    """
    ids = np.arange(math.prod(_numbers(order))).reshape(_numbers(order))
    if transposed is not None:
        ids = ids.transpose(_numbers(transposed))
    return ids.reshape(_numbers(shape))


_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


def _of_mesh(axes: str, order: str | None, chosen: str) -> tuple[Group, ...] | None:
    """`mesh['x'=4,'y'=2] {'x'}`: positions that differ along x only; `{'x':(2)2}` is the minor half
    of x.

    The part of an axis behind its name is (the product of the sizes of the parts before it) and its
    own size.
    """
    sizes = {name: int(size) for name, size in _SIZE.findall(axes)}
    ids = _device_ids(math.prod(sizes.values()), order)
    if ids is None:
        return None
    # Each axis is a dimension of `ids`; one of which a part is chosen is three dimensions: what is
    # before that part, the part itself, what is behind it.
    parts = {name: [size] for name, size in sizes.items()}
    moved: list[tuple[str, int]] = []  # the dimensions along which a group goes
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
    shape: list[int] = []
    starts: dict[str, int] = {}  # the first dimension of each axis
    for name, dimensions in parts.items():
        starts[name] = len(shape)
        shape += dimensions
    # The dimensions of a group last, in the order in which the text names them.
    last = [starts[name] + part for name, part in moved]
    others = [i for i in range(len(shape)) if i not in last]
    group = math.prod(shape[i] for i in last)
    return _rows(ids.reshape(shape).transpose(*others, *last).reshape(-1, group))


def _device_ids(number: int, order: str | None) -> np.ndarray | None:
    """The positions of the devices of a mesh in its row-major order; None if they are others.

    Args:
        number: the number of devices.
        order: the text of `device_ids=`; None if they are in order.
    """
    if order is None:
        return np.arange(number)
    known = _ORDER.fullmatch(order)
    if known is None:
        ids = np.asarray(_numbers(order))
    else:
        ids = _iota(str(number), *known.groups())
    if ids.size != number:
        return None
    return ids
