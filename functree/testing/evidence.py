"""This module records the values of programs on one device and on a mesh, to compare them."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.core import ShapedArray

from functree.calls.program import around
from functree.testing.intermediates import Site, Watch, run
from functree.testing.numbers import has_numbers, numbers, rounding, wide
from functree.testing.programs import Program, Sampler
from functree.testing.relations import Compared
from functree.testing.scopes import Pairs, Records, Scope
from functree.testing.steps import Body

Tiles = tuple[int, ...]
"""The number of tiles along each dimension of an array."""

# A value may differ by this multiple of its change under perturbed arguments.
_MARGIN = 8


class Values:
    """The values of two programs of one function.

    Args:
        pairs: the operations that the programs have in common.
        one: the program on one device.
        many: the program on the mesh.

    Attributes:
        arrays: the sharded values on the mesh.
        left: the values on one device.
        right: the values on the mesh.
    """

    def __init__(self, pairs: Pairs, one: Program, many: Program):
        self._tiles = tiles_of(pairs)
        on_one, on_many = map(_recording, (one, many))
        self.arrays: Mapping[Site, jax.Array] = on_many(many.arrays)
        self.left, self.right = fetched(on_one(one.arrays)), fetched(self.arrays)
        # The values for perturbed arguments, once for each of two seeds.
        self._draws = [fetched(on_one(one.perturbed(seed))) for seed in (0, 1)]

    def compared(self, scope: Scope, j: int, result: int) -> Compared | None:
        """Return a step's result in both programs by tile, or None if they cannot be compared."""
        i = scope.pairs.left_of.get(j, -1)
        site = (*scope.left.at, i, result)
        parts = scope.right.of(self.right, j, result)
        if parts is None or site not in self._tiles:
            return None
        whole, noise = self._tiled(scope, site, self.left), 0.0
        for draw in self._draws:
            distance = _distance(whole, self._tiled(scope, site, draw))
            noise = max(noise, distance.max(initial=0))
        kind = scope.pairs.left.steps[i].types[result]
        tolerance = 32 * rounding(kind.dtype) * abs(whole) + _MARGIN * noise
        return Compared(whole, np.asarray(tolerance), wide(parts))

    def _tiled(self, scope: Scope, site: Site, records: Records) -> np.ndarray:
        """Cut a value into tiles.

        The first indices select a tile, and the rest select an element in the tile.
        """
        record = wide(scope.left.viewed(records[site]))
        # The dimensions of a shard_map's mesh, which have size 1 on one device, are removed.
        record = record.reshape(record.shape[len(scope.axes) :])
        tiles = self._tiles[site]
        if tiles is None:
            return record
        tiles = (*tiles, *(1,) * (record.ndim - len(tiles)))
        cut: list[int] = []
        for size, number in zip(record.shape, tiles, strict=True):
            cut += [number, size // number]
        order = [*range(0, 2 * record.ndim, 2), *range(1, 2 * record.ndim, 2)]
        return record.reshape(cut).transpose(order)


def _recording(program: Program) -> Sampler:
    return program.watched(_every_value(program))


def count_numbers(program: Program) -> int:
    """Count the numbers that `Values` records for a program."""
    watch = _every_value(program)
    with around(program.mesh):
        records = jax.eval_shape(
            lambda *arrays: run(program.body, arrays, watch)[1], *program.arrays
        )
    return sum(math.prod(record.shape) for record in records.values())


def _every_value(program: Program) -> Watch:
    return values_of([site for site, _, _ in sites_of(program.body)])


def tiles_of(pairs: Pairs) -> dict[Site, Tiles | None]:
    """Return the tiles into which a shard_map's devices cut each value that can be compared.

    The tiles are None for a value outside shard_maps. The keys are the values' sites in the program
    on one device.
    """
    found: dict[Site, Tiles | None] = {}
    for left, one, other, manual in pairs.sites():
        for result, (whole, part) in enumerate(zip(one.types, other.types, strict=True)):
            if not (has_numbers(whole) and has_numbers(part)):
                continue
            if manual:
                tiles = _tiles(whole.shape, part.shape)
                if tiles is not None:
                    found[(*left, result)] = tiles
            elif whole.shape == part.shape:
                found[(*left, result)] = None
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


def sites_of(body: Body, at: Site = ()) -> Iterator[tuple[Site, ShapedArray, bool]]:
    """Yield the sites and types of all values, and whether they leave their source line or body.

    The other values may be infinite or differ without harm, as in `jnp.where(x > 0, 1 / x, 0)`.
    """
    for index, step in enumerate(body.steps):
        for result, (value, kind) in enumerate(zip(step.outs, step.types, strict=True)):
            if not step.places and has_numbers(kind):
                yield (*at, index, result), kind, value in body.crossing
        for inner, one in enumerate(step.bodies):
            yield from sites_of(one, (*at, index, inner))


def values_of(sites: Collection[Site]) -> Watch:
    """Build a watch that records complete values."""
    return Watch(frozenset(sites), lambda site, x: numbers(x))


def fetched(records: Mapping[Site, jax.Array]) -> dict[Site, np.ndarray]:
    """Copy records to the host."""
    return dict(zip(records, jax.device_get(list(records.values())), strict=True))


def _distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the distances between numbers.

    The distance is one for different integers, and zero if a number is not finite.
    """
    if not np.issubdtype(one.dtype, np.inexact):
        return (one != other).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(abs(one - other), posinf=0.0)
