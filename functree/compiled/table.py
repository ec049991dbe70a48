"""`ledger_text` renders a ledger as text.

Collectives of identical layers, and of parameters of one module, share a row. Identical compiler
warnings share a line.
"""

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from functree.compiled.collective import MOVES, Collective, Memory, total_of
from functree.compiled.sources import source_end
from functree.errors import count
from functree.report.table import (
    INDENT,
    WIDTH,
    but_for_key,
    bytes_text,
    columns,
    common_path,
    grouped,
    lines_text,
    paragraphs,
    pattern_of,
    row_lines,
    wrapped,
)
from functree.tree.paths import Path


class TableRow(NamedTuple):
    """Collectives of one kind over the same mesh axes, for similar parameters."""

    title: str  # the parameters
    kind: str
    axes: str
    runs: str
    total: int  # bytes on one device, over all runs
    where: str  # source lines, bytes per run
    collectives: tuple[Collective, ...]
    paths: tuple[Path, ...]  # one per collective; empty unless each serves one parameter

    @property
    def details(self) -> str:
        """The line below a row: the phase, the moved value, the verdict, and the source."""
        first = self.collectives[0]
        parts = (first.phase, moves_text(first), VERDICTS.get(first.verdict or ""), self.where)
        return ", ".join(filter(None, parts))

    @property
    def cause(self) -> str:
        """The cause, if the compiler chose the collectives; empty otherwise."""
        first = self.collectives[0]
        return "" if first.verdict != "compiler" or first.cause is None else str(first.cause)


NO_PARAMETER = "no parameter"
VERDICTS = {"asked": "asked for", "compiler": "the compiler's choice"}
"""The text of each verdict."""


def table_rows(collectives: Sequence[Collective]) -> list[TableRow]:
    """Group collectives into rows, the largest first.

    The collectives in a row have the same properties. They serve identical layers, or parameters of
    one module, such as query, key and value.
    """
    groups = _by_layer(collectives)
    # First `attn.{query,key}`, then `attn.{query,key}.weight`, where each is a module.
    for from_end in (1, 2):
        groups = _joined(groups, from_end)
    return _rows(groups)


def rows_of_parameters(collectives: Sequence[Collective]) -> list[TableRow]:
    """Group collectives into rows that only identical layers share, the largest first."""
    return _rows(_by_layer(collectives))


def _rows(groups: Iterable[Sequence[Collective]]) -> list[TableRow]:
    return sorted(map(_row, groups), key=lambda row: row.total, reverse=True)


def _by_layer(collectives: Sequence[Collective]) -> list[list[Collective]]:
    groups: list[list[Collective]] = []
    for alike in grouped(collectives, _but_for_indices):
        groups += _full(alike)
    return groups


def _does(collective: Collective) -> tuple[Hashable, ...]:
    """Return the properties that all collectives of a row share."""
    return (
        collective.kind,
        collective.mesh_axes,
        collective.phase,
        collective.moves,
        collective.verdict,
    )


def _but_for_indices(collective: Collective) -> Hashable:
    details: Hashable = None
    if len(collective.paths) != 1:
        # Collectives that serve no parameter, or several, share a row only if nothing else differs.
        details = collective.bytes, collective.count, collective.source, collective.called_from
    return (
        _does(collective),
        collective.arguments,
        tuple(map(pattern_of, collective.paths)),
        details,
    )


def _full(alike: Sequence[Collective]) -> list[list[Collective]]:
    """Return one group if all combinations of the indices exist; otherwise, one group per path.

    A row's title is exact only if all combinations exist.
    """
    if len(alike[0].paths) != 1:
        return [list(alike)]
    paths = set(map(_path, alike))
    different = map(set, zip(*paths, strict=True))
    if math.prod(map(len, different)) == len(paths):
        return [list(alike)]
    return grouped(alike, _path)


def _path(collective: Collective) -> Path:
    return full_paths(collective)[0]


