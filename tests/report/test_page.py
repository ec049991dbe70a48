"""What a report says ─► HTML: nothing of it is markup, and each bar can be seen."""

import re

import pytest

from functree.report.page import (
    Card,
    Segment,
    bar_html,
    cards_html,
    code,
    key_html,
    list_html,
    mesh_axes_html,
    notes_html,
    report_html,
    section_html,
)

MARKUP = '<b>&"'
ESCAPED = "&lt;b&gt;&amp;&quot;"
SIZES = {"data": 2, "model": 4, "<b>": 1}


def test_texts_are_no_markup() -> None:
    assert code(MARKUP) == f"<code>{ESCAPED}</code>"
    assert code("x", "name") == '<code class="name">x</code>'
    assert notes_html([MARKUP], ["note", f"`{MARKUP}` x"]) == (
        f'<p class="problem">{ESCAPED}</p><p class="muted">note</p>'
        f'<p class="muted"><code>{ESCAPED}</code> x</p>'
    )
    whole = (
        cards_html([Card(MARKUP, MARKUP)])
        + section_html(MARKUP, "x")
        + bar_html([Segment(MARKUP, 3)], 3)
        + key_html([Segment(MARKUP, 3)])
        + list_html(MARKUP, {})
        + mesh_axes_html(["<b>"], SIZES)
    )
    assert MARKUP not in whole and "<code><b>" not in whole and whole.count(ESCAPED) == 6


@pytest.mark.parametrize(
    ("sizes", "most", "widths"),
    [([0], 0, []), ([0, 8], 8, ["100"]), ([1], 10**9, ["1e-07"]), ([4, 2], 8, ["50", "25"])],
)
def test_bars(sizes: list[int], most: int, widths: list[str]) -> None:
    bar = bar_html([Segment("a", size) for size in sizes], most)
    assert bar.startswith('<div class="bar">')
    assert re.findall(r"width:(\S+)%", bar) == widths


def test_mesh_axes_have_colours_of_their_own() -> None:
    assert mesh_axes_html(("data", "model"), SIZES) == (
        '<code class="a0">data</code> <code class="a1">model</code>'
    )
    assert mesh_axes_html(None, SIZES) == "?"
    # Of a mesh that is not known.
    assert mesh_axes_html(("x",), {}) == '<code class="a0">x</code>'
    many = {f"x{i}": 2 for i in range(9)}
    assert 'class="a5"' in mesh_axes_html(["x8"], many)


def test_a_list() -> None:
    assert list_html("title", {"a": 8, "b": 4}) == (
        '<div><h3>title</h3><div class="item"><span>a</span><span class="num">8 B</span>'
        '<div class="bar"><i class="p0" style="width:100%" title=": 8 B"></i></div></div>'
        '<div class="item"><span>b</span><span class="num">4 B</span>'
        '<div class="bar"><i class="p0" style="width:50%" title=": 4 B"></i></div></div></div>'
    )


def test_a_part_without_content_has_no_title() -> None:
    assert section_html("title", "", "") == ""
    assert section_html("title", "", "x") == "<section><h2>title</h2>x</section>"


def test_a_fragment_and_a_page() -> None:
    fragment = report_html("title", "<p>head</p>", "<p>x</p>", page=False)
    assert fragment.startswith("<style>") and "<script" not in fragment
    assert fragment.endswith('<div class="functree"><p>head</p><p>x</p></div>')
    page = report_html("a & b", "<p>head</p>", "<p>x</p>", page=True)
    assert page.startswith("<!doctype html>") and page.endswith("</script></div></body></html>")
    assert "<title>a &amp; b</title>" in page and '<meta charset="utf-8">' in page
    assert page.index("<p>head</p>") < page.index('type="search"') < page.index("<p>x</p>")


def test_a_page_asks_for_nothing() -> None:
    page = report_html("title", "", "", page=True)
    addresses = re.findall(r"(?:src|href)=[\"']?([^\"' >]+)|url\(([^)]+)\)|(https?:)", page)
    assert addresses == [("data:,", "", "")] and "@import" not in page
