"""A program that is too large for its devices ─► an error with the figures and the leaves."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.stages import Compiled

from functree.compiled.memory_need import (
    MemoryNeed,
    arguments_text,
    decisive,
    others_text,
    remedies,
    uncut_axes,
)
from functree.devices.meshes import backend_text, mesh_view
from functree.devices.placement import other_memory, sharding_text
from functree.devices.targets import device_memory
from functree.errors import FunctreeError, Problem, listed
from functree.labels.leaf import array_problem
from functree.report.table import bytes_text
from functree.tree.paths import Path

LARGEST = 5
"""The number of arguments that the error lists."""


class ProgramArrays(NamedTuple):
    """The arrays that a program takes and returns, with the shardings that are known.

    Attributes:
        arguments: those that it uses, by their paths.
        donated: the paths of the donated ones.
        results: its results.
    """

    arguments: Mapping[Path, jax.ShapeDtypeStruct]
    donated: Collection[Path]
    results: Sequence[jax.ShapeDtypeStruct]


@contextmanager
def refusing_too_large(
    name: str, mesh: Mesh, arrays: Callable[[], ProgramArrays]
) -> Iterator[None]:
    """Turn the compiler's error about a target's memory into one that says what the memory is
    needed for.

    Raises:
        FunctreeError: the program does not fit.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # The compiler for TPUs says so. That for GPUs compiles such a program, see `check_fits`.
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        figures, needed, available = _figures(str(error))
        # It pads arrays to whole tiles.
        known = arrays()
        need = _need(known, needed, available)._replace(is_padded=True)
        raise _too_large(name, mesh, figures, need, known) from error


def used_arguments(lowered: str, paths: Sequence[Path]) -> set[Path]:
    """The arguments of a lowered program, which JAX leaves without those that it does not use.

    Args:
        lowered: the text of the program, with the places that its values are from.
        paths: the paths of the arrays of a call. JAX gives each argument that of its array.
    """
    main = re.search(r"^ *func\.func public @main\((.*)$", lowered, re.MULTILINE)
    by_text = {_quoted(str(path)): path for path in paths}
    found = [] if main is None else _PLACES.findall(main[1])
    used = {by_text[text] for text in found if text in by_text}
    # If the text is written in a new way, it says nothing.
    if not used or len(used) < len(found):
        return set(paths)
    return used


# Of an argument: `%arg0: tensor<8xf32> {...} loc("model.up")`.
_PLACES = re.compile(r'%arg\d+: .*?loc\(("(?:[^"\\]|\\.)*")\)')


def _quoted(text: str) -> str:
    """A text as MLIR writes it."""
    written = ""
    for byte in text.encode():
        char = chr(byte)
        if char == "\\":
            written += "\\\\"
        elif char.isascii() and char.isprintable() and char != '"':
            written += char
        else:
            written += f"\\{byte:02X}"
    return f'"{written}"'


def is_on_host(sharding: Sharding | None) -> bool:
    """Whether an array is not in the memory of a device."""
    return sharding is not None and other_memory(sharding) is not None


class _Figures(NamedTuple):
    """What an error of a compiler says: its figures in words, and in bytes if they are known."""

    text: str
    needed: int | None
    available: int | None


def _figures(message: str) -> _Figures:
    """The figures in the error of a compiler; its first line if it is written in a new way."""
    known = re.search(r"\(([\d.]+)([KMGT])\) exceeds available \w+ \(([\d.]+)([KMGT])\)", message)
    if known is None:
        first = message.removeprefix("RESOURCE_EXHAUSTED: ").splitlines()[0]
        return _Figures(first, None, None)
    # Although it speaks of temporaries, the arguments and the results are among them.
    needed, unit, available, of = known.groups()
    text = f"it needs {needed} {unit}iB, and there are {available} {of}iB"
    return _Figures(text, _bytes(needed, unit), _bytes(available, of))


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * 1024 ** (1 + "KMGT".index(unit)))


