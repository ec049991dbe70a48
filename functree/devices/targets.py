"""A target is an accelerator that you don't have: its name ─► devices to compile programs for."""

import functools
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Self

import jax
from jax.experimental import topologies

from functree.argument_checks import shown
from functree.devices.meshes import Device
from functree.errors import ShardingError, did_you_mean

_KIB, _MIB = 1 << 10, 1 << 20


class Gpu(NamedTuple):
    """A description of a GPU for XLA's CUDA compiler, with the values that differ between GPUs.

    Attributes:
        name: the name that the driver reports, which is JAX's `device_kind`. XLA uses the name to
            look up the costs of communication.
        capability: the CUDA compute capability, as (major, minor).
        processors: the number of streaming multiprocessors.
        lanes: the number of float32 lanes (CUDA cores) of one multiprocessor.
        clock: the highest clock rate of the multiprocessors, in GHz.
        memory: the bytes of device memory available to CUDA. ECC and the driver reserve the rest of
            the memory that the data sheet lists.
        memory_clock: the clock rate of the device memory, in GHz. Each line of the bus moves two
            bits per cycle.
        memory_bus: the width of the bus to the device memory, in bits.
        l2: the bytes of level 2 cache.
        shared: the bytes of shared memory of one multiprocessor.
        links: the number of NVLink links.
        link_bandwidth: the bytes per second of one NVLink link, in one direction.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    lanes: int
    clock: float
    memory: int
    memory_clock: float
    memory_bus: int
    l2: int
    shared: int
    links: int
    link_bandwidth: int

    @property
    def memory_bandwidth(self) -> int:
        """The bandwidth of the device memory, in bytes per second."""
        return round(self.memory_clock * 1e9) * 2 * self.memory_bus // 8

    @property
    def nvlink_bandwidth(self) -> int:
        """The bytes per second of all NVLink links, in one direction.

        Data sheets give the sum of both directions.
        """
        return self.links * self.link_bandwidth


# Sources:
# [1] NVIDIA A100 Tensor Core GPU Architecture (whitepaper); A100 80GB data sheet: 80 GB, 2039 GB/s,
#     600 GB/s
# [2] NVIDIA H100 Tensor Core GPU Architecture (whitepaper); H100 data sheet: 80 GB, 3.35 TB/s,
#     NVLink 900 GB/s
# [3] H200 data sheet: 141 GB, 4.8 TB/s, 900 GB/s
# [4] DGX B200 data sheet: 8 GPUs with 1440 GB, 64 TB/s, 14.4 TB/s
# [5] CUDA C++ Programming Guide: technical specifications, and arithmetic throughput, by compute
#     capability
# [6] CUDA tuning guides for Ampere, Hopper and Blackwell: L2 of 40, 50, 126 MB; NVLink
# [7] values that drivers report, in published logs of deviceQuery, nvidia-smi and torch. The bytes
#     of memory differ by about 0.1 % between drivers.
GPUS: dict[str, Gpu] = {
    "a100": Gpu(
        name="NVIDIA A100-SXM4-80GB",  # [7]
        capability=(8, 0),  # [5]
        processors=108,  # [1]
        lanes=64,  # [1, 5]
        clock=1.41,  # [1]
        memory=81_157 * _MIB,  # [7]
        memory_clock=1.593,  # [7]
        memory_bus=5120,  # [1]
        l2=40 * _MIB,  # [1, 6]
        shared=164 * _KIB,  # [5]
        links=12,  # [1, 6]
        link_bandwidth=25_000_000_000,  # [1, 6]
    ),
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",  # [7]
        capability=(9, 0),  # [5]
        processors=132,  # [2]
        lanes=128,  # [2, 5]
        clock=1.98,  # [7]
        memory=81_007 * _MIB,  # [7]
        memory_clock=2.619,  # [7]
        memory_bus=5120,  # [2]
        l2=50 * _MIB,  # [2, 6]
        shared=228 * _KIB,  # [5]
        links=18,  # [2, 6]
        link_bandwidth=25_000_000_000,  # [2, 6]
    ),
}
GPUS["h200"] = GPUS["h100"]._replace(  # the chip of the H100 with six stacks of faster memory
    name="NVIDIA H200",  # [7]
    memory=143_155 * _MIB,  # [7]
    memory_clock=3.201,  # [7]
    memory_bus=6144,  # six stacks of 1024 bits, [3]
    l2=60 * _MIB,  # [7]
)
GPUS["b200"] = Gpu(
    name="NVIDIA B200",  # [7]
    capability=(10, 0),  # [5]
    processors=148,  # [7]
    lanes=128,  # [5]
    clock=1.965,  # [7]
    memory=182_642 * _MIB,  # [7]
    memory_clock=3.996,  # [7]
    memory_bus=7680,  # [7]
    l2=253 * _MIB // 2,  # [7]
    shared=228 * _KIB,  # [5]
    links=18,  # [4, 6]
    link_bandwidth=50_000_000_000,  # [4, 6]
)

# These limits are the same for all capabilities in `GPUS` [5]. XLA divides by zero without
# `block_dim_limit`.
_COMMON = """
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
""".strip()


def target_config(gpu: Gpu) -> str:
    """Write XLA's `GpuTargetConfigProto` for a GPU as text.

    `get_topology_desc(platform="cuda", target_config=...)` accepts the text. The parser of JAX
    0.10.2 refuses unknown fields, so the text omits fields that this parser does not know.
    """
    major, minor = gpu.capability
    extension = "NONE"
    if major >= 9:  # sm_90a, sm_100a
        extension = "ACCELERATED_FEATURES"
    capability = f"major: {major} minor: {minor} feature_extension: {extension}"
    return f"""gpu_device_info {{
  name: "{gpu.name}" cuda_compute_capability {{ {capability} }}
  core_count: {gpu.processors} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory} memory_bandwidth: {gpu.memory_bandwidth} l2_cache_size: {gpu.l2}
  shared_memory_per_core: {gpu.shared} shared_memory_per_block_optin: {gpu.shared - _KIB}
  device_interconnect_info {{ active_links: {gpu.links} }}
  {_COMMON}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""


def device_memory(device: Device) -> int | None:
    """Return the bytes of memory of a device in `GPUS`, or None for other devices."""
    for gpu in GPUS.values():
        if gpu.name == device.device_kind:
            return gpu.memory
    return None


EXAMPLES = '`"tpu:v5e:16x16"` for a TPU slice, or `"cuda:h100:8"` for GPUs'
GPUS_OF_A_HOST = 8
# The largest TPU slice has 9,216 chips. A compiler describes each chip, so a typo with many digits
# would take minutes, or exhaust the memory.
MOST_CHIPS = 1 << 17

_TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
_KINDS = {"tpu": _TPUS, "cuda": tuple(GPUS)}
# The number of JAX devices per chip, for kinds with several devices per chip.
_DEVICES_OF_A_CHIP = {"tpu7x": 2}
# The package that contains each compiler, and functree's extra that installs it.
_COMPILERS = {"tpu": ("libtpu", "functree[tpu]"), "cuda": ("jax_cuda13_plugin", "functree[cuda]")}

# The TPU compiler reads these variables. Without them, it would query the network. The last one
# lets several processes load the compiler at once.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Without this variable, the CUDA plugin loads only if it finds the libraries that run programs.
_WITHOUT_CUDA = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


class Target(NamedTuple):
    """An accelerator that you don't have.

    Attributes:
        text: the target's name, such as `tpu:v5e:2x4`.
        platform: `tpu` or `cuda`.
        kind: the kind of device, such as `v5e`.
        shape: the number of chips in each dimension of a slice, such as `(2, 4)`; for GPUs, their
            number, such as `(8,)`.
    """

    text: str
    platform: str
    kind: str
    shape: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse the name of a target.

        The name is parsed without a compiler, since the TPU compiler ends the process if a
        dimension is 0.

        Raises:
            ShardingError: if the text is not the name of a target.
        """
        parts = text.split(":")
        if len(parts) != 3 or parts[0] not in _KINDS:
            raise ShardingError(f"target={shown(text)} is not a target: write {EXAMPLES}")
        platform, kind, shape = parts
        kinds = _KINDS[platform]
        if kind not in kinds:
            near = did_you_mean(kind.lower(), kinds)
            raise ShardingError(
                f"target={shown(text)}: `{kind[:40]}` is not one of {', '.join(kinds)}{near}"
            )
        pattern, remedy = _SHAPES[platform]
        if re.fullmatch(pattern, shape) is None:
            raise ShardingError(f"target={shown(text)}: {remedy} after the last colon")
        return cls(text, platform, kind, _sizes(text, shape))

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape) * _DEVICES_OF_A_CHIP.get(self.kind, 1)


# For each platform, a shape and how to write it. `\d` would match the digits of all scripts, and
# Python refuses to parse a number with thousands of digits.
_SIZE = "[1-9][0-9]{0,9}"
_SHAPES = {
    "tpu": (f"{_SIZE}(x{_SIZE}){{1,2}}", "write the slice's shape, such as `16x16` or `4x4x8`,"),
    "cuda": (_SIZE, "write the number of GPUs, such as `8`,"),
}


def _sizes(text: str, shape: str) -> tuple[int, ...]:
    """Parse the sizes of a shape."""
    sizes = tuple(map(int, shape.split("x")))
    if math.prod(sizes) > MOST_CHIPS:
        raise ShardingError(
            f"target={shown(text)}: a target has at most {MOST_CHIPS:,} chips or GPUs: use fewer"
        )
    if len(sizes) == 1 and sizes[0] > GPUS_OF_A_HOST and sizes[0] % GPUS_OF_A_HOST:
        raise ShardingError(
            f"target={shown(text)}: for more than {GPUS_OF_A_HOST} GPUs, use a multiple of "
            f"{GPUS_OF_A_HOST}"
        )
    return sizes


# With the cache, all calls return the same devices for a target. Otherwise, JAX would make new
# devices each time, so meshes of one target would differ.
@functools.lru_cache(maxsize=32)
def target_devices(target: Target) -> tuple[Device, ...]:
    """Return the devices of a target.

    Raises:
        ShardingError: if the target's compiler is not installed.
        ShardingError: if JAX cannot load the compiler.
        ShardingError: if the compiler does not support slices of this shape.
    """
    package, extra = _COMPILERS[target.platform]
    if importlib.util.find_spec(package) is None:
        raise ShardingError(f'target={target.text!r} needs a compiler: run `pip install "{extra}"`')
    if target.platform == "tpu":
        return _tpus(target)
    return _gpus(target)


def _tpus(target: Target) -> tuple[Device, ...]:
    # A v4 chip has two cores, which JAX treats as one device only with this option.
    options: dict[str, str] = {}
    if target.kind == "v4":
        options["chip_config_name"] = "megacore"
    name = f"{target.kind}:{'x'.join(map(str, target.shape))}"
    try:
        with _environment(_WITHOUT_TPU):
            return tuple(topologies.get_topology_desc(name, "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:  # only this compiler has a list of slices
        raise ShardingError(
            f"target={target.text!r}: the TPU compiler does not support this slice: {error}"
        ) from error


def _gpus(target: Target) -> tuple[Device, ...]:
    hosts, each = max(1, target.size // GPUS_OF_A_HOST), min(target.size, GPUS_OF_A_HOST)
    # A topology is written as domains x hosts per domain x devices per host, where NVLink connects
    # the devices of a domain. Here, each host is a domain.
    topology, config = f"{hosts}x1x{each}", target_config(GPUS[target.kind])
    try:
        with _environment(_WITHOUT_CUDA):
            described = topologies.get_topology_desc(
                target.text, "cuda", topology=topology, target_config=config
            )
    except NotImplementedError as error:
        # JAX found no GPU earlier, and dropped its plugin.
        raise ShardingError(
            f"target={target.text!r}: JAX dropped its CUDA plugin because it found no GPU: "
            "set JAX_PLATFORMS=cpu before you import jax"
        ) from error
    return tuple(described.devices)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context, unless the user has set them."""
    new = values.keys() - os.environ.keys()
    for name in new:
        os.environ[name] = values[name]
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
