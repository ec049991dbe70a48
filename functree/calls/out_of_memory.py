"""A program that does not fit on the devices that it is compiled for ─► an error with the figures and the leaves."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from functree.compiled.backend import backend_text
from functree.compiled.targets.gpus import memory_of
from functree.errors import FunctreeError, Problem, listed
from functree.layout.placement import sharding_text
from functree.layout.plan.fold import bytes_text
from functree.tree.leaf import array_problem
from functree.tree.paths import Path

LARGEST = 5
"""The number of leaves that the error names."""


class Argument(NamedTuple):
    """An array of the arguments of a program, as it is known before the program is compiled.

    Attributes:
        path: its path.
        value: anything with its shape and dtype.
        sharding: its sharding; None if the compiler chooses one.
    """

    path: Path
    value: Any
    sharding: Any

    @property
    def bytes(self) -> int:
        """The bytes on one device; all, if the sharding is not known."""
        shape = tuple(self.value.shape)
        local = shape if self.sharding is None else self.sharding.shard_shape(shape)
        return math.prod(local) * self.value.dtype.itemsize


@contextmanager
def refusing_too_large(name: str, device: Any, arguments: Sequence[Argument]) -> Iterator[None]:
    """Turn the compiler's error about a target's memory into one that names the largest leaves.

    Raises:
        FunctreeError: the program does not fit.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise _too_large(name, device, _figures(str(error)), arguments) from error


def _figures(message: str) -> str:
    """The figures in the error of a compiler; its first line if it is written in a new way."""
    known = re.search(r"\(([\d.]+[KMGT])\) exceeds available \w+ \(([\d.]+[KMGT])\)", message)
    if known is None:
        return message.removeprefix("RESOURCE_EXHAUSTED: ").splitlines()[0]
    needed, available = (f"{figure[:-1]} {figure[-1]}iB" for figure in known.groups())
    return f"it needs {needed}, and there are {available}"


def check_fits(name: str, device: Any, compiled: Any, arguments: Sequence[Argument]) -> None:
    """Check the memory of a program for GPUs, whose compiler leaves that to the one that runs it.

    Raises:
        FunctreeError: the program does not fit.
    """
    available, stats = memory_of(device), compiled.memory_analysis()
    if available is None or stats is None or stats.peak_memory_in_bytes <= available:
        return
    peak = bytes_text(stats.peak_memory_in_bytes)
    raise _too_large(name, device, f"it needs {peak}, and there are {bytes_text(available)}", arguments)


def _too_large(name: str, device: Any, said: str, arguments: Sequence[Argument]) -> FunctreeError:
    largest = sorted(arguments, key=lambda one: -one.bytes)
    given = bytes_text(sum(one.bytes for one in arguments))
    headline = (
        f"{name} does not fit in the memory of a {backend_text(device)}: {said}\n"
        f"Its arguments are {given} on each device ({_by_part(arguments)}); the largest of them:"
    )
    problems: list[Problem] = []
    for one in largest[:LARGEST]:
        why = f"{bytes_text(one.bytes)} on each device, {sharding_text(one.sharding)}"
        problems.append(array_problem(one.path, one.value, why, _REMEDY))
    if len(largest) > LARGEST:
        rest = bytes_text(sum(one.bytes for one in largest[LARGEST:]))
        problems.append(Problem(None, None, f"{len(largest) - LARGEST} others", f"{rest} on each device", ""))
    return FunctreeError(headline, problems)


def _by_part(arguments: Sequence[Argument]) -> str:
    """The bytes of each part of the arguments: of the fields of a state, or of the arguments themselves."""
    parts: dict[Path, int] = {}
    for one in arguments:
        part = Path(one.path[:2]) if len(one.path) > 2 else Path(one.path[:1])
        parts[part] = parts.get(part, 0) + one.bytes
    largest = sorted(parts.items(), key=lambda item: -item[1])
    return listed([f"{part} {bytes_text(size)}" for part, size in largest])


_REMEDY = (
    "shard the largest leaves over more devices; for temporaries, recompute (`remat=`) or take smaller batches "
    "(`ft.accumulate`)"
)
