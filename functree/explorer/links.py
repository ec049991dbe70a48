"""The links between devices: a ledger ─► the bytes that a device sends along each mesh axis, and a
mesh axis ─► those that it can send in a second."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from functree.compiled.ledger import Ledger
from functree.devices.meshes import Device
from functree.devices.targets import Target
from functree.errors import FunctreeValueError, did_you_mean
from functree.explorer.hardware import Hardware, Kind, MeshAxes


def bandwidth(
    axes: tuple[str, ...], mesh: Mesh, target: Target | None, hardware: Hardware, kind: Kind
) -> float:
    """The bytes that a device sends in a second in a collective over some mesh axes.

    Args:
        axes: the mesh axes.
        mesh: the mesh.
        target: the target that the mesh is of; None for simulated devices, along each of whose mesh
            axes there is one link.
        hardware: what the links carry.
        kind: the kind of accelerator.
    """
    if isinstance(hardware.links, Mapping):
        slowest = min(hardware.links.get(axis, math.inf) for axis in axes)
        return hardware.links.get(axes, slowest)
    if target is None:
        return hardware.links
    group = _group(axes, mesh)
    if target.platform == "cuda":
        return _of_gpus(group, hardware.links, kind)
    return _links(group, target, kind) * hardware.links


def check_links(sizes: Mapping[str, int], hardware: Hardware) -> None:
    """Raise FunctreeError if the hardware has links by mesh axis, and none for one of a mesh."""
    links = hardware.links
    if not isinstance(links, Mapping):
        return
    for axis, size in sizes.items():
        if size > 1 and axis not in links:
            raise FunctreeValueError(
                f"hardware: `links` has no bandwidth for the mesh axis `{axis}`"
                f"{did_you_mean(axis, map(str, links))}"
            )


def _group(axes: Sequence[str], mesh: Mesh) -> list[Device]:
    """The devices of the first group that communicates along some mesh axes."""
    place = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    return list(np.ravel(mesh.devices[place]))


def _of_gpus(group: Sequence[Device], nvlink: float, kind: Kind) -> float:
    """GPUs: by NVLink in a host; to other hosts by the ports of all GPUs of a host that take
    part."""
    hosts = [device.process_index for device in group]
    if len(set(hosts)) == 1 or kind.network is None:
        return nvlink
    return min(nvlink, kind.network * hosts.count(hosts[0]))


def _links(group: Sequence[Device], target: Target, kind: Kind) -> int:
    """How many links of a TPU are used along a mesh axis.

    Two along a dimension of the torus that is a ring, one along a part of it or along a line.
    """
    coordinates = np.asarray([device.coords for device in group])
    links = 0
    for dimension, length in enumerate(target.shape):
        used = len(set(coordinates[:, dimension].tolist()))
        if used == 1:
            continue
        links += 2 if used == length and _is_ring(length, dimension, target, kind) else 1
    # The devices of one chip, whose connection is faster than a link of the chip to others.
    return max(1, links)


def _is_ring(length: int, dimension: int, target: Target, kind: Kind) -> bool:
    if kind.ring is None:
        return False
    # In two dimensions only the full torus is closed; in three each multiple of a cube is.
    if len(target.shape) == 2:
        return length >= kind.ring
    return all(size % kind.ring == 0 for size in target.shape) and math.prod(target.shape) > 1


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
        if one.mesh_axes is None or one.group_size is None:
            unknown += one.total
        elif one.group_size > 1 and one.total:
            axes = one.mesh_axes
            if len(axes) == 1:
                (axes,) = axes
            sent = one.total * _FACTORS[one.kind](one.group_size)
            found[axes] = found.get(axes, 0) + sent
    largest = sorted(found.items(), key=lambda item: -item[1])
    return {axes: round(size) for axes, size in largest}, unknown