def check_fits(
    name: str, mesh: Mesh, compiled: Compiled, arrays: Callable[[], ProgramArrays]
) -> None:
    """Check the memory of a program for GPUs, whose compiler leaves that to the one that runs it.

    Raises:
        FunctreeError: the program does not fit.
    """
    available, stats = device_memory(mesh.devices.flat[0]), compiled.memory_analysis()
    if available is None or stats is None or stats.peak_memory_in_bytes <= available:
        return
    peak = stats.peak_memory_in_bytes
    figures = f"it needs {bytes_text(peak)}, and there are {bytes_text(available)}"
    # This compiler says what the results are, and how many are in donated memory.
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    known = arrays()
    need = _need(known, peak, available)._replace(results=results)
    raise _too_large(name, mesh, figures, need, known)


def _need(arrays: ProgramArrays, needed: int | None, available: int | None) -> MemoryNeed:
    """What a program needs, as far as it is known from its arrays."""
    arguments, loose_arguments = _sizes(arrays.arguments.values())
    donated, others = _ByType(), _ByType()
    for path, array in arrays.arguments.items():
        (donated if path in arrays.donated else others).add(array)
    own = [array for array in arrays.results if donated.take(array, alike=True) is None]
    kept = [array for array in map(others.take, own) if array is not None]
    results, loose_results = _sizes(own)
    return MemoryNeed(
        needed=needed,
        available=available,
        arguments=arguments,
        loose_arguments=loose_arguments,
        results=results,
        loose_results=loose_results,
        kept=_sizes(kept)[0],
    )


class _ByType:
    """Arrays by their shape and dtype."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[object, ...], list[jax.ShapeDtypeStruct]] = {}

    def add(self, array: jax.ShapeDtypeStruct) -> None:
        """Add an array."""
        self._arrays.setdefault((array.shape, array.dtype), []).append(array)

    def take(
        self, wanted: jax.ShapeDtypeStruct, *, alike: bool = False
    ) -> jax.ShapeDtypeStruct | None:
        """Take out an array of a shape and dtype, and if it has to be alike, with as many bytes on
        each device; None if there is none."""
        found = self._arrays.get((wanted.shape, wanted.dtype), [])
        for i, array in enumerate(found):
            # Where no sharding is given, the compiler takes that of the donated array.
            loose = wanted.sharding is None
            if not alike or loose or _local_bytes(array) == _local_bytes(wanted):
                return found.pop(i)
        return None


def _sizes(arrays: Iterable[jax.ShapeDtypeStruct]) -> tuple[int, int]:
    """The bytes of arrays on one device, and of these those whose sharding is not known."""
    total, loose = 0, 0
    for array in arrays:
        size = _local_bytes(array)
        total += size
        if array.sharding is None:
            loose += size
    return total, loose


def _too_large(
    name: str, mesh: Mesh, figures: str, need: MemoryNeed, arrays: ProgramArrays
) -> FunctreeError:
    arguments = arrays.arguments
    sizes = {path: _local_bytes(array) for path, array in arguments.items()}
    largest = sorted(sizes, key=lambda path: -sizes[path])
    kind = backend_text(mesh.devices.flat[0])
    given = f"Its arguments are {arguments_text(need)} ({_by_part(sizes)})"
    others = others_text(need)
    given += f", and {others}; the largest arguments:" if others else "; the largest of them:"
    headline = f"{name} does not fit in the memory of a {kind}: {figures}\n{given}"
    remedy = "\n".join(remedies(need, _uncut(arguments, decisive(sizes))))
    problems: list[Problem] = []
    for path in largest[:LARGEST]:
        array = arguments[path]
        why = f"{bytes_text(sizes[path])} on each device, {sharding_text(array.sharding)}"
        problems.append(array_problem(path, array, why, remedy))
    rest = largest[LARGEST:]
    if rest:
        size = bytes_text(sum(sizes[path] for path in rest))
        problems.append(Problem(None, None, f"{len(rest)} others", f"{size} on each device", ""))
    if not problems:
        problems.append(Problem(None, None, name, figures, remedy))
    return FunctreeError(headline, problems)


def _uncut(
    arguments: Mapping[Path, jax.ShapeDtypeStruct], paths: Iterable[Path]
) -> dict[Path, list[str]]:
    """The mesh axes over which some arguments are not cut, of those whose sharding is known."""
    uncut: dict[Path, list[str]] = {}
    for path in paths:
        sharding = arguments[path].sharding
        if isinstance(sharding, NamedSharding):
            uncut |= uncut_axes({path: sharding.spec}, mesh_view(sharding.mesh).sizes)
    return uncut


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
