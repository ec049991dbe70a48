"""What a report says ─► HTML: nothing of it is markup, and each bar can be seen."""

import re

import pytest

from functree.report.page import (
    bar_cell,
    code_cells,
    comment_cell,
    notes_html,
    report_html,
    table_html,
)

MARKUP = '<b>&"'
ESCAPED = "&lt;b&gt;&amp;&quot;"


def test_texts_are_no_markup() -> None:
    assert code_cells(MARKUP, "x") == f"<td><code>{ESCAPED}</code></td><td><code>x</code></td>"
    assert comment_cell(MARKUP) == f'<td class="why">{ESCAPED}</td>'
    assert notes_html([MARKUP], ["note", MARKUP]) == (
        f'<p class="problem">{ESCAPED}</p><p>note</p><p>{ESCAPED}</p>'
    )


@pytest.mark.parametrize(
    ("size", "most", "width"),
    [(0, 0, 1), (0, 8, 1), (1, 10**9, 1), (4, 8, 50), (8, 8, 100), (1, 3, 33)],
)
def test_bars(size: int, most: int, width: int) -> None:
    cell = bar_cell("4 B", size, most)
    assert cell.startswith('<td class="n">4 B<div class="bar"')
    assert re.findall(r"width:(\d+)%", cell) == [str(width)]


def test_a_table() -> None:
    rows = ["<tr><td>1</td></tr>", "<tr><td>2</td></tr>"]
    assert table_html(["path", "spec"], rows) == (
        "<table><tr><th>path</th><th>spec</th></tr>" + "".join(rows) + "</table>"
    )


def test_a_fragment_and_a_page() -> None:
    fragment = report_html("<p>x</p>", "title", page=False)
    assert fragment.startswith("<style>") and fragment.endswith(
        '</style><div class="functree"><p>x</p></div>'
    )
    page = report_html("<p>x</p>", "title", page=True)
    assert page.startswith("<!doctype html>") and f"<body>{fragment}</body>" in page
    assert '<meta charset="utf-8"><title>title</title>' in page
