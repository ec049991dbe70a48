"""`wire_bytes` and `bandwidth` describe the links between devices along each mesh axis.

`wire_bytes` counts the bytes that a device sends. `bandwidth` returns the bytes that a device can
send per second.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from functree.compiled.ledger import Ledger
from functree.devices.meshes import Device
from functree.devices.targets import Target
from functree.errors import FunctreeValueError, did_you_mean
from functree.explorer.hardware import Hardware, Kind, MeshAxes


def bandwidth(axes: tuple[str, ...], mesh: Mesh, target: Target | None, kind: Kind) -> float:
    """Return the bytes per second that a device can send in a collective over some mesh axes.

    Args:
        axes: the mesh axes.
        mesh: the mesh.
        target: the mesh's target. Without a target, each device is assumed to have one link along
            each mesh axis.
        kind: the kind of accelerator, with the bandwidth of its links.
    """
    links = kind.hardware.links
    if isinstance(links, Mapping):
        slowest = min(links.get(axis, math.inf) for axis in axes)
        return links.get(axes, slowest)
    if target is None:
        return links
    # The first group along these mesh axes.
    place = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    group = list(np.ravel(mesh.devices[place]))
    if target.platform == "cuda":
        return _of_gpus(group, links, kind)
    return _links(group, target, kind) * links


def check_links(sizes: Mapping[str, int], hardware: Hardware) -> None:
    """Raise FunctreeError if the hardware's dict of links lacks one of the mesh axes."""
    links = hardware.links
    if not isinstance(links, Mapping):
        return
    for axis, size in sizes.items():
        if size > 1 and axis not in links:
            raise FunctreeValueError(
                f"hardware: `links` has no bandwidth for the mesh axis `{axis}`: add an entry"
                f"{did_you_mean(axis, map(str, links))}"
            )


def _of_gpus(group: Sequence[Device], nvlink: float, kind: Kind) -> float:
    """Return the bandwidth of a group of GPUs.

    Within a host, the GPUs use NVLink. Between hosts, they use the ports of the group's GPUs on one
    host.
    """
    hosts = [device.process_index for device in group]
    if len(set(hosts)) == 1:
        return nvlink
    return min(nvlink, kind.network * hosts.count(hosts[0]))


def _links(group: Sequence[Device], target: Target, kind: Kind) -> int:
    """Count the links that a TPU uses within a group of devices.

    In each dimension of the torus, a TPU has two links if the group is a full ring. It has one link
    if the group is a line or a part of a ring.
    """
    coordinates = np.asarray([device.coords for device in group])
    links = 0
    for dimension, length in enumerate(target.shape):
        used = len(set(coordinates[:, dimension].tolist()))
        if used == 1:
            continue
        links += 2 if used == length and _is_ring(length, dimension, target, kind) else 1
    # Devices on one chip have a faster connection than the links between chips.
    return max(1, links)


def _is_ring(length: int, dimension: int, target: Target, kind: Kind) -> bool:
    # In two dimensions, only the full torus has rings. In three dimensions, slices made of whole
    # cubes have rings.
    if len(target.shape) == 2:
        return length >= kind.ring
    return all(size % kind.ring == 0 for size in target.shape)


# A ledger gives the bytes of the result on one device. With ring algorithms in a group of n
# devices, each device sends this multiple of the result's bytes:
_FACTORS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,  # a reduce-scatter, and then an all-gather
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,  # its result is one shard
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


def wire_bytes(ledger: Ledger) -> tuple[Mapping[MeshAxes, int], int]:
    """Return the bytes sent along each mesh axis, largest first, and the bytes with unknown axes.

    The bytes of a collective over several mesh axes are listed under the tuple of these axes.
    """
    sizes: dict[MeshAxes, float] = {}
    unknown = 0
    for collective in ledger.collectives:
        if collective.mesh_axes is None or collective.group_size is None:
            unknown += collective.total
        elif collective.group_size > 1 and collective.total:
            axes = collective.mesh_axes
            if len(axes) == 1:
                (axes,) = axes
            sent = collective.total * _FACTORS[collective.kind](collective.group_size)
            sizes[axes] = sizes.get(axes, 0) + sent
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    return {axes: round(size) for axes, size in largest}, unknown
