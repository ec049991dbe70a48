"""`Hardware` describes an accelerator for scoring layouts; `KINDS` lists known accelerators.

`wire_bytes` counts the bytes that a device sends. `bandwidth` returns the bytes that a device can
send per second over the links along some mesh axes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from functree.argument_checks import POSITIVE, Takes, check
from functree.compiled.ledger import Ledger
from functree.devices.meshes import Device
from functree.devices.targets import GPUS, Target
from functree.errors import FunctreeValueError, did_you_mean

MeshAxes = str | tuple[str, ...]
"""A mesh axis, or several over which one collective communicates."""


def _is_links(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return POSITIVE.fits(value)
    return all(isinstance(key, str | tuple) and POSITIVE.fits(one) for key, one in value.items())


_LINKS = Takes(
    'a positive number, or a dict of positive numbers by mesh axis, such as `{"data": 4.5e10}`',
    _is_links,
)
_EFFICIENCY = Takes(
    "a number above 0 and at most 1", lambda value: POSITIVE.fits(value) and value <= 1
)


@dataclass(frozen=True)
class Hardware:
    """Performance figures for one accelerator device, used to score layouts.

    Attributes:
        flops: the peak flops per second, in the dtype of the computation.
        memory: the bytes of memory that a program may use.
        links: the bandwidth of one link in one direction, in bytes per second. `ft.explore` derives
            the number of links along each mesh axis from the target's shape. For a GPU, give the
            total bandwidth of its NVLinks. If `links` is a dict, it gives the bytes per second that
            a device sends along each mesh axis. For a collective over several mesh axes, the lowest
            of their values applies, unless the dict has their tuple as a key.
        efficiency: the share of `flops` that programs reach. Measure it on this accelerator, with
            similar programs.

    Raises:
        FunctreeError: if a value is not positive.
        FunctreeError: if `efficiency` is above 1.

    Examples:
        >>> ft.Hardware(
        ...     flops=197e12, memory=15.75 * 2**30, links=4.5e10, efficiency=0.5
        ... ).links
        45000000000.0
        >>> ft.Hardware(
        ...     flops=0, memory=2**34, links={"data": 5e10, "model": 4e11}
        ... )
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeArgumentError: invalid Hardware
        <BLANKLINE>
          flops=0
              it must be a positive number
    """

    flops: float
    memory: float
    links: float | Mapping[MeshAxes, float] = field(hash=False)  # a dict has no hash
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        check(
            "invalid Hardware",
            flops=(self.flops, POSITIVE),
            memory=(self.memory, POSITIVE),
            links=(self.links, _LINKS),
            efficiency=(self.efficiency, _EFFICIENCY),
        )


class Kind(NamedTuple):
    """A kind of accelerator.

    Attributes:
        name: its name: `TPU v5e`.
        hardware: the figures of one device.
        network: the bytes per second that a device sends to other hosts; infinite if hosts have
            direct links.
        ring: the minimum length at which a dimension of a two-dimensional slice is a ring. In three
            dimensions, all sizes must be multiples of this length. Infinite if there are no rings.
    """

    name: str
    hardware: Hardware
    network: float = math.inf
    ring: float = math.inf


# Sources:
# [1] "How to Scale Your Model" (github.com/jax-ml/scaling-book, tpus.md at 0819a7d, February 2025):
#     flops in bfloat16 and ICI links of v4, v5e, v5p and v6e, and which slices are rings
# [2] Google Cloud, "TPU7x (Ironwood)": 2,307 TFLOPs and 1,200 GB/s of ICI for a chip, as for v5p.
#     A chip is two devices, which share its links.
# [3] TPU compilers, libtpu of jax 0.12: the memory that they let a program use
# [4] NVIDIA data sheets: A100 312, H100 and H200 989, HGX B200 2,250 TFLOPS (bfloat16, dense);
#     NVLink and memory as in `functree.devices.targets`
# [5] NVIDIA DGX BasePOD, core components: eight ports of 400 Gb/s for the eight GPUs of a DGX H100,
#     H200 or B200. DGX A100 data sheet: 200 Gb/s for each.
# [6] published step times of recipes, all FSDP with recomputation, in
#     github.com/AI-Hypercomputer/tpu-recipes (at c8cfe2f). With 0.59, the scores for v6e are within
#     11 % of the published times (benchmarks/explore.md). The recipe for v5p gives 0.91, from the
#     flops alone. No published recipe for the other kinds could be compiled, so these kinds
#     use the efficiency of v6e.
_MEASURED_V6E = 0.59
_GIB = 2**30


def _tpu(name: str, flops: float, memory: float, link: float, ring: int, efficiency: float) -> Kind:
    return Kind(f"TPU {name}", Hardware(flops, memory * _GIB, link, efficiency), ring=ring)


def _gpu(name: str, flops: float, network: float) -> Kind:
    gpu = GPUS[name]
    hardware = Hardware(flops, gpu.memory, gpu.nvlink_bandwidth, _MEASURED_V6E)
    return Kind(f"GPU {name.upper()}", hardware, network=network)


KINDS: dict[str, Kind] = {
    "v4": _tpu("v4", 275e12, 30.75, 4.5e10, 4, _MEASURED_V6E),  # [1, 3]
    "v5e": _tpu("v5e", 197e12, 15.75, 4.5e10, 16, _MEASURED_V6E),  # [1, 3]
    "v5p": _tpu("v5p", 459e12, 95.73, 9e10, 4, 0.91),  # [1, 3, 6]
    "v6e": _tpu("v6e", 920e12, 31.24, 9e10, 16, _MEASURED_V6E),  # [1, 3, 6]
    "tpu7x": _tpu("7x", 2307e12 / 2, 94.74, 9e10 / 2, 4, _MEASURED_V6E),  # [2, 3]
    "a100": _gpu("a100", 312e12, 200e9 / 8),  # [4, 5]
    "h100": _gpu("h100", 989e12, 400e9 / 8),  # [4, 5]
    "h200": _gpu("h200", 989e12, 400e9 / 8),  # [4, 5]
    "b200": _gpu("b200", 2250e12, 400e9 / 8),  # [4, 5]
}
"""The accelerators that programs can be compiled for."""

ASSUMED = "v5e"
"""The kind for which layouts are ranked without a target."""


def kind_of(target: Target | None) -> Kind:
    """Return a target's kind of accelerator, or the assumed kind without a target."""
    return KINDS[ASSUMED if target is None else target.kind]


# Links


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
