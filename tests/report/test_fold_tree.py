"""What has a path and a size ─► a tree to fold, with sums."""

import re
from typing import Any

import pytest

from functree.report.page import OPEN_LINES, TreeLeaf, tree_html


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


def test_subtrees_with_several_lines_each() -> None:
    several = [*leaves("a.w", "a.w", "b.w")]
    html = tree_html(several, "all", "leaf", named=False)
    assert outline(html) == [
        "- all: 3 leaves, 12 B",
        "- a.w: 2 leaves, 8 B",
        "a.w as None",
        "a.w as None",
        "end",
        "b.w as b.w",
        "end",
    ]


def test_the_bare_array() -> None:
    assert "(the array)" in tree_html([TreeLeaf((), 4, "")], "all", "leaf")


def test_no_leaves() -> None:
    assert tree_html([], "all", "leaf") == ""


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
