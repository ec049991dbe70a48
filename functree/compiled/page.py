"""What a ledger knows ─► HTML, for a notebook or a browser."""

from collections.abc import Iterator, Sequence

from functree.compiled.collective import Collective
from functree.compiled.memory import Memory
from functree.compiled.table_rows import NO_PARAMETER, table_rows
from functree.report.byte_sizes import bytes_text
from functree.report.page import (
    bar_cell,
    code_cells,
    comment_cell,
    notes_html,
    report_html,
    table_html,
)

LARGEST = 30
"""The number of arguments that the page shows."""


def ledger_html(
    collectives: Sequence[Collective],
    memory: Memory,
    warnings: Sequence[str],
    notes: Sequence[str],
    page: bool,
) -> str:
    """The ledger as HTML, with a bar for the bytes of each line.

    The bar of what serves no parameter is orange.

    Args:
        collectives: what is moved.
        memory: the memory.
        warnings: what the compiler said, and stands out above the tables.
        notes: the other lines above the tables.
        page: whether to return a whole page, and not a fragment for a notebook.
    """
    content = notes_html(warnings, notes)
    if collectives:
        titles = ("for", "moved by", "over", "runs", "bytes", "where")
        content += table_html(titles, _moved(collectives))
    if memory.arguments:
        content += table_html(("argument", "bytes on each device"), _arguments(memory))
    return report_html(content, "functree ledger", page)


def _moved(collectives: Sequence[Collective]) -> Iterator[str]:
    rows = table_rows(collectives)  # the largest first
    for row in rows:
        kind = ' class="copied"' if row.title == NO_PARAMETER else ""
        cells = (
            code_cells(row.title, row.kind, row.axes),
            f'<td class="n">{row.runs}</td>',
            bar_cell(bytes_text(row.total), row.total, rows[0].total),
            comment_cell(row.details),
        )
        yield f"<tr{kind}>{''.join(cells)}</tr>"


def _arguments(memory: Memory) -> Iterator[str]:
    arguments = sorted(memory.arguments.items(), key=lambda item: item[1], reverse=True)
    _, most = arguments[0]
    for path, size in arguments[:LARGEST]:
        yield f"<tr>{code_cells(str(path))}{bar_cell(bytes_text(size), size, most)}</tr>"
    smaller = arguments[LARGEST:]
    if smaller:
        rest = bytes_text(sum(size for _, size in smaller))
        title = comment_cell(f"{len(smaller)} smaller ones")
        yield f'<tr>{title}<td class="n">{rest}</td></tr>'
