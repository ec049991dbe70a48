"""The collectives of a program ─► the rows of a table, those of equal layers in one row."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from functree.compiled.collective import Collective
from functree.report.byte_sizes import bytes_text
from functree.report.path_groups import common_path, grouped, pattern_of
from functree.tree.paths import Path


class TableRow(NamedTuple):
    """One or more collectives that differ only in the indices of their paths."""

    title: str  # the parameters
    kind: str
    axes: str
    runs: str
    total: int  # bytes on one device, of all runs together
    details: str  # phase, line of source, bytes of each run


NO_PARAMETER = "no parameter"


def table_rows(collectives: Sequence[Collective]) -> list[TableRow]:
    """A row for all collectives that differ only in the indices of their paths; largest first."""
    rows = map(_row, grouped(collectives, _but_for_indices))
    return sorted(rows, key=lambda row: row.total, reverse=True)


def _but_for_indices(one: Collective) -> Hashable:
    return (
        one.arguments,
        tuple(map(pattern_of, one.paths)),
        one.kind,
        one.mesh_axes,
        one.bytes,
        one.count,
        one.phase,
        one.source,
    )


def _row(alike: Sequence[Collective]) -> TableRow:
    one = alike[0]
    # For each of the parameters that every one of them serves, the paths in all of them.
    each = zip(*map(full_paths, alike), strict=True)
    details = [text for text in (one.phase, source_text(one.source)) if text]
    if one.count != 1 or len(alike) > 1:
        details.append(f"{bytes_text(one.bytes)} each time")
    runs = "?"
    if one.count is not None:
        runs = str(one.count * len(alike))
    return TableRow(
        title=", ".join(map(common_path, each)) or NO_PARAMETER,
        kind=one.kind,
        axes=axes_text(one.mesh_axes),
        runs=runs,
        total=sum(other.total for other in alike),
        details=", ".join(details),
    )


def full_paths(one: Collective) -> list[Path]:
    """The paths of what a collective serves, each beginning with the name of its argument."""
    return [Path((name, *path)) for name, path in zip(one.arguments, one.paths, strict=True)]


def axes_text(axes: tuple[str, ...] | None) -> str:
    """The text of the mesh axes of a collective: `data, model`."""
    if axes is None:
        return "?"
    return ", ".join(axes)


def source_text(source: str | None) -> str:
    """The end of a path of a file, which is enough to recognise it."""
    if source is None:
        return ""
    return "/".join(source.replace("\\", "/").split("/")[-2:])