def _joined(groups: Iterable[list[Collective]], from_end: int) -> list[list[Collective]]:
    """Join groups whose paths differ only in the key at this position from the end."""

    def key(group: Sequence[Collective]) -> Hashable:
        # The argument's name is ignored, since it is not a key of a module.
        if len(group[0].paths) != 1 or len(group[0].paths[0]) < from_end:
            return id(group)
        common = but_for_key(list(map(_path, group)), from_end)
        return id(group) if common is None else (common, _does(group[0]))

    joined: list[list[Collective]] = []
    for alike in grouped(groups, key):
        for near in _of_one_size(alike):
            joined.append([collective for group in near for collective in group])
    return joined


SMALLER = 16
"""If two parameters' moved bytes differ by at least this factor, each gets its own row.

One row for both would hide which of them moves more."""


def _of_one_size(groups: Sequence[list[Collective]]) -> list[list[list[Collective]]]:
    """Divide groups into lists of groups that move about the same amount."""
    totals = list(map(total_of, groups))
    divided: list[list[list[Collective]]] = []
    left = list(range(len(groups)))
    while left:
        most = max(totals[i] for i in left)
        near = [i for i in left if totals[i] * SMALLER > most or totals[i] == most]
        divided.append([groups[i] for i in near])
        left = [i for i in left if i not in near]
    return divided


def _row(alike: Sequence[Collective]) -> TableRow:
    first = alike[0]
    # For each position, the paths of all collectives at that position.
    each = zip(*map(full_paths, alike), strict=True)
    details = list(filter(None, [sources_text(alike)]))
    times = [collective.count for collective in alike if collective.count is not None]
    sizes = {collective.bytes for collective in alike}
    if len(sizes) == 1 and (first.count != 1 or len(alike) > 1):
        details.append(f"{bytes_text(first.bytes)} each time")
    return TableRow(
        title=", ".join(map(common_path, each)) or NO_PARAMETER,
        kind=first.kind,
        axes=axes_text(first.mesh_axes),
        runs=str(sum(times)) if len(times) == len(alike) else "?",
        total=total_of(alike),
        where=", ".join(details),
        collectives=tuple(alike),
        paths=tuple(map(_path, alike)) if len(first.paths) == 1 else (),
    )


def full_paths(one: Collective) -> list[Path]:
    """Return the paths that a collective serves, each beginning with the name of its argument."""
    return [Path((name, *path)) for name, path in zip(one.arguments, one.paths, strict=True)]


def moves_text(one: Collective) -> str:
    """Describe the value that is moved for a parameter; empty if there is none."""
    return MOVES.get(one.moves or "", "")


def axes_text(axes: tuple[str, ...] | None) -> str:
    """Return the text of a collective's mesh axes: `data, model`."""
    if axes is None:
        return "?"
    return ", ".join(axes)


MOST_SOURCES = 3


def sources_text(collectives: Sequence[Collective]) -> str:
    """Return the source lines of collectives: `eqx/linear.py:85,86, called from train.py:12`."""
    text = _lines_text(one.source for one in collectives)
    called_from = _lines_text(one.called_from for one in collectives)
    return f"{text}, called from {called_from}" if called_from else text


def _lines_text(sources: Iterable[str | None]) -> str:
    """Join source lines without repeats: `nn/mlp.py:85,86`."""
    lines: dict[str, set[str]] = {}
    for source in sources:
        if source is not None:
            file, _, line = source_end(source).rpartition(":")
            lines.setdefault(file, set()).add(line)
    texts: list[str] = []
    for file, numbers in lines.items():
        texts.append(f"{file}:{','.join(sorted(numbers, key=_in_order))}")
    if len(texts) > MOST_SOURCES:
        texts[MOST_SOURCES:] = [f"{len(texts) - MOST_SOURCES} more files"]
    return ", ".join(texts)


def _in_order(line: str) -> tuple[int, str]:
    return len(line), line


COLUMNS = (52, 18, 16, 5)  # the widths of parameter, kind, mesh axes and runs
ROWS = 40
"""The maximum number of rows in the table; one line gives the total of all smaller rows."""


