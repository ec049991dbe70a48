"""Parts of arrays in all processes ─► a digest of each array; the arrays whose copies differ."""

import json
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from functree.errors import Problem
from functree.processes.agreement import Agreement
from functree.processes.digest import Bounds, digest_of, digest_parts
from functree.processes.exchange import texts_of_all
from functree.tree.paths import Path

# Copies differ after a fault of a device, or a `shard_map` with `check_vma=False` whose result was
# not the same on all devices.
_PLACE = "place it anew, with `ft.shard`"


def digests_of(
    arrays: Mapping[str, jax.Array | np.ndarray | np.generic], remedy: str = _PLACE
) -> tuple[dict[str, str], list[Problem]]:
    """The digests of some arrays. All processes call this, with arrays of the same names.

    Args:
        arrays: arrays by the text of their path.
        remedy: what to do about copies with other values.

    Returns:
        The digest of each array, as 8 hexadecimal digits, and a problem for each that has copies of
            other values.
    """
    with Agreement("the copies of arrays are not compared"):
        # All are started before one is read, so that the devices do not wait for this process.
        started = {name: digest_parts(array) for name, array in arrays.items()}
        read: dict[str, list[tuple[Bounds, int]]] = {}
        for name, parts in started.items():
            read[name] = [(part.bounds, part.read()) for part in parts]
    found, problems = compared(read, remedy)
    return {name: f"{digest_of(parts):08x}" for name, parts in found.items()}, problems


def compared(
    parts: Mapping[str, Iterable[tuple[Bounds, int]]], remedy: str
) -> tuple[dict[str, dict[Bounds, int]], list[Problem]]:
    """The parts of arrays in all processes, and a problem for each array whose copies differ.

    All processes call this, with the same names.

    Args:
        parts: for each array, by the text of its path, the parts in this process with a digest of
            each.
        remedy: what to do about copies with different values.
    """
    mine = {name: sorted(set(own)) for name, own in parts.items()}
    told = list(map(json.loads, texts_of_all(json.dumps(mine))))
    found: dict[str, dict[Bounds, int]] = {}
    problems: list[Problem] = []
    for name in mine:
        numbers = found[name] = {}
        others: set[int] = set()  # the processes with another value for a part than was met before
        for process, arrays in enumerate(told):
            for bounds, number in arrays[name]:
                # JSON has lists in the place of tuples.
                if numbers.setdefault(tuple(map(tuple, bounds)), number) != number:
                    others.add(process)
        if others:
            where = f" in process {min(others)}" if len(told) > 1 else ""
            why = f"has copies that have different values{where}, so it is not one array"
            problems.append(Problem(Path(name), None, "", why, remedy))
    return found, problems
