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
from functree.devices.backend import Device
from functree.devices.gpus import GPUS, target_config
from functree.devices.logs import log_folders
from functree.errors import ShardingError, did_you_mean

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
