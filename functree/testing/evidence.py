"""This module records the values of programs on one device and on a mesh, to compare them."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray

from functree.testing.checksums import (
    Tiles,
    checksum,
    has_checksum,
    numbers,
    rounding,
    wide,
)
from functree.testing.intermediates import Site, Watch
from functree.testing.programs import Program, Sampler
from functree.testing.relations import Compared, distances
from functree.testing.scopes import Pairs, Records, Scope
from functree.testing.steps import Body

# A value may differ by this multiple of its change under perturbed arguments.
_MARGIN = 8


class Watched:
    """Two programs of one function, compiled to compute checksums of their values.

    The checksums cover the values that leave their source line (see `crossing`).

    Args:
        pairs: the operations that the programs have in common.
        one: the program on one device.
        many: the program on the mesh.
    """

    def __init__(self, pairs: Pairs, one: Program, many: Program):
        tiles = self._tiles = tiles_of(pairs)
        left, right = dict(crossing(one.body)), dict(crossing(many.body))
        self._on_one = one.watched(Watch(left, lambda site, x: checksum(x, tiles.get(site), True)))
        self._on_many = many.watched(Watch(right, lambda site, x: checksum(x)))

    def checksums(self, one: Program, many: Program) -> "Checksums":
        """Compute the checksums for the programs' current arrays."""
        return Checksums(
            self._tiles,
            fetched(self._on_one(one.arrays)),
            _draws(self._on_one, one),
            fetched(self._on_many(many.arrays)),
        )


@dataclass(frozen=True)
class Checksums:
    """Checksums of the values that leave their source line.

    Attributes:
        tiles: the tiles of each value that can be compared, as in `tiles_of`.
        left: the checksums on one device, with the sums of absolute values.
        draws: the checksums on one device for perturbed arguments, each draw with a different seed.
        right: the checksums on the mesh.
    """

    tiles: Mapping[Site, Tiles]
    left: Records
    draws: Sequence[Records]
    right: Records

    def compared(self, scope: Scope, j: int, result: int) -> Compared | None:
        """Return the checksums of a step's result in both programs, or None if there are none."""
        i = scope.pairs.left_of.get(j)
        if i is None or (*scope.left.at, i, result) not in self.tiles:
            return None
        left = scope.left.of(self.left, i, result)
        parts = scope.right.of(self.right, j, result)
        if left is None or parts is None:
            return None
        # The dimensions of a shard_map's mesh, which have size 1 on one device, are removed.
        whole, size = left.reshape(left.shape[len(scope.axes) :])
        noise = np.zeros(whole.shape)
        for draw in self.draws:
            other = scope.left.viewed(draw[*scope.left.at, i, result]).reshape(2, *whole.shape)[0]
            noise = np.maximum(noise, _finite(distances(whole, other)))
        kind = scope.pairs.left.steps[i].types[result]
        tolerance = _MARGIN * noise + size * _rounding_of_sum(kind, whole.size)
        return Compared(whole, tolerance, parts)


