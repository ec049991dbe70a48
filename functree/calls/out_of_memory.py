"""These checks refuse a program that does not fit in memory, and list its largest arguments."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from functree.devices.meshes import backend_text
from functree.devices.placement import other_memory, sharding_text
from functree.devices.targets import device_memory
from functree.errors import FunctreeError, Problem
from functree.labels.leaf import array_problem
from functree.report.table import bytes_text
from functree.tree.paths import Path

LARGEST = 5
"""The number of arguments that the error lists."""

SMALLER = (
    "shard the largest arguments over more mesh axes or devices, donate arguments that are not "
    "needed afterwards (`donate=`), recompute activations in the backward pass (`remat=`), or use "
    "smaller micro-batches (`ft.accumulate`)"
)
"""The remedy for a program that does not fit."""

FindArguments = Callable[[], Mapping[Path, jax.ShapeDtypeStruct]]
"""A function that returns a program's arguments. It is called only if the program does not fit."""


@contextmanager
def refusing_too_large(name: str, mesh: Mesh, arguments: FindArguments) -> Iterator[None]:
    """Turn the TPU compiler's out-of-memory error into an error that lists the largest arguments.

    Raises:
        FunctreeError: if the program does not fit.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise _too_large(name, mesh, _figures(str(error)), arguments()) from error


def _figures(message: str) -> str:
    """Return the figures in a compiler's error, or its first line if the wording is unknown."""
    known = re.search(r"\(([\d.]+)([KMGT])\) exceeds available \w+ \(([\d.]+)([KMGT])\)", message)
    if known is None:
        return message.removeprefix("RESOURCE_EXHAUSTED: ").splitlines()[0]
    # The figure includes arguments and results, although the error calls it temporaries.
    needed, unit, available, of = known.groups()
    return f"it needs {needed} {unit}iB, but the device has {available} {of}iB"


def check_fits(name: str, mesh: Mesh, compiled: Compiled, arguments: FindArguments) -> None:
    """Check that a program fits in a GPU's memory, since the GPU compiler does not check this.

    Raises:
        FunctreeError: if the program does not fit.
    """
    available, stats = device_memory(mesh.devices.flat[0]), compiled.memory_analysis()
    if available is None or stats is None or stats.peak_memory_in_bytes <= available:
        return
    needed = bytes_text(stats.peak_memory_in_bytes)
    figures = f"it needs {needed}, but the device has {bytes_text(available)}"
    raise _too_large(name, mesh, figures, arguments())


def _too_large(
    name: str, mesh: Mesh, figures: str, arguments: Mapping[Path, jax.ShapeDtypeStruct]
) -> FunctreeError:
    sizes = {
        path: _local_bytes(array)
        for path, array in arguments.items()
        # Arrays in host memory use no device memory.
        if array.sharding is None or other_memory(array.sharding) is None
    }
    problems: list[Problem] = []
    for path in sorted(sizes, key=lambda path: -sizes[path])[:LARGEST]:
        array = arguments[path]
        why = f"takes {bytes_text(sizes[path])} on each device, {sharding_text(array.sharding)}"
        problems.append(array_problem(path, array, why, SMALLER))
    kind, total = backend_text(mesh.devices.flat[0]), bytes_text(sum(sizes.values()))
    headline = f"{name} does not fit in the memory of a {kind}: {figures}"
    if not problems:
        return FunctreeError(headline, [Problem(None, None, name, figures, SMALLER)])
    headline += f"\nThe arguments take {total} on each device; the largest:"
    return FunctreeError(headline, problems)


def _local_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array on one device, or all its bytes if its sharding is unknown."""
    # Without a sharding, the array is uncommitted, and the compiler may replicate it.
    shape = array.shape
    if array.sharding is not None:
        shape = array.sharding.shard_shape(shape)
    return math.prod(shape) * array.dtype.itemsize
