"""Arrays of all processes ─► the digest of each, once all copies of its parts have been found to be the same."""

import json
from collections.abc import Mapping
from typing import Any

from functree.errors import Problem
from functree.processes.agreement import texts_of_all
from functree.processes.digest import digest_parts, joined
from functree.tree.paths import Path


def digests_of(arrays: Mapping[str, Any]) -> tuple[dict[str, str], list[Problem]]:
    """The digests of some arrays. All processes call this, with arrays of the same names.

    Args:
        arrays: arrays by the text of their path.

    Returns:
        The digest of each array, as 8 hexadecimal digits, and a problem for each that has copies of other values.
    """
    started = {name: digest_parts(array) for name, array in arrays.items()}
    mine = {name: sorted({(part.bounds, part.read()) for part in parts}) for name, parts in started.items()}
    told = [json.loads(text) for text in texts_of_all(json.dumps(mine))]
    found, problems = dict[str, str](), list[Problem]()
    for name in arrays:
        parts: dict[Any, int] = {}
        others = set[int]()  # the processes with another value for a part than was met before
        for process, one in enumerate(told):
            for bounds, number in one[name]:
                if parts.setdefault(json.dumps(bounds), number) != number:
                    others.add(process)
        if others:
            where = f", in process {min(others)}" if len(told) > 1 else ""
            why = f"has copies that have different values{where}, so it is not one array"
            problems.append(Problem(Path(name), None, "", why, "place it anew, with `ft.shard`"))
        found[name] = f"{joined(parts):08x}"
    return found, problems
