"""Parts of arrays in all processes ─► the digest of each array, and those that have copies with different values."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from functree.errors import Problem
from functree.processes.agreement import agreed, texts_of_all
from functree.processes.digest import Bounds, digest_parts, joined
from functree.tree.paths import Path

_PLACE = "place it anew, with `ft.shard`"


def digests_of(arrays: Mapping[str, Any], remedy: str = _PLACE) -> tuple[dict[str, str], list[Problem]]:
    """The digests of some arrays. All processes call this, with arrays of the same names.

    Args:
        arrays: arrays by the text of their path.
        remedy: what to do about copies with other values.

    Returns:
        The digest of each array, as 8 hexadecimal digits, and a problem for each that has copies of other values.
    """
    read = agreed("the copies of arrays are not compared", lambda: (_read(arrays), dict))
    found, problems = compared(read, remedy)
    return {name: f"{joined(parts):08x}" for name, parts in found.items()}, problems


def _read(arrays: Mapping[str, Any]) -> dict[str, list[tuple[Bounds, int]]]:
    started = {name: digest_parts(array) for name, array in arrays.items()}  # all at once, on the devices
    return {name: [(part.bounds, part.read()) for part in parts] for name, parts in started.items()}


def compared(
    parts: Mapping[str, Iterable[tuple[Bounds, int]]], remedy: str
) -> tuple[dict[str, dict[Bounds, int]], list[Problem]]:
    """The parts of arrays that the processes have, and a problem for each array that has copies of other values.

    All processes call this, with the same names.

    Args:
        parts: for each array, by the text of its path, the parts in this process with a digest of each.
        remedy: what to do about copies with different values.
    """
    mine = {name: sorted(set(several)) for name, several in parts.items()}
    told = [json.loads(text) for text in texts_of_all(json.dumps(mine))]
    found, problems = dict[str, dict[Bounds, int]](), list[Problem]()
    for name in mine:
        own = found[name] = {}
        others = set[int]()  # the processes with another value for a part than was met before
        for process, one in enumerate(told):
            for bounds, number in one[name]:
                if own.setdefault(tuple(map(tuple, bounds)), number) != number:
                    others.add(process)
        if others:
            where = f" in process {min(others)}" if len(told) > 1 else ""
            why = f"has copies that have different values{where}, so it is not one array"
            problems.append(Problem(Path(name), None, "", why, remedy))
    return found, problems
