"""`compile_for` compiles a program for a target, and refuses a program that does not fit there."""

import math
from collections.abc import Callable, Mapping

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


def compile_for(
    name: str,
    mesh: Mesh,
    arguments: Mapping[Path, jax.ShapeDtypeStruct],
    compile: Callable[[], Compiled],
) -> Compiled:
    """Compile a program for a target, and check that it fits in the target's memory.

    Args:
        name: the name of the function.
        mesh: the mesh of the target.
        arguments: the program's arguments, with their shardings where these are known.
        compile: the function that compiles the program.

    Raises:
        FunctreeError: if the program does not fit; the error lists the largest arguments.
    """
    try:
        compiled = compile()
    except jax.errors.JaxRuntimeError as error:
        code, _, text = str(error).partition(": ")
        if code != "RESOURCE_EXHAUSTED":
            raise
        raise _too_large(name, mesh, text.splitlines()[0], arguments) from error
    # The GPU compiler does not check the memory.
    available, stats = device_memory(mesh.devices.flat[0]), compiled.memory_analysis()
    if available is not None and stats is not None and stats.peak_memory_in_bytes > available:
        needed = bytes_text(stats.peak_memory_in_bytes)
        figures = f"it needs {needed}, but the device has {bytes_text(available)}"
        raise _too_large(name, mesh, figures, arguments)
    return compiled


def _too_large(
    name: str, mesh: Mesh, figures: str, arguments: Mapping[Path, jax.ShapeDtypeStruct]
) -> FunctreeError:
    sizes: dict[Path, int] = {}
    for path, array in arguments.items():
        # Arrays in host memory use no device memory.
        if array.sharding is None or other_memory(array.sharding) is None:
            sizes[path] = _local_bytes(array)
    problems: list[Problem] = []
    for path in sorted(sizes, key=lambda path: -sizes[path])[:LARGEST]:
        array = arguments[path]
        why = f"takes {bytes_text(sizes[path])} on each device, {sharding_text(array.sharding)}"
        problems.append(array_problem(path, array, why, SMALLER))
    kind, total = backend_text(mesh.devices.flat[0]), bytes_text(sum(sizes.values()))
    headline = f"{name} does not fit in the memory of a {kind}: {figures}"
    if not problems:
        return FunctreeError(f"{headline}: {SMALLER}")
    headline += f"\nThe arguments take {total} on each device; the largest:"
    return FunctreeError(headline, problems)


def _local_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array on one device, or all its bytes if its sharding is unknown."""
    # Without a sharding, the array is uncommitted, and the compiler may replicate it.
    shape = array.shape
    if array.sharding is not None:
        shape = array.sharding.shard_shape(shape)
    return math.prod(shape) * array.dtype.itemsize
