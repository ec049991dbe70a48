"""The name of an accelerator that is not there ─► its devices, to compile programs for."""

import atexit
import functools
import importlib.util
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import jax
from jax.experimental import topologies

from functree.argument_checks import shown
from functree.devices.meshes import Device
from functree.errors import ShardingError, did_you_mean

_KIB, _MIB = 1 << 10, 1 << 20


class Gpu(NamedTuple):
    """What XLA's CUDA compiler is told of a GPU: what differs between the GPUs of `GPUS`.

    Attributes:
        name: the name that its driver reports, which is JAX's `device_kind`. XLA also looks up the
            costs of communication by it.
        capability: CUDA compute capability, as (major, minor).
        processors: streaming multiprocessors.
        lanes: float32 lanes (CUDA cores) of one multiprocessor.
        clock: highest clock of the multiprocessors, GHz.
        memory: bytes of device memory that CUDA can see. They are less than in the data sheet, by
            what ECC and the driver reserve.
        memory_clock: clock of the device memory, GHz. It moves two bits in a cycle on each line of
            its bus.
        memory_bus: width of the bus to the device memory, bits.
        l2: bytes of level 2 cache.
        shared: bytes of shared memory of one multiprocessor.
        links: NVLink links.
        link_bandwidth: bytes per second of one NVLink link, in one direction.
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
        """Bytes per second between the device memory and the chip."""
        return round(self.memory_clock * 1e9) * 2 * self.memory_bus // 8

    @property
    def nvlink_bandwidth(self) -> int:
        """Bytes per second over all NVLink links in one direction: half of what data sheets say."""
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
# [7] what drivers report, in published logs of deviceQuery, nvidia-smi and torch; the bytes of
#     memory differ by some 0.1 % between drivers
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

# The same for each of these capabilities [5]. Without `block_dim_limit` XLA divides by zero.
_COMMON = """
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
""".strip()


def target_config(gpu: Gpu) -> str:
    """The text of XLA's `GpuTargetConfigProto` for a GPU.

    It is what `get_topology_desc(platform="cuda", target_config=...)` takes. Only fields that
    jax 0.10.2 knows too are written: its parser refuses a text with any other.
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
    """The bytes of memory of a device that is one of `GPUS`; None for another device."""
    for gpu in GPUS.values():
        if gpu.name == device.device_kind:
            return gpu.memory
    return None


EXAMPLES = '`"tpu:v5e:16x16"` for a slice of TPUs, `"cuda:h100:8"` for GPUs'
GPUS_OF_A_HOST = 8
# The largest slice of TPUs has 9,216 chips. To describe one takes the compilers up to 20 µs, so a
# number that was meant otherwise would take minutes, or all memory.
MOST_CHIPS = 1 << 17

_TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
_KINDS = {"tpu": _TPUS, "cuda": tuple(GPUS)}
# How many devices JAX makes of a chip, where it is not one.
_DEVICES_OF_A_CHIP = {"tpu7x": 2}
# The package that has the compiler, and the extra of functree that installs it.
_COMPILERS = {"tpu": ("libtpu", "functree[tpu]"), "cuda": ("jax_cuda13_plugin", "functree[cuda]")}

# What the compiler for TPUs asks its surroundings for, and would otherwise ask the network for. The
# last one lets several processes have it at once.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The plugin for CUDA looks for the libraries that run programs, and else refuses to be loaded.
_WITHOUT_CUDA = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


class Target(NamedTuple):
    """An accelerator that is not there.

    Attributes:
        text: its name: `tpu:v5e:2x4`.
        platform: `tpu` or `cuda`.
        kind: one of the kinds of the platform: `v5e`.
        shape: the chips in each dimension of a slice, or the number of GPUs: `(2, 4)`.
    """

    text: str
    platform: str
    kind: str
    shape: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> Self:
        """The target of a name. No compiler is asked: with a dimension of 0, that for TPUs ends
        Python.

        Raises:
            ShardingError: the text names no target.
        """
        parts = text.split(":")
        if len(parts) != 3 or parts[0] not in _KINDS:
            raise ShardingError(f"target={shown(text)} is not a target: write {EXAMPLES}")
        platform, kind, shape = parts
        kinds = _KINDS[platform]
        if kind not in kinds:
            near = did_you_mean(kind.lower(), kinds)
            raise ShardingError(
                f"target={shown(text)}: `{kind[:40]}` is none of {', '.join(kinds)}{near}"
            )
        if _SHAPES[platform].fullmatch(shape) is None:
            raise ShardingError(f"target={shown(text)}: {_how_to_write(platform, kind)}")
        return cls(text, platform, kind, _sizes(text, shape))

    @property
    def size(self) -> int:
        """The number of its devices."""
        return math.prod(self.shape) * _DEVICES_OF_A_CHIP.get(self.kind, 1)


