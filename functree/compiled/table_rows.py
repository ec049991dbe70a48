"""The collectives of a program ─► the rows of a table; those of equal layers, and of parameters of
one module, are one row."""

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from functree.compiled.collective import Collective
from functree.report.table import but_for_key, bytes_text, common_path, grouped, pattern_of
from functree.tree.paths import Path


class TableRow(NamedTuple):
    """One or more collectives of one kind over the same mesh axes, for like parameters."""

    title: str  # the parameters
    kind: str
    axes: str
    runs: str
    total: int  # bytes on one device, of all runs together
    where: str  # lines of source, bytes of each run
    collectives: tuple[Collective, ...]
    paths: tuple[Path, ...]  # the path of each; empty if they serve no parameter, or several

    @property
    def details(self) -> str:
        """The phase, what is moved, and what else is told below a row."""
        one = self.collectives[0]
        return ", ".join(filter(None, (one.phase, moves_text(one), self.where)))


NO_PARAMETER = "no parameter"
_MOVES = {
    "itself": "the array itself",
    "gradient": "its gradient",
    "activation": "an activation",
    "update": "a part of its update",
}


def table_rows(collectives: Sequence[Collective]) -> list[TableRow]:
    """A row for all collectives that do the same for equal layers, or for the parameters of one
    module, such as query, key and value; the largest first."""
    groups = _by_layer(collectives)
    # Then `attn.{query,key}`, and `attn.{query,key}.weight` for layers with a module for each.
    for from_end in (1, 2):
        groups = _joined(groups, from_end)
    return _rows(groups)


def rows_of_parameters(collectives: Sequence[Collective]) -> list[TableRow]:
    """The same with a row for each parameter, which only equal layers share."""
    return _rows(_by_layer(collectives))


def _rows(groups: Iterable[Sequence[Collective]]) -> list[TableRow]:
    return sorted(map(_row, groups), key=lambda row: row.total, reverse=True)


def _by_layer(collectives: Sequence[Collective]) -> list[list[Collective]]:
    groups: list[list[Collective]] = []
    for alike in grouped(collectives, _but_for_indices):
        groups += _full(alike)
    return groups


def _does(one: Collective) -> tuple[Hashable, ...]:
    """What one collective does: those of a row do the same."""
    return one.kind, one.mesh_axes, one.phase, one.moves


def _but_for_indices(one: Collective) -> Hashable:
    own: Hashable = None
    if len(one.paths) != 1:
        # What serves no parameter, or several, is only folded where nothing else differs.
        own = one.bytes, one.count, one.source
    return _does(one), one.arguments, tuple(map(pattern_of, one.paths)), own


def _full(alike: Sequence[Collective]) -> list[list[Collective]]:
    """One group if the title is exact: if each combination of its indices is there."""
    if len(alike[0].paths) != 1:
        return [list(alike)]
    paths = set(map(_path, alike))
    different = map(set, zip(*paths, strict=True))
    if math.prod(map(len, different)) == len(paths):
        return [list(alike)]
    return grouped(alike, _path)


def _path(one: Collective) -> Path:
    return full_paths(one)[0]


def _joined(groups: Iterable[list[Collective]], from_end: int) -> list[list[Collective]]:
    """The groups, with those in one that differ in the key at this position from the end only."""

    def key(group: Sequence[Collective]) -> Hashable:
        # Counted without the argument, which is no key of a module.
        if len(group[0].paths) != 1 or len(group[0].paths[0]) < from_end:
            return id(group)
        common = but_for_key(list(map(_path, group)), from_end)
        return id(group) if common is None else (common, _does(group[0]))

    joined: list[list[Collective]] = []
    for alike in grouped(groups, key):
        for near in _of_one_size(alike):
            joined.append([one for group in near for one in group])
    return joined


SMALLER = 16
"""What moves so many times less than another parameter has a line of its own: one line would hide
which of the two it is that moves so much."""


def _of_one_size(groups: Sequence[list[Collective]]) -> list[list[list[Collective]]]:
    """The groups, divided into those that move about as much."""
    totals = [sum(one.total for one in group) for group in groups]
    divided: list[list[list[Collective]]] = []
    left = list(range(len(groups)))
    while left:
        most = max(totals[i] for i in left)
        near = [i for i in left if totals[i] * SMALLER > most or totals[i] == most]
        divided.append([groups[i] for i in near])
        left = [i for i in left if i not in near]
    return divided


def _row(alike: Sequence[Collective]) -> TableRow:
    one = alike[0]
    # For each of the parameters that every one of them serves, the paths in all of them.
    each = zip(*map(full_paths, alike), strict=True)
    details = list(filter(None, [sources_text(alike)]))
    times = [other.count for other in alike if other.count is not None]
    sizes = {other.bytes for other in alike}
    if len(sizes) == 1 and (one.count != 1 or len(alike) > 1):
        details.append(f"{bytes_text(one.bytes)} each time")
    return TableRow(
        title=", ".join(map(common_path, each)) or NO_PARAMETER,
        kind=one.kind,
        axes=axes_text(one.mesh_axes),
        runs=str(sum(times)) if len(times) == len(alike) else "?",
        total=sum(other.total for other in alike),
        where=", ".join(details),
        collectives=tuple(alike),
        paths=tuple(map(_path, alike)) if len(one.paths) == 1 else (),
    )


def full_paths(one: Collective) -> list[Path]:
    """The paths of what a collective serves, each beginning with the name of its argument."""
    return [Path((name, *path)) for name, path in zip(one.arguments, one.paths, strict=True)]


def moves_text(one: Collective) -> str:
    """What is moved for a parameter; empty if there is none."""
    return _MOVES.get(one.moves or "", "")


def axes_text(axes: tuple[str, ...] | None) -> str:
    """The text of the mesh axes of a collective: `data, model`."""
    if axes is None:
        return "?"
    return ", ".join(axes)


MOST_SOURCES = 3


def sources_text(collectives: Iterable[Collective]) -> str:
    """The lines that collectives come from, without repeats: `nn/mlp.py:85,86`."""
    lines: dict[str, set[str]] = {}
    for one in collectives:
        if one.source is not None:
            file, _, line = source_end(one.source).rpartition(":")
            lines.setdefault(file, set()).add(line)
    texts: list[str] = []
    for file, numbers in lines.items():
        texts.append(f"{file}:{','.join(sorted(numbers, key=_in_order))}")
    if len(texts) > MOST_SOURCES:
        texts[MOST_SOURCES:] = [f"{len(texts) - MOST_SOURCES} more files"]
    return ", ".join(texts)


def _in_order(line: str) -> tuple[int, str]:
    return len(line), line


def source_end(source: str) -> str:
    """The end of a path of a file, which is enough to recognise it."""
    return "/".join(source.replace("\\", "/").split("/")[-2:])
