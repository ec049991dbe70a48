"""The name of an accelerator that is not there ─► its devices, to compile programs for."""

import atexit
import functools
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental import topologies

from functree.devices.backend import Device
from functree.devices.gpus import GPUS, target_config
from functree.devices.logs import log_folders
from functree.errors import ShardingError, did_you_mean

EXAMPLES = '`"tpu:v5e:16x16"` for a slice of TPUs, `"cuda:h100:8"` for GPUs'
GPUS_OF_A_HOST = 8

_TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
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


# Remembered so that the devices of a target are equal whenever it is named: JAX makes new ones each
# time, and meshes of different devices are different.
@functools.lru_cache(maxsize=32)
def target_devices(target: str) -> tuple[Device, ...]:
    """The devices of a target.

    Raises:
        ShardingError: the text names no target; its compiler is not installed, or cannot be loaded;
            it knows no slice of this shape.
    """
    parts = target.split(":")
    if len(parts) != 3 or parts[0] not in _COMPILERS:
        raise ShardingError(f"target={target!r} is not a target: write {EXAMPLES}")
    platform, kind, shape = parts
    if platform == "tpu":
        kinds, devices_of = list(_TPUS), _tpus
    else:
        kinds, devices_of = list(GPUS), _gpus
    if kind not in kinds:
        raise ShardingError(
            f"target={target!r}: `{kind}` is none of {', '.join(kinds)}{did_you_mean(kind, kinds)}"
        )
    _check_installed(target, platform)
    return devices_of(target, kind, shape)


def _check_installed(target: str, platform: str) -> None:
    package, extra = _COMPILERS[platform]
    if importlib.util.find_spec(package) is None:
        raise ShardingError(
            f'target={target!r} needs the compiler of the target: pip install "{extra}"'
        )


def _tpus(target: str, kind: str, shape: str) -> tuple[Device, ...]:
    if re.fullmatch(r"\d+(x\d+){1,2}", shape) is None:
        raise ShardingError(
            f"target={target!r}: the shape of a slice is written as `16x16`, or `4x4x8`"
        )
    # A chip of these has two cores, which are one device to JAX only if it is configured so.
    options: dict[str, str] = {}
    if kind == "v4":
        options["chip_config_name"] = "megacore"
    try:
        with _environment({**_WITHOUT_TPU, "TPU_LOG_DIR": _tpu_logs()}):
            return tuple(topologies.get_topology_desc(f"{kind}:{shape}", "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:  # only this compiler knows which slices there are
        raise ShardingError(f"target={target!r}: there is no such slice: {error}") from error


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


def _gpus(target: str, kind: str, shape: str) -> tuple[Device, ...]:
    if re.fullmatch(r"[1-9]\d*", shape) is None:
        raise ShardingError(
            f"target={target!r}: write the number of GPUs at the end, such as `cuda:{kind}:8`"
        )
    number = int(shape)
    if number > GPUS_OF_A_HOST and number % GPUS_OF_A_HOST:
        raise ShardingError(
            f"target={target!r}: more than {GPUS_OF_A_HOST} GPUs are hosts of {GPUS_OF_A_HOST}"
        )
    hosts, each = max(1, number // GPUS_OF_A_HOST), min(number, GPUS_OF_A_HOST)
    # Domains of NVLink, hosts of each, devices of each host: between these hosts there is no
    # NVLink.
    topology, config = f"{hosts}x1x{each}", target_config(GPUS[kind])
    try:
        with _environment(_WITHOUT_CUDA):
            described = topologies.get_topology_desc(
                target, "cuda", topology=topology, target_config=config
            )
    except NotImplementedError as error:
        # JAX has looked for a GPU before, and has given up its plugin.
        raise ShardingError(
            f"target={target!r}: JAX has no CUDA plugin, because it found no GPU: "
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