# `[0-9]` and not `\d`, which has the digits of all scripts.
_SHAPES = {
    "tpu": re.compile("[1-9][0-9]*(x[1-9][0-9]*){1,2}"),
    "cuda": re.compile("[1-9][0-9]*"),
}


def _how_to_write(platform: str, kind: str) -> str:
    if platform == "tpu":
        return "the shape of a slice is written as `16x16`, or `4x4x8`"
    return f"write the number of GPUs at the end, such as `cuda:{kind}:8`"


def _sizes(text: str, shape: str) -> tuple[int, ...]:
    """The numbers of a shape."""
    numbers = shape.split("x")
    # By their digits first: Python does not read a number of thousands of digits.
    too_long = max(map(len, numbers)) > len(str(MOST_CHIPS))
    if too_long or math.prod(map(int, numbers)) > MOST_CHIPS:
        raise ShardingError(f"target={shown(text)}: a target has at most {MOST_CHIPS:,} chips")
    sizes = tuple(map(int, numbers))
    if len(sizes) == 1 and sizes[0] > GPUS_OF_A_HOST and sizes[0] % GPUS_OF_A_HOST:
        raise ShardingError(
            f"target={shown(text)}: more than {GPUS_OF_A_HOST} GPUs are hosts of {GPUS_OF_A_HOST}"
        )
    return sizes


# Remembered so that the devices of a target are equal whenever it is named: JAX makes new ones each
# time, and meshes of different devices are different.
@functools.lru_cache(maxsize=32)
def target_devices(target: Target) -> tuple[Device, ...]:
    """The devices of a target.

    Raises:
        ShardingError: the compiler of the target is not installed, or cannot be loaded; it knows no
            slice of this shape.
    """
    package, extra = _COMPILERS[target.platform]
    if importlib.util.find_spec(package) is None:
        raise ShardingError(
            f'target={target.text!r} needs the compiler of the target: pip install "{extra}"'
        )
    if target.platform == "tpu":
        return _tpus(target)
    return _gpus(target)


def _tpus(target: Target) -> tuple[Device, ...]:
    # A chip of these has two cores, which are one device to JAX only if it is configured so.
    options: dict[str, str] = {}
    if target.kind == "v4":
        options["chip_config_name"] = "megacore"
    name = f"{target.kind}:{'x'.join(map(str, target.shape))}"
    try:
        with _environment({**_WITHOUT_TPU, "TPU_LOG_DIR": _tpu_logs()}):
            return tuple(topologies.get_topology_desc(name, "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:  # only this compiler knows which slices there are
        raise ShardingError(f"target={target.text!r}: there is no such slice: {error}") from error


@functools.cache
def _tpu_logs() -> str:
    """A folder for the logs of the compiler for TPUs, which it chooses once, when it is loaded."""
    folder = tempfile.mkdtemp(prefix="functree-tpu-logs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log_folders.append(Path(folder))
    # The user's choice, and where the logs are if the compiler was loaded before.
    if os.environ.get("TPU_LOG_DIR"):
        log_folders.append(Path(os.environ["TPU_LOG_DIR"]))
    log_folders.append(Path("/tmp/tpu_logs"))
    return folder


def _gpus(target: Target) -> tuple[Device, ...]:
    hosts, each = max(1, target.size // GPUS_OF_A_HOST), min(target.size, GPUS_OF_A_HOST)
    # Domains of NVLink, hosts of each, devices of each host: between these hosts there is no
    # NVLink.
    topology, config = f"{hosts}x1x{each}", target_config(GPUS[target.kind])
    try:
        with _environment(_WITHOUT_CUDA):
            described = topologies.get_topology_desc(
                target.text, "cuda", topology=topology, target_config=config
            )
    except NotImplementedError as error:
        # JAX has looked for a GPU before, and has given up its plugin.
        raise ShardingError(
            f"target={target.text!r}: JAX has no CUDA plugin, because it found no GPU: "
            "set JAX_PLATFORMS=cpu before jax is imported"
        ) from error
    return tuple(described.devices)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables, for as long as the context is entered.

    Those that the user has set stay as they are.
    """
    new = values.keys() - os.environ.keys()
    for name in new:
        os.environ[name] = values[name]
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


log_folders: list[Path] = []
"""The folders in which a compiler of this process writes its log, instead of to standard error."""
