"""A program that is too large for its devices ─► an error with its largest arguments."""

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
    "shard the largest arguments over more mesh axes or devices, donate what is not needed "
    "afterwards (`donate=`), recompute in the backward pass (`remat=`), or take smaller "
    "micro-batches (`ft.accumulate`)"
)
"""What makes a program fit."""

FindArguments = Callable[[], Mapping[Path, jax.ShapeDtypeStruct]]
"""The arguments of a program, which are asked for if it does not fit."""


@contextmanager
def refusing_too_large(name: str, mesh: Mesh, arguments: FindArguments) -> Iterator[None]:
    """Turn the error of the compiler for TPUs about the memory into one with the largest arguments.

    Raises:
        FunctreeError: the program does not fit.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise _too_large(name, mesh, _figures(str(error)), arguments()) from error


def _figures(message: str) -> str:
    """The figures in the error of a compiler; its first line if it is written in a new way."""
    known = re.search(r"\(([\d.]+)([KMGT])\) exceeds available \w+ \(([\d.]+)([KMGT])\)", message)
    if known is None:
        return message.removeprefix("RESOURCE_EXHAUSTED: ").splitlines()[0]
    # Although it speaks of temporaries, the arguments and the results are among them.
    needed, unit, available, of = known.groups()
    return f"it needs {needed} {unit}iB, and there are {available} {of}iB"


def check_fits(name: str, mesh: Mesh, compiled: Compiled, arguments: FindArguments) -> None:
    """Check the memory of a program for GPUs, whose compiler leaves that to the one that runs it.

    Raises:
        FunctreeError: the program does not fit.
    """
    available, stats = device_memory(mesh.devices.flat[0]), compiled.memory_analysis()
    if available is None or stats is None or stats.peak_memory_in_bytes <= available:
        return
    needed = bytes_text(stats.peak_memory_in_bytes)
    figures = f"it needs {needed}, and there are {bytes_text(available)}"
    raise _too_large(name, mesh, figures, arguments())


def _too_large(
    name: str, mesh: Mesh, figures: str, arguments: Mapping[Path, jax.ShapeDtypeStruct]
) -> FunctreeError:
    sizes = {
        path: _local_bytes(array)
        for path, array in arguments.items()
        # Arrays in host memory take none of the device's.
        if array.sharding is None or other_memory(array.sharding) is None
    }
    problems: list[Problem] = []
    for path in sorted(sizes, key=lambda path: -sizes[path])[:LARGEST]:
        array = arguments[path]
        why = f"{bytes_text(sizes[path])} on each device, {sharding_text(array.sharding)}"
        problems.append(array_problem(path, array, why, SMALLER))
    kind, total = backend_text(mesh.devices.flat[0]), bytes_text(sum(sizes.values()))
    headline = f"{name} does not fit in the memory of a {kind}: {figures}"
    if not problems:
        return FunctreeError(headline, [Problem(None, None, name, figures, SMALLER)])
    headline += f"\nIts arguments are {total} on each device; the largest of them:"
    return FunctreeError(headline, problems)


def _local_bytes(array: jax.ShapeDtypeStruct) -> int:
    """The bytes of an array on one device; all of them, if its sharding is not known."""
    # Nobody has placed it then: the compiler chooses a sharding, and may leave the array whole.
    shape = array.shape
    if array.sharding is not None:
        shape = array.sharding.shard_shape(shape)
    return math.prod(shape) * array.dtype.itemsize
