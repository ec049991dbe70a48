"""What a ledger knows ─► HTML, for a notebook or a browser."""

import html
from collections.abc import Iterator, Sequence

from functree.compiled.collective import Collective
from functree.compiled.fold import fold
from functree.compiled.memory import Memory
from functree.layout.plan.fold import bytes_text
from functree.layout.plan.page import in_style, whole_page

LARGEST = 30
"""The number of arguments that the page shows."""


def ledger_html(collectives: Sequence[Collective], memory: Memory, notes: Sequence[str], page: bool) -> str:
    """The ledger as HTML, with a bar for the bytes of each line. The bar of what serves no parameter is orange.

    Args:
        collectives: what is moved.
        memory: the memory.
        notes: the lines above the tables.
        page: whether to return a whole page, and not a fragment for a notebook.
    """
    moved = _table(("for", "moved by", "over", "runs", "bytes", "where"), list(_moved(collectives)))
    kept = _table(("argument", "bytes on each device"), list(_kept(memory)))
    told = "".join(f"<p{' class=problem' if n.startswith('WARNING') else ''}>{html.escape(n)}</p>" for n in notes)
    fragment = in_style(f"{told}{moved}{kept}")
    return whole_page(fragment, "functree ledger") if page else fragment


def _table(titles: Sequence[str], rows: Sequence[str]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _moved(collectives: Sequence[Collective]) -> Iterator[str]:
    lines = fold(collectives)
    most = max((line.total for line in lines), default=1) or 1
    for line in lines:
        cells = "".join(f"<td><code>{html.escape(text)}</code></td>" for text in (line.title, line.kind, line.axes))
        kind = ' class="copied"' if line.title == "no parameter" else ""
        where = f'<td class="why">{html.escape(line.told)}</td>'
        yield f'<tr{kind}>{cells}<td class="n">{line.runs}</td>{_bar(line.total, most)}{where}</tr>'


def _kept(memory: Memory) -> Iterator[str]:
    largest = sorted(memory.arguments.items(), key=lambda item: -item[1])
    most = max((size for _, size in largest), default=1) or 1
    for path, size in largest[:LARGEST]:
        yield f"<tr><td><code>{html.escape(str(path))}</code></td>{_bar(size, most)}</tr>"
    if len(largest) > LARGEST:
        rest = bytes_text(sum(size for _, size in largest[LARGEST:]))
        yield f'<tr><td class="why">{len(largest) - LARGEST} smaller ones</td><td class="n">{rest}</td></tr>'


def _bar(size: int, most: int) -> str:
    width = max(1, round(100 * size / most))
    return f'<td class="n">{bytes_text(size)}<div class="bar" style="width:{width}%"></div></td>'
