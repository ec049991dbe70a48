"""The collectives of a program ─► lines, in which those of equal layers are one line, the largest first."""

from collections.abc import Sequence
from typing import NamedTuple

from functree.compiled.collective import Collective
from functree.layout.plan.fold import bytes_text, common_path, pattern_of
from functree.tree.paths import Path


class Line(NamedTuple):
    """One or more collectives that differ only in the indices of their paths."""

    title: str  # the parameters
    kind: str
    axes: str
    runs: str
    total: int  # bytes on one device, of all runs together
    told: str  # the rest


def fold(collectives: Sequence[Collective]) -> list[Line]:
    """One line for all collectives that differ only in the indices of their paths, the largest first."""
    groups: dict[object, list[Collective]] = {}
    for one in collectives:
        patterns = tuple(map(pattern_of, one.paths))
        alike = (one.arguments, patterns, one.kind, one.mesh_axes, one.bytes, one.count, one.phase, one.source)
        groups.setdefault(alike, []).append(one)
    return sorted(map(_line, groups.values()), key=lambda line: -line.total)


def _line(several: Sequence[Collective]) -> Line:
    one = several[0]
    # For each of the parameters that every one of them serves, the paths in all of them.
    each = zip(*map(full_paths, several), strict=True)
    title = ", ".join(map(common_path, each)) or "no parameter"
    times = f"{bytes_text(one.bytes)} each time" if one.count != 1 or len(several) > 1 else ""
    told = ", ".join(filter(None, [one.phase, source_text(one.source), times]))
    runs = "?" if one.count is None else str(one.count * len(several))
    return Line(title, one.kind, axes_text(one.mesh_axes), runs, sum(c.total for c in several), told)


def full_paths(one: Collective) -> list[Path]:
    """The paths of what a collective serves, each beginning with the name of its argument."""
    return [Path((name, *path)) for name, path in zip(one.arguments, one.paths, strict=True)]


def axes_text(axes: tuple[str, ...] | None) -> str:
    """The text of the mesh axes of a collective: `data, model`."""
    return "?" if axes is None else ", ".join(axes)


def source_text(source: str | None) -> str:
    """The end of a path of a file, which is enough to recognise it."""
    if source is None:
        return ""
    return "/".join(source.replace("\\", "/").split("/")[-2:])
