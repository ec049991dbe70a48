"""The axes of an array and rules in plain values ─► its spec, by a reading of the rules that uses
nothing of functree."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

# A rule as a pair.
Rule = tuple[str, str | tuple[str, ...] | None]


@dataclasses.dataclass
class Leaf:
    """One array of a model: its axes, its shape, and the number of leading dimensions that belong
    to a stack."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: int = 0


def spec_of(
    leaf: Leaf, rules: Sequence[Rule], fsdp: tuple[str, int] | None, sizes: dict[str, int]
) -> P:
    """The first rule of each name whose mesh axes are free; FSDP takes the largest dimension that
    is left."""
    entries: list[Any] = [None] * len(leaf.axes)
    settled = [False] * len(leaf.axes)
    used: set[str] = set()
    for name, target in rules:
        for i, axis in enumerate(leaf.axes):
            if axis != name or settled[i]:
                continue
            own = () if target is None else (target,) if isinstance(target, str) else target
            if used.isdisjoint(own):
                entries[i], settled[i] = (target if own else None), True
                used.update(own)
    if fsdp is not None and fsdp[0] not in used and np.prod(leaf.shape) >= fsdp[1]:
        fits = [
            i
            for i in range(leaf.stacked, len(entries))
            if entries[i] is None and leaf.shape[i] % sizes[fsdp[0]] == 0
        ]
        if fits:
            entries[max(fits, key=lambda i: (leaf.shape[i], -i))] = fsdp[0]
    return P(*entries)
