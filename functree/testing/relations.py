"""`relate` finds how the parts of a value on a mesh relate to the value on one device."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from functree.devices.meshes import axes_text, entry, parts_over, spec_text

Assignment = tuple[tuple[str, ...], ...]
"""The mesh axes that shard each dimension of an array."""


class Compared(NamedTuple):
    """A value on one device and on the mesh, with the tolerance of their comparison.

    Attributes:
        whole: a number or an array for each tile on one device, by the indices of the tile.
        tolerance: the tolerance, as one number, or as one number for each element of `whole`.
        parts: the corresponding number or array on each device, by the device's indices on the
            mesh.
    """

    whole: np.ndarray
    tolerance: np.ndarray
    parts: np.ndarray


class Kind(Enum):
    """The kind of relation between the parts on devices and the whole value."""

    SAME = "each device has its part of the same value"
    PARTIAL = "each device has one term, and the sum of the terms is the value"
    MEAN = "each device has one term, and the mean of the terms is the value"
    OTHER = "the devices have different values"
    UNKNOWN = "there is nothing to compare with"


@dataclass(frozen=True)
class Relation:
    """The relation between the parts on devices and the whole value.

    Attributes:
        kind: the kind of relation.
        assignment: the mesh axes that shard each dimension; empty if they are unknown.
        over: the mesh axes over which a sum or mean is still missing.
    """

    kind: Kind
    assignment: Assignment = ()
    over: tuple[str, ...] = ()

    def __str__(self) -> str:
        spec = spec_text(PartitionSpec(*map(entry, self.assignment)))
        if self.kind in _REDUCTIONS:
            what = _REDUCTIONS[self.kind]
            return f"{spec}, with the terms of a {what} over {axes_text(self.over)}"
        return spec

    @property
    def missing(self) -> str:
        """The missing reduction: `sum` or `mean`; empty if there is none."""
        return _REDUCTIONS.get(self.kind, "")


_REDUCTIONS = {Kind.PARTIAL: "sum", Kind.MEAN: "mean"}


UNKNOWN = Relation(Kind.UNKNOWN)
OTHER = Relation(Kind.OTHER)


def relate(
    whole: np.ndarray, tolerance: np.ndarray, parts: np.ndarray, axes: Mapping[str, int]
) -> Relation:
    """Find the relation between the parts on devices and the whole value.

    Args:
        whole: a number or an array for each tile of the whole value, by the indices of the tile.
        tolerance: the tolerance, as one number, or as one number for each element of `whole`.
        parts: the corresponding number or array on each device, by the device's indices on the
            mesh.
        axes: the sizes of the mesh axes, in the order of these indices.
    """
    ndim = parts.ndim - len(axes)
    tiles = whole.shape[: whole.ndim - ndim]
    tolerance = np.broadcast_to(tolerance, whole.shape)
    for assignment in assignments(tiles, axes):
        expected = on_devices(whole, assignment, axes)
        margin = on_devices(tolerance, assignment, axes)
        if agree(expected, parts, margin):
            return Relation(Kind.SAME, assignment)
        terms = _terms(expected, parts, margin, assignment, axes)
        if terms is not None:
            return terms
    return OTHER


def _terms(
    expected: np.ndarray,
    parts: np.ndarray,
    margin: np.ndarray,
    assignment: Assignment,
    axes: Mapping[str, int],
) -> Relation | None:
    """Return the relation if the sum or mean of the parts over mesh axes equals `expected`."""
    used = set(itertools.chain(*assignment))
    free = [axis for axis in axes if axis not in used and axes[axis] > 1]
    for number in range(1, len(free) + 1):
        for over in itertools.combinations(free, number):
            dims = tuple(map(list(axes).index, over))
            total = np.broadcast_to(parts.sum(dims, keepdims=True, dtype=parts.dtype), parts.shape)
            if agree(expected, total, 4 * margin):
                return Relation(Kind.PARTIAL, assignment, over)
            mean = total / parts_over(over, axes)
            if np.issubdtype(parts.dtype, np.inexact) and agree(expected, mean, 4 * margin):
                return Relation(Kind.MEAN, assignment, over)
    return None


def assignments(tiles: Sequence[int], axes: Mapping[str, int]) -> Iterator[Assignment]:
    """Yield all ways to cut an array into tiles along mesh axes, using each axis at most once."""
    if not tiles:
        yield ()
        return
    first, rest = tiles[0], tiles[1:]
    for number in range(len(axes) + 1 if first > 1 else 1):
        for chosen in itertools.permutations(axes, number):
            if parts_over(chosen, axes) != first:
                continue
            left = {axis: size for axis, size in axes.items() if axis not in chosen}
            for others in assignments(rest, left):
                yield (chosen, *others)


def on_devices(whole: np.ndarray, assignment: Assignment, axes: Mapping[str, int]) -> np.ndarray:
    """Return the tile of each device, by its indices on the mesh."""
    coordinates = dict(zip(axes, np.indices(tuple(axes.values())), strict=True))
    tile: list[np.ndarray] = []
    for cut in assignment:
        index = np.zeros(tuple(axes.values()), int)
        for axis in cut:
            index = index * axes[axis] + coordinates[axis]
        tile.append(index)
    if not tile:
        return np.broadcast_to(whole, (*axes.values(), *whole.shape))
    return whole[tuple(tile)]


def distances(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Return the distances between numbers.

    The distance is zero between two numbers that are not finite, and infinite between a number that
    is finite and one that is not. Distances between unsigned integers, such as checksums, are
    modulo a power of two.
    """
    finite, found_finite = np.isfinite(expected), np.isfinite(found)
    with np.errstate(invalid="ignore"):
        distance = abs(found - expected)
    distance = np.where(finite & found_finite, distance, np.inf)
    return np.where(finite | found_finite, distance, 0.0)


def excess(expected: np.ndarray, found: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
    """Return which numbers differ by more than a tolerance.

    Integers may differ by any amount if their tolerance is positive.
    """
    distance = distances(expected, found)
    if not np.issubdtype(expected.dtype, np.inexact):
        return (distance > 0) & (tolerance <= 0)
    return distance > tolerance


def agree(expected: np.ndarray, found: np.ndarray, tolerance: np.ndarray) -> bool:
    """Return whether numbers are equal within a tolerance."""
    return not excess(expected, found, tolerance).any()
