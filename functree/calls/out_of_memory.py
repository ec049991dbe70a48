"""A program that is too large for its devices ─► an error with the figures and the leaves."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
from jax.sharding import Mesh
from jax.stages import Compiled

from functree.devices.backend import backend_text
from functree.devices.gpus import device_memory
from functree.devices.placement import sharding_text
from functree.errors import FunctreeError, Problem, listed
from functree.labels.leaf import array_problem
from functree.report.byte_sizes import bytes_text
from functree.tree.paths import Path

LARGEST = 5
"""The number of leaves that the error names."""


Arguments = Mapping[Path, jax.ShapeDtypeStruct]
"""The arrays of a program's arguments by their paths, with the shardings that are known."""


@contextmanager
def refusing_too_large(name: str, mesh: Mesh, arguments: Arguments) -> Iterator[None]:
    """Turn the compiler's error about a target's memory into one that names the largest leaves.

    Raises:
        FunctreeError: the program does not fit.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # The compiler for TPUs says so. That for GPUs compiles such a program, see `check_fits`.
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise _too_large(name, mesh, _figures(str(error)), arguments) from error


def _figures(message: str) -> str:
    """The figures in the error of a compiler; its first line if it is written in a new way."""
    known = re.search(r"\(([\d.]+[KMGT])\) exceeds available \w+ \(([\d.]+[KMGT])\)", message)
    if known is None:
        return message.removeprefix("RESOURCE_EXHAUSTED: ").splitlines()[0]
    needed, available = (f"{figure[:-1]} {figure[-1]}iB" for figure in known.groups())
    return f"it needs {needed}, and there are {available}"


def check_fits(name: str, mesh: Mesh, compiled: Compiled, arguments: Arguments) -> None:
    """Check the memory of a program for GPUs, whose compiler leaves that to the one that runs it.

    Raises:
        FunctreeError: the program does not fit.
    """
    available, stats = device_memory(mesh.devices.flat[0]), compiled.memory_analysis()
    if available is None or stats is None or stats.peak_memory_in_bytes <= available:
        return
    peak = bytes_text(stats.peak_memory_in_bytes)
    figures = f"it needs {peak}, and there are {bytes_text(available)}"
    raise _too_large(name, mesh, figures, arguments)


def _too_large(name: str, mesh: Mesh, figures: str, arguments: Arguments) -> FunctreeError:
    sizes = {path: _local_bytes(array) for path, array in arguments.items()}
    largest = sorted(sizes, key=lambda path: -sizes[path])
    given = bytes_text(sum(sizes.values()))
    headline = (
        f"{name} does not fit in the memory of a {backend_text(mesh.devices.flat[0])}: {figures}\n"
        f"Its arguments are {given} on each device ({_by_part(sizes)}); the largest of them:"
    )
    problems: list[Problem] = []
    for path in largest[:LARGEST]:
        array = arguments[path]
        why = f"{bytes_text(sizes[path])} on each device, {sharding_text(array.sharding)}"
        problems.append(array_problem(path, array, why, _REMEDY))
    others = largest[LARGEST:]
    if others:
        rest = bytes_text(sum(sizes[path] for path in others))
        problems.append(Problem(None, None, f"{len(others)} others", f"{rest} on each device", ""))
    return FunctreeError(headline, problems)


def _local_bytes(array: jax.ShapeDtypeStruct) -> int:
    """The bytes of an array on one device; all of them, if its sharding is not known."""
    # Nobody has placed it then: the compiler chooses a sharding, and may leave the array whole.
    shape = array.shape
    if array.sharding is not None:
        shape = array.sharding.shard_shape(shape)
    return math.prod(shape) * array.dtype.itemsize


def _by_part(sizes: Mapping[Path, int]) -> str:
    """The bytes of each part of the arguments: of the fields of a state, or of the arguments
    themselves."""
    parts: Counter[Path] = Counter()
    for path, size in sizes.items():
        # `state.model.up` is a part of `state.model`; `model.up` and `x` are parts of arguments.
        depth = 2 if len(path) > 2 else 1
        parts[Path(path[:depth])] += size
    return listed([f"{part} {bytes_text(size)}" for part, size in parts.most_common()])


_REMEDY = (
    "shard the largest leaves over more devices; for temporaries, recompute (`remat=`) or take "
    "smaller batches (`ft.accumulate`)"
)
