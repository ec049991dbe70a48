"""NVIDIA GPUs that are described well enough for XLA to compile for them where there is none."""

from typing import NamedTuple

from functree.devices.backend import Device

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
