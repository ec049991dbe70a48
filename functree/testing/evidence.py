"""A function on one device and on a mesh ─► records of their values, which can be compared."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from functree.testing.checksums import Tiles, checksum, has_checksum, is_inexact
from functree.testing.intermediates import Site, Watch
from functree.testing.pairs import Pairs
from functree.testing.programs import Program, rounding
from functree.testing.scopes import Records, Scope
from functree.testing.search import Compared
from functree.testing.steps import Body
from functree.tree.arrays import is_key

# The draws by which it is found how much values depend on rounding.
_DRAWS = (0, 1)
# How many times as much as in these draws a value may differ.
_MARGIN = 8


class Watched:
    """Two programs of one function, compiled to make the checksums of the values that leave their
    line.

    Args:
        pairs: their operations.
        one: the program on one device.
        many: the program on the mesh.
    """

    def __init__(self, pairs: Pairs, one: Program, many: Program):
        tiles = self._tiles = tiles_of(pairs)
        left_sites = frozenset(site for site, _ in crossing(one.body))
        right_sites = frozenset(site for site, _ in crossing(many.body))
        self._on_one = one.watched(
            Watch(
                lambda site, x: checksum(x, tiles.get(site), True) if site in left_sites else None
            )
        )
        self._on_many = many.watched(
            Watch(lambda site, x: checksum(x) if site in right_sites else None)
        )

    def checksums(self, one: Program, many: Program) -> "Checksums":
        """The checksums for the arrays of the programs, which may be others than before."""
        return Checksums(
            self._tiles,
            fetched(self._on_one(one.arrays)),
            [fetched(self._on_one(one.perturbed(seed))) for seed in _DRAWS],
            fetched(self._on_many(many.arrays)),
        )


class Checksums:
    """Checksums of the values that leave their line.

    Attributes:
        tiles: for each value that can be compared, the tiles of it that are.
        left: those of the program on one device, with the size of the terms.
        right: those of the program on the mesh.
    """

    def __init__(
        self,
        tiles: Mapping[Site, Tiles | None],
        left: Records,
        draws: Sequence[Records],
        right: Records,
    ):
        self.tiles: Mapping[Site, Tiles | None] = tiles
        self.left: Records = left
        self.right: Records = right
        # For arguments that are off by a rounding.
        self._draws = draws

    def compared(self, scope: Scope, i: int, j: int, result: int) -> Compared | None:
        """The checksums of a value; None if there are none."""
        site = (*scope.left, i, result)
        recorded = site in self.left and (*scope.right, j, result) in self.right
        if not recorded or site not in self.tiles:
            return None
        on_device = len(scope.axes)
        left = scope.viewed(self.left[site])
        whole, size = left.reshape(left.shape[on_device:])
        noise = np.zeros(whole.shape)
        for draw in self._draws:
            other = scope.viewed(draw[site]).reshape(2, *whole.shape)[0]
            noise = np.maximum(noise, _distance(whole, other))
        parts = scope.viewed(self.right[*scope.right, j, result])
        kind = scope.pairs.left.steps[i].types[result]
        tolerance = _MARGIN * noise + size * _rounding_of_sum(kind, whole.size)
        return Compared(whole, tolerance, parts)


class Values:
    """The values of some steps themselves, and checksums of the others.

    Attributes:
        left: the checksums of the program on one device.
        right: those of the program on the mesh.
        arrays: the values on the mesh, as they lie.
    """

    def __init__(
        self, coarse: Checksums, one: Program, many: Program, sites: Sequence[tuple[Site, Site]]
    ):
        self._coarse = coarse
        self.left: Records = coarse.left
        self.right: Records = coarse.right
        left_sites = frozenset(site for site, _ in sites)
        right_sites = frozenset(site for _, site in sites)
        on_one = one.watched(values_of(left_sites))
        on_many = many.watched(values_of(right_sites))
        self.arrays: Mapping[Site, jax.Array] = on_many(many.arrays)
        self._one, self._many = fetched(on_one(one.arrays)), fetched(self.arrays)
        self._draws = [fetched(on_one(one.perturbed(seed))) for seed in _DRAWS]

    def compared(self, scope: Scope, i: int, j: int, result: int) -> Compared | None:
        """The tiles of a value, or their checksums; None if there is neither."""
        site, other = (*scope.left, i, result), (*scope.right, j, result)
        if site not in self._coarse.tiles or site not in self._one or other not in self._many:
            return self._coarse.compared(scope, i, j, result)
        whole = self._tiled(scope, site, self._one[site])
        noise = [
            _distance(whole, self._tiled(scope, site, draw[site])).max(initial=0)
            for draw in self._draws
        ]
        parts = _wide(scope.viewed(self._many[other]))
        kind = scope.pairs.left.steps[i].types[result]
        tolerance = 32 * rounding(kind.dtype) * abs(whole) + _MARGIN * max(noise)
        return Compared(whole, np.asarray(tolerance), parts)

    def _tiled(self, scope: Scope, site: Site, record: np.ndarray) -> np.ndarray:
        """A value, cut into tiles: first the indices of the tile, then those in it."""
        record = _wide(scope.viewed(record))
        record = record.reshape(record.shape[len(scope.axes) :])
        tiles = self._coarse.tiles[site]
        if tiles is None:
            return record
        tiles = (*tiles, *(1,) * (record.ndim - len(tiles)))
        cut: list[int] = []
        for size, number in zip(record.shape, tiles, strict=True):
            cut += [number, size // number]
        order = [*range(0, 2 * record.ndim, 2), *range(1, 2 * record.ndim, 2)]
        return record.reshape(cut).transpose(order)


def tiles_of(pairs: Pairs) -> dict[Site, Tiles | None]:
    """For each value of the left body that can be compared: into how many tiles the devices of a
    shard_map cut it; None outside of shard_maps."""
    found: dict[Site, Tiles | None] = {}
    for left, one, _, other, manual in pairs.sites():
        for result, (whole, part) in enumerate(zip(one.types, other.types, strict=True)):
            if not (has_checksum(whole) and has_checksum(part)):
                continue
            if not manual:
                if whole.shape == part.shape:
                    found[(*left, result)] = None
            elif _divides(part.shape, whole.shape):
                found[(*left, result)] = tuple(
                    size // local if local else 1
                    for size, local in zip(whole.shape, part.shape, strict=True)
                )
    return found


def _divides(part: Sequence[int], whole: Sequence[int]) -> bool:
    if len(part) != len(whole):
        return False
    return all(
        size == local or (local and size % local == 0)
        for size, local in zip(whole, part, strict=True)
    )


def crossing(body: Body, at: Site = ()) -> Iterator[tuple[Site, ShapedArray]]:
    """The values that leave their line, with their types.

    One that does not may be infinite, or differ, and do no harm: as in
    `jnp.where(x > 0, 1 / x, 0)`.
    """
    for index, step in enumerate(body.steps):
        for result, (value, kind) in enumerate(zip(step.outs, step.types, strict=True)):
            if value in body.crossing and not step.places and has_checksum(kind):
                yield (*at, index, result), kind
        for inner, one in enumerate(step.bodies):
            yield from crossing(one, (*at, index, inner))


def values_of(sites: Collection[Site]) -> Watch:
    """Records some values themselves."""
    return Watch(lambda site, x: _numbers(x) if site in sites else None)


def _numbers(x: Any) -> jax.Array:
    return jax.random.key_data(x) if is_key(x.dtype) else x


def fetched(records: Mapping[Site, jax.Array]) -> dict[Site, np.ndarray]:
    """Records on the host."""
    return dict(zip(records, jax.device_get(list(records.values())), strict=True))


def _wide(values: np.ndarray) -> np.ndarray:
    """Numbers in a dtype in which their differences are exact enough."""
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        return values.astype(np.complex128)
    if is_inexact(values.dtype):
        return values.astype(np.float64)
    return values.astype(np.int64)


def _distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """How far numbers are apart, and zero where one of them is not finite."""
    if not np.issubdtype(one.dtype, np.inexact):
        return (one != other).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(abs(one - other), posinf=0.0)


def _rounding_of_sum(kind: Any, tiles: int) -> float:
    """How much a checksum may differ, relative to the sum of its terms without a sign.

    Each element is rounded once more or less, mostly with different signs; and the sum itself is
    made in another order.
    """
    if not has_checksum(kind) or is_key(kind.dtype) or not is_inexact(kind.dtype):
        return 0.0
    terms = max(1, math.prod(kind.shape) // max(1, tiles))
    own, of_sum = rounding(kind.dtype), min(rounding(kind.dtype), rounding(np.dtype(np.float32)))
    return own * max(2.0, 16 / math.sqrt(terms)) + of_sum * (8 + math.sqrt(terms))
