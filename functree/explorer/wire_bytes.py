"""A ledger ─► the bytes that a device sends over the links, by mesh axis."""

from collections.abc import Mapping

from functree.compiled.collective import Collective
from functree.compiled.ledger import Ledger
from functree.explorer.hardware import MeshAxes

# A ledger has the bytes of the result on one device. Of a group of n devices, each sends so many
# times as much, by the algorithms on rings:
_FACTORS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,  # a reduce-scatter, and then an all-gather
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,  # of which the result is one shard
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


def wire_bytes(ledger: Ledger) -> tuple[Mapping[MeshAxes, int], int]:
    """The bytes by mesh axis, largest first; those of collectives over several are under their
    tuple. And the bytes of collectives of which the mesh axes are not known."""
    found: dict[MeshAxes, float] = {}
    unknown = 0
    for one in ledger.collectives:
        size = _sent(one)
        if one.mesh_axes is None or one.group_size is None:
            unknown += one.total
        elif size:
            axes = one.mesh_axes[0] if len(one.mesh_axes) == 1 else one.mesh_axes
            found[axes] = found.get(axes, 0) + size
    largest = sorted(found.items(), key=lambda item: -item[1])
    return {axes: round(size) for axes, size in largest}, unknown


def _sent(one: Collective) -> float:
    """The bytes that a device sends in all runs of a collective."""
    if not one.group_size or one.group_size == 1:
        return 0
    return one.total * _FACTORS[one.kind](one.group_size)
