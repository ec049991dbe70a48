"""What a report says ─► HTML: nothing of it is markup, and each bar can be seen; a tree to fold, with
sums; pictures of arrays that are cut over a mesh."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from functree.report.page import (
    HIGH,
    MOST,
    OPEN_LINES,
    WIDE,
    Card,
    Pictures,
    Segment,
    TreeLeaf,
    bar_html,
    cards_html,
    code,
    device_color,
    key_html,
    list_html,
    mesh_axes_html,
    notes_html,
    report_html,
    section_html,
    tree_html,
)
from tests.lib.meshes import SIZES

MARKUP = '<b>&"'
ESCAPED = "&lt;b&gt;&amp;&quot;"
AXES = {"data": 2, "model": 4, "<b>": 1}


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
        + mesh_axes_html(["<b>"], AXES)
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


def test_mesh_axes_have_colors_of_their_own() -> None:
    assert mesh_axes_html(("data", "model"), AXES) == (
        '<code class="a0">data</code> <code class="a1">model</code>'
    )
    assert mesh_axes_html(None, AXES) == "?"
    # Of a mesh that is not known.
    assert mesh_axes_html(("x",), {}) == '<code class="a5">x</code>'
    many = {f"x{i}": 2 for i in range(9)}
    assert 'class="a5"' in mesh_axes_html(["x8"], many)


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


def leaves(*paths: str, size: int = 4) -> list[TreeLeaf]:
    return [TreeLeaf(tuple(path.split(".")), size, f" <i>{path}</i>") for path in paths]


def outline(html: str) -> list[str]:
    """The lines of a tree: `+ name, number, size` for a subtree, `path` for a leaf."""
    lines: list[str] = []
    node = (
        r"<details( open)?><summary><span><code>(.*?)</code> <span.*?>(.*?)</span>.*?num\">(.*?)<"
    )
    leaf = r'class="leaf[^>]*data-path="(.*?)">(?:<svg.*?</svg>)?<div>(?:<code class="name">(.*?)</code>)?'
    for found in re.finditer(f"{node}|{leaf}|</details>", html):
        opened, name, number, size, path, title = found.groups()
        if name is not None:
            lines.append(f"{'-' if opened else '+'} {name}: {number}, {size}")
        elif path is not None:
            lines.append(f"{path} as {title}")
        else:
            lines.append("end")
    return lines


TREES: dict[str, tuple[list[str], list[str]]] = {
    "no subtree": (["a", "b"], ["- all: 2 leaves, 8 B", "a as a", "b as b", "end"]),
    "in their order": (
        ["a.x", "a.y", "b", "c.x", "c.y"],
        [
            "- all: 5 leaves, 20 B",
            "- a: 2 leaves, 8 B", "a.x as x", "a.y as y", "end",
            "b as b",
            "- c: 2 leaves, 8 B", "c.x as x", "c.y as y", "end",
            "end",
        ],
    ),
    "a subtree of one line is none": (
        ["a.b.w", "c"], ["- all: 2 leaves, 8 B", "a.b.w as a.b.w", "c as c", "end"],
    ),
    "what is all of another is one with it": (
        ["a.b.w", "a.b.v", "c"],
        ["- all: 3 leaves, 12 B", "- a.b: 2 leaves, 8 B", "a.b.w as w", "a.b.v as v", "end", "c as c", "end"],
    ),
    "a leaf beside a subtree of its name": (
        ["a", "a.x", "a.y"],
        ["- all: 3 leaves, 12 B", "a as a", "- a: 2 leaves, 8 B", "a.x as x", "a.y as y", "end", "end"],
    ),
    "no path": ([""], ["- all: 1 leaf, 4 B", " as None", "end"]),
}  # fmt: skip


@pytest.mark.parametrize("case", TREES)
def test_trees(case: str) -> None:
    paths, expected = TREES[case]
    assert outline(tree_html(leaves(*paths), "all", "leaf")) == expected


def test_the_bare_array() -> None:
    assert "(the root)" in tree_html([TreeLeaf((), 4, "")], "all", "leaf")


def test_a_large_tree_is_open_as_far_as_it_fits() -> None:
    many = leaves(*[f"a.b{i}.w{j}" for i in range(10) for j in range(10)])
    lines = outline(tree_html(many, "all", "leaf"))
    # The first level has only one subtree, which is one with the whole.
    assert sum(line.startswith("- ") for line in lines) <= 2
    assert sum(line.startswith("+ b") for line in lines) == 10 and len(many) > OPEN_LINES
    closed = outline(tree_html(leaves("a.x", "a.y"), "all", "leaf", opened=False))
    assert closed[0] == "+ all: 2 leaves, 8 B"


def test_numbers_copies_and_pictures() -> None:
    one: Any = TreeLeaf(("a",), 8, "", number=3, picture="<svg></svg>", copies=6)
    html = tree_html([one], "all", "leaf")
    assert "3 leaves" in html and 'class="leaf drawn"' in html
    assert 'class="p0" style="width:25%" title="a: 2 B"' in html
    assert 'class="p0 copied" style="width:75%" title="a, copies: 6 B"' in html


def test_paths_are_no_markup() -> None:
    html = tree_html([TreeLeaf(('"<b>"', "<i>"), 4, "")] * 2, "<u>", "leaf")
    assert not re.search("<[biu]>", html) and 'data-path="&quot;&lt;b&gt;&quot;.&lt;i&gt;"' in html


Cuts = Sequence[tuple[str, ...]]


def blocks(shape: Sequence[int], cuts: Cuts, sizes: dict[str, int] = SIZES) -> list[list[str]]:
    """The colors of the devices of each block, from left to right and from top to bottom."""
    pictures = Pictures(sizes)
    pictures.of(shape, cuts)
    drawn = pictures.definitions()
    stripes: dict[str, list[str]] = {}
    for key, stops in re.findall(r'<linearGradient id="(\w+)" y2="1">(.*?)</linear', drawn):
        stripes[f"url(#{key})"] = re.findall(r'stop-color="(.*?)"', stops)[::2]
    return [stripes.get(fill, [fill]) for fill in re.findall('fill="(.*?)"', drawn)]


CUTS: dict[str, tuple[tuple[int, ...], Cuts]] = {
    "rows and columns": ((8, 16), [("data",), ("model",)]),
    "columns and rows": ((8, 16), [("model",), ("data",)]),
    "columns": ((8, 16), [(), ("model",)]),
    "rows": ((8, 16), [("data",), ()]),
    "one dimension over both": ((16,), [("data", "model")]),
    "the other order": ((16,), [("model", "data")]),
    "whole": ((8, 16), [(), ()]),
    "a number": ((), []),
    "the cut ones of four": ((2, 8, 4, 6), [(), ("model",), (), ("data",)]),
}


@pytest.mark.parametrize("case", CUTS)
def test_blocks_are_on_the_devices_that_jax_has_them_on(case: str) -> None:
    shape, cuts = CUTS[case]
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in cuts)))
    # JAX's slices in the order of the array, with the devices of each.
    found: dict[tuple[int, ...], list[str]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        start = tuple(one.start or 0 for one in index)
        found.setdefault(start, []).append(device_color(device.id, SIZES))
    assert blocks(shape, cuts) == [found[start] for start in sorted(found)]


def test_without_cuts_the_largest_dimensions_are_drawn() -> None:
    one, other = Pictures(SIZES), Pictures(SIZES)
    one.of((64, 8, 4), [(), (), ()])
    other.of((64, 8), [(), ()])
    assert one.definitions() == other.definitions() != ""


def test_every_device_has_a_color_of_its_own() -> None:
    for sizes in (SIZES, {"x": 8}, {"a": 2, "b": 2, "c": 2}, {"one": 1, "x": 8}):
        assert len({device_color(i, sizes) for i in range(8)}) == 8
    assert device_color(0, {}) == device_color(0, {"x": 1})


def test_a_large_mesh_is_drawn_in_part() -> None:
    sizes = {"data": 16, "model": 16}
    assert len(blocks((64, 64), [("data",), ("model",)], sizes)) == MOST * MOST
    (whole,) = blocks((64, 64), [(), ()], sizes)
    assert len(set(whole)) == MOST


def test_the_title_tells_copies() -> None:
    pictures = Pictures(SIZES)
    for cuts in ([(), ()], [("model",), ()], [("data",), ("model",)]):
        pictures.of((8, 8), cuts)
    assert re.findall("<title>(.*?)</title>", pictures.definitions()) == [
        "whole array on each of 8 devices: copies over data, model",
        "4 blocks, each on 2 devices: copies over data",
        "8 blocks, one on each device",
    ]


@pytest.mark.parametrize("shape", [(), (1,), (10**9,), (1, 10**9), (10**9, 1), (0, 4), (3, 5, 7)])
def test_pictures_stay_in_their_frame(shape: tuple[int, ...]) -> None:
    pictures = Pictures(SIZES)
    pictures.of(shape, [()] * len(shape))
    for rect in re.findall(r"<rect (.*?)/>", pictures.definitions()):
        at = {
            name: float(value)
            for name, value in re.findall(r'\b(x|y|width|height)="([^ "]*)"', rect)
        }
        assert at["x"] >= 0 and at["y"] >= 0 and at["width"] > 0 and at["height"] > 0
        assert at["x"] + at["width"] <= WIDE and at["y"] + at["height"] <= HIGH