class Values:
    """Complete values of some steps, and checksums of the other steps.

    Attributes:
        arrays: the sharded values on the mesh.
    """

    def __init__(
        self, coarse: Checksums, one: Program, many: Program, sites: Sequence[tuple[Site, Site]]
    ):
        self._coarse = coarse
        left, right = zip(*sites, strict=True)
        on_one, on_many = one.watched(values_of(left)), many.watched(values_of(right))
        self.arrays: Mapping[Site, jax.Array] = on_many(many.arrays)
        self._one, self._many = fetched(on_one(one.arrays)), fetched(self.arrays)
        self._draws = _draws(on_one, one)

    def compared(self, scope: Scope, j: int, result: int) -> Compared | None:
        """Return a step's result in both programs by tile.

        If the complete values were not recorded, return their checksums, or None if there are none.
        """
        i = scope.pairs.left_of.get(j, -1)
        site = (*scope.left.at, i, result)
        parts = scope.right.of(self._many, j, result)
        if parts is None or site not in self._coarse.tiles or site not in self._one:
            return self._coarse.compared(scope, j, result)
        whole, noise = self._tiled(scope, site, self._one[site]), 0.0
        for draw in self._draws:
            distance = distances(whole, self._tiled(scope, site, draw[site]))
            noise = max(noise, _finite(distance).max(initial=0))
        kind = scope.pairs.left.steps[i].types[result]
        tolerance = 32 * rounding(kind.dtype) * abs(whole) + _MARGIN * noise
        return Compared(whole, np.asarray(tolerance), wide(parts))

    def _tiled(self, scope: Scope, site: Site, record: np.ndarray) -> np.ndarray:
        """Cut a value into tiles.

        The first indices select a tile, and the rest select an element in the tile.
        """
        record = wide(scope.left.viewed(record))
        record = record.reshape(record.shape[len(scope.axes) :])
        tiles = self._coarse.tiles[site]
        tiles = (*tiles, *(1,) * (record.ndim - len(tiles)))
        cut: list[int] = []
        for size, number in zip(record.shape, tiles, strict=True):
            cut += [number, size // number]
        order = [*range(0, 2 * record.ndim, 2), *range(1, 2 * record.ndim, 2)]
        return record.reshape(cut).transpose(order)


def tiles_of(pairs: Pairs) -> dict[Site, Tiles]:
    """Return the tiles into which a shard_map's devices cut each value that can be compared.

    A value outside shard_maps is one tile. The keys are the values' sites in the program on one
    device.
    """
    found: dict[Site, Tiles] = {}
    for left, one, other, manual in pairs.sites():
        for result, (whole, part) in enumerate(zip(one.types, other.types, strict=True)):
            if has_checksum(whole) and has_checksum(part):
                tiles = _tiles(whole.shape, part.shape)
                if tiles is not None and (manual or whole.shape == part.shape):
                    found[(*left, result)] = tiles
    return found


def _tiles(whole: Sequence[int], part: Sequence[int]) -> Tiles | None:
    """Return the number of tiles along each dimension, or None if the shapes do not fit."""
    if len(whole) != len(part):
        return None
    tiles: list[int] = []
    for size, local in zip(whole, part, strict=True):
        if size == local:
            tiles.append(1)
        elif local and size % local == 0:
            tiles.append(size // local)
        else:
            return None
    return tuple(tiles)


def crossing(body: Body, at: Site = ()) -> Iterator[tuple[Site, ShapedArray]]:
    """Yield the sites and types of the values that leave their source line, or their body.

    Other values may be infinite or differ without harm, as in `jnp.where(x > 0, 1 / x, 0)`.
    """
    for index, step in enumerate(body.steps):
        for result, (value, kind) in enumerate(zip(step.outs, step.types, strict=True)):
            if value in body.crossing and not step.places and has_checksum(kind):
                yield (*at, index, result), kind
        for inner, one in enumerate(step.bodies):
            yield from crossing(one, (*at, index, inner))


def values_of(sites: Collection[Site]) -> Watch:
    """Build a watch that records complete values instead of checksums."""
    return Watch(frozenset(sites), lambda site, x: numbers(x))


def fetched(records: Mapping[Site, jax.Array]) -> dict[Site, np.ndarray]:
    """Copy records to the host."""
    return dict(zip(records, jax.device_get(list(records.values())), strict=True))


def _draws(run: Sampler, program: Program) -> list[Records]:
    """Return the records for perturbed arguments, once for each of two seeds."""
    return [fetched(run(program.perturbed(seed))) for seed in (0, 1)]


def _finite(distance: np.ndarray) -> np.ndarray:
    """Replace infinite distances with zero, since such numbers show nothing about rounding."""
    return np.nan_to_num(distance, posinf=0.0)


def _rounding_of_sum(kind: Any, tiles: int) -> float:
    """Return how much rounding may change a checksum, relative to the sum of absolute terms.

    Each element may be rounded differently, mostly with random signs, and the order of the sum may
    differ.
    """
    terms = max(1, math.prod(kind.shape) // max(1, tiles))
    own, of_sum = rounding(kind.dtype), min(rounding(kind.dtype), rounding(np.dtype(np.float32)))
    return own * max(2.0, 16 / math.sqrt(terms)) + of_sum * (8 + math.sqrt(terms))