def ledger_text(collectives: Sequence[Collective], summary: str, notes: Sequence[str]) -> str:
    """Render the table, at most 110 columns wide.

    Args:
        collectives: the collectives of the program.
        summary: the text below the table.
        notes: the lines below the summary.
    """
    lines: list[str] = []
    rows = table_rows(collectives)
    if rows:
        lines += columns(("for", "moved by", "over", "runs"), COLUMNS, "bytes")
    for row in rows[:ROWS]:
        cells = (row.title, row.kind, row.axes, row.runs)
        lines += row_lines(cells, COLUMNS, bytes_text(row.total), row.details)
        lines += [INDENT + line for line in wrapped(row.cause, WIDTH - len(INDENT)) if line]
    smaller = rows[ROWS:]
    if smaller:
        rest = bytes_text(sum(row.total for row in smaller))
        more = count(len(smaller), "smaller row")
        lines.append(f"and {more}, {rest} in total (`ledger.collectives` holds all collectives)")
    if lines:
        lines.append("")
    lines += [summary, *paragraphs(notes)]
    return lines_text(lines)


def idle_text(idle: Sequence[str]) -> str:
    """Describe mesh axes over which nothing is moved or sharded."""
    return f"nothing is moved or sharded over {' and '.join(idle)}"


def memory_text(memory: Memory) -> str:
    """Describe the memory in one line."""
    arguments = sum(memory.arguments.values())
    parts = [f"arguments {bytes_text(arguments)}", f"outputs {bytes_text(memory.outputs)}"]
    if memory.aliases:
        parts[-1] += f" ({bytes_text(memory.aliases)} in donated arguments)"
    parts += [f"temporaries {bytes_text(memory.temporaries)}", f"peak {bytes_text(memory.peak)}"]
    return f"memory of each device: {', '.join(parts)}"


def peak_notes(memory: Memory) -> list[str]:
    """Explain a peak that is less than another figure of the memory; empty otherwise."""
    if memory.peak >= max(sum(memory.arguments.values()), memory.outputs, memory.temporaries):
        return []
    return [
        "the peak is less than another figure: the peak counts the buffers in use at one time in "
        "main memory, while the other figures count allocations in all memories"
    ]


MOST = 4
"""The maximum number of warning lines; further lines are only counted."""
LONGEST = 80

# "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {...} to {...}
# efficiently for HLO operation %x = f32[8,16]{1,0} copy(...), metadata={op_name="w" ...} at f.py:3"
_REMATERIALIZED = re.compile(r"^\[SPMD\] (Involuntary full rematerialization)\.")
_ARRAY = re.compile(r"operation %\S+ = (\w+\[[\d,]*\])")
_NAME = re.compile(r'op_name="([^"]*)"')
_LINE = re.compile(r" at (\S+:\d+)$")


def warning_lines(warnings: Sequence[str]) -> list[str]:
    """Shorten the warnings; empty if there are none."""
    if not warnings:
        return []
    short: dict[str, int] = {}
    for warning in warnings:
        text = short_warning(warning)
        short[text] = short.get(text, 0) + 1
    lines = [f"{count(len(warnings), 'compiler warning')} (see `ledger.warnings`):"]
    for text, number in list(short.items())[:MOST]:
        lines.append(f"{text} (×{number})" if number > 1 else text)
    if len(short) > MOST:
        lines.append(f"and {len(short) - MOST} more")
    return lines


def short_warning(warning: str) -> str:
    """Shorten a warning to its kind, its array and its line."""
    kind = _REMATERIALIZED.match(warning)
    if kind is None:
        text = warning.removeprefix("[SPMD] ")
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    text = kind[1].lower()
    array, name, line = (pattern.search(warning) for pattern in (_ARRAY, _NAME, _LINE))
    if array is not None:
        text += f" of {array[1]}"
    if line is not None:
        return f"{text}, {source_end(line[1])}"
    if name is not None:
        # The last part of a name such as `jit(step)/jvp(model)/dot_general` is the operation.
        text += f", {name[1].rpartition('/')[2]}"
    return text
