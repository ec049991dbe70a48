"""What a ledger knows ─► a table as text."""

from collections.abc import Mapping, Sequence

from functree.compiled.collective import Collective
from functree.compiled.memory import Memory
from functree.compiled.table_rows import axes_text, table_rows
from functree.errors import count
from functree.report.table import INDENT, bytes_text, columns, lines_text, paragraphs, row_lines

COLUMNS = (52, 18, 16, 5)  # of parameter, kind, mesh axes and runs
ROWS = 40
"""The number of rows of the table; what is moved in the others is told in one line."""


def ledger_text(collectives: Sequence[Collective], summary: str, notes: Sequence[str]) -> str:
    """The table, at most 110 columns wide.

    Args:
        collectives: what is moved.
        summary: the text below the table.
        notes: the lines below that.
    """
    lines: list[str] = []
    rows = table_rows(collectives)
    if rows:
        lines += columns(("for", "moved by", "over", "runs"), COLUMNS, "bytes")
    for one in rows[:ROWS]:
        cells = (one.title, one.kind, one.axes, one.runs)
        lines += row_lines(cells, COLUMNS, bytes_text(one.total), one.details)
    smaller = rows[ROWS:]
    if smaller:
        rest = bytes_text(sum(one.total for one in smaller))
        more = count(len(smaller), "smaller line")
        lines.append(f"and {more}, {rest} in all (`ledger.collectives` has each)")
    if lines:
        lines.append("")
    lines += [summary, *paragraphs(notes)]
    return lines_text(lines)


def summary_text(
    totals: Mapping[tuple[str, tuple[str, ...] | None], int],
    memory: Memory,
    attributed: float,
    where: str,
    idle: Sequence[str],
) -> str:
    """The totals and the memory, in a few lines.

    Args:
        totals: the moved bytes by kind and mesh axes.
        memory: the memory.
        attributed: the share of the moved bytes that have a path.
        where: the backend and the mesh.
        idle: the mesh axes that do nothing.
    """
    lines = [f"{where}: {bytes_text(sum(totals.values()))} moved to each device"]
    for (kind, axes), size in totals.items():
        lines += columns((f"{INDENT}{kind}", axes_text(axes)), (24, 36), bytes_text(size))
    if attributed < 1:
        lines.append(f"{INDENT}{unattributed_text(attributed)}")
    if idle:
        lines.append(idle_text(idle))
    return lines_text([*lines, memory_text(memory)])


def idle_text(idle: Sequence[str]) -> str:
    """What is said of mesh axes that do nothing."""
    return f"over {' and '.join(idle)} nothing is moved and nothing is sharded"


def unattributed_text(attributed: float) -> str:
    """What is said of the bytes without a path."""
    lost = 1 - attributed
    share = f"{100 * lost:.1f} %"
    if 0 < lost < 0.0005:  # "0.0 %" would say that there are none
        share = "less than 0.1 %"
    return f"{share} of these bytes serve no parameter that could be found"


def memory_text(memory: Memory) -> str:
    """The memory in one line."""
    given = sum(memory.arguments.values())
    parts = [f"arguments {bytes_text(given)}", f"outputs {bytes_text(memory.outputs)}"]
    if memory.aliases:
        parts[-1] += f" ({bytes_text(memory.aliases)} of them in donated arguments)"
    parts += [f"temporaries {bytes_text(memory.temporaries)}", f"peak {bytes_text(memory.peak)}"]
    return f"memory of each device: {', '.join(parts)}"
