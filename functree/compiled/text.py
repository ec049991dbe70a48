"""What a ledger knows ─► a table as text."""

from collections.abc import Sequence

from functree.compiled.collective import Collective
from functree.compiled.fold import axes_text, fold
from functree.compiled.memory import Memory
from functree.errors import count
from functree.layout.plan.fold import bytes_text
from functree.layout.table import INDENT, WIDTH, columns, width, wrapped

COLUMNS = (44, 18, 16, 5)  # of parameter, kind, mesh axes and runs
LINES = 40
"""The number of lines of the table; what is moved in the others is told in one."""


def ledger_text(collectives: Sequence[Collective], summary: str, notes: Sequence[str]) -> str:
    """The table, at most 100 columns wide.

    Args:
        collectives: what is moved.
        summary: the text below the table.
        notes: the lines above it.
    """
    lines: list[str] = []
    for note in notes:
        lines += wrapped(note, WIDTH)
    if notes:
        lines.append("")
    folded = fold(collectives)
    if folded:
        lines += columns(("for", "moved by", "over", "runs"), COLUMNS, "bytes")
    for line in folded[:LINES]:
        title = line.title
        if width(title) > COLUMNS[0]:
            lines += wrapped(title, WIDTH)
            title = ""
        lines += columns((title, line.kind, line.axes, line.runs), COLUMNS, bytes_text(line.total))
        lines += [INDENT + part for part in wrapped(line.told, WIDTH - len(INDENT))]
    if len(folded) > LINES:
        rest = bytes_text(sum(line.total for line in folded[LINES:]))
        more = count(len(folded) - LINES, "smaller line")
        lines.append(f"and {more}, {rest} in all (`ledger.collectives` has each)")
    return "\n".join([line.rstrip() for line in [*lines, "", summary]])


def summary_text(
    totals: dict[tuple[str, tuple[str, ...] | None], int], memory: Memory, attributed: float, where: str
) -> str:
    """The totals and the memory, in a few lines.

    Args:
        totals: the moved bytes by kind and mesh axes.
        memory: the memory.
        attributed: the share of the moved bytes that have a path.
        where: the backend and the mesh.
    """
    lines = [f"{where}: {bytes_text(sum(totals.values()))} moved to each device"]
    for (kind, axes), size in totals.items():
        lines += columns((f"{INDENT}{kind}", axes_text(axes)), (24, 36), bytes_text(size))
    if totals:
        lines.append(f"{INDENT}{unattributed_text(attributed)}")
    return "\n".join([line.rstrip() for line in [*lines, memory_text(memory)]])


def unattributed_text(attributed: float) -> str:
    """What is said of the bytes without a path."""
    share = f"{100 * (1 - attributed):.1f} %" if not 0 < 1 - attributed < 0.0005 else "less than 0.1 %"
    return f"{share} of these bytes serve no parameter that could be found"


def memory_text(memory: Memory) -> str:
    """The memory in one line."""
    given = sum(memory.arguments.values())
    parts = [f"arguments {bytes_text(given)}", f"outputs {bytes_text(memory.outputs)}"]
    if memory.aliases:
        parts[-1] += f" ({bytes_text(memory.aliases)} of them in donated arguments)"
    parts += [f"temporaries {bytes_text(memory.temporaries)}", f"peak {bytes_text(memory.peak)}"]
    return f"memory of each device: {', '.join(parts)}"
