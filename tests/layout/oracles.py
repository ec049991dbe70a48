"""The rules by which other libraries lay out arrays, written from their sources. They know nothing of functree.

A path is a text with `/`, an array is a shape or the names of its dimensions, and a spec is a sequence with the mesh
axes of each dimension, which may be too short.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Shape = tuple[int, ...]
Pairs = Iterable[tuple[str, Any]]


def linen(names: Sequence[str | None], rules: Pairs) -> Sequence[Any]:
    """`flax.linen.logical_to_mesh_axes`. The pairs are tried in order. One applies if its dimension
    has no entry yet and its mesh axes are free. A dimension without an entry is not sharded."""
    found: dict[str | None, tuple[str, ...]] = {}
    for name, target in rules:
        wanted = (target,) if isinstance(target, str) else tuple(target or ())
        used = {axis for axes in found.values() for axis in axes}
        if name in names and name not in found and used.isdisjoint(wanted):
            found[name] = wanted
    return [found.get(name) for name in names]


def easylm(path: str, shape: Shape, rules: Pairs) -> Sequence[Any]:
    """`match_partition_rules`. An array of one element is replicated before any rule."""
    if math.prod(shape) == 1:
        return ()
    for pattern, spec in rules:
        if re.search(pattern, path):
            return spec
    raise ValueError(f"Partition rule not found for param: {path}")


def big_vision(path: str, shape: Shape, strategy: Pairs, parts: int) -> Sequence[Any]:
    """`infer_sharding`, of float32. The first expression that matches the whole path decides."""
    tactics = (tactic for pattern, tactic in strategy if re.fullmatch(pattern, path))
    if next(tactics, "replicate") == "replicate":
        return ()
    # fsdp(axis="fsdp"): the largest dimension that the axis divides; of equal ones the innermost.
    if 4 * math.prod(shape) <= 4 * 2**20:
        return ()
    divided = [(size, dim) for dim, size in enumerate(shape) if size % parts == 0]
    return (*[None] * max(divided)[1], "fsdp") if divided else ()


def keras(path: str, layout_map: Mapping[str, Any]) -> Sequence[Any]:
    """`LayoutMap`, since 3.14: the key itself, or the only one that matches the whole path."""
    if path in layout_map:
        return layout_map[path]
    matching = [key for key in layout_map if re.fullmatch(key, path)]
    if len(matching) > 1:
        raise ValueError(f"Path '{path}' matches multiple layout specification keys: {matching}")
    return layout_map[matching[0]] if matching else ()
