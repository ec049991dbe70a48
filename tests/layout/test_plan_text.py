"""A plan as a table for a log and as a page for a notebook."""

from html.parser import HTMLParser
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from checks import python_calls
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float
from meshes import SIZES
from rich.cells import cell_len

import functree as ft
from functree.layout.plan.fold import fold
from functree.report.table import WIDTH

P = PartitionSpec


class Block(eqx.Module):
    w: Float[Array, "embed hidden"]
    b: Float[Array, "hidden"]


def block(hidden: int = 8) -> Block:
    return Block(
        jax.ShapeDtypeStruct((4, hidden), jnp.float32),
        jax.ShapeDtypeStruct((hidden,), jnp.bfloat16),
    )  # type: ignore[arg-type]


RULES = ft.AxisRules({"hidden": "model", "embed": None, "vocab": None})


def test_the_whole_text() -> None:
    plan = ft.plan({"blocks": [block(), block(), block()], "head": block(16)}, RULES, SIZES)
    assert str(plan) == (
        "path                                  array               spec                            per device\n"
        "blocks.{0-2}.w ×3                     f32[4, 8]           P(None, 'model')                      96 B\n"
        "    embed hidden: embed→None, hidden→model\n"
        "blocks.{0-2}.b ×3                     bf16[8]             P('model')                            12 B\n"
        "    hidden: hidden→model\n"
        "head.w                                f32[4, 16]          P(None, 'model')                      64 B\n"
        "    embed hidden: embed→None, hidden→model\n"
        "head.b                                bf16[16]            P('model')                             8 B\n"
        "    hidden: hidden→model\n"
        "\n"
        "mesh (data=2, model=4): 8 arrays, 720 B in all, 180 B on each device\n"
        "rules that no leaf needed: vocab"
    )


FOLDS: dict[str, tuple[Any, Any, list[tuple[str, int]]]] = {
    "equal layers": ([jnp.ones(4)] * 12, P(), [("{0-11}", 12)]),
    "a gap": (
        [jnp.ones(4), jnp.ones(8), jnp.ones(4), jnp.ones(4)],
        P(),
        [("{0,2-3}", 3), ("1", 1)],
    ),
    "another spec": (
        {"a": [jnp.ones(4), jnp.ones(4)]},
        {"a": [P(), P("data")]},
        [("a.0", 1), ("a.1", 1)],
    ),
    "another dtype": ([jnp.ones(4), jnp.ones(4, jnp.int32)], P(), [("0", 1), ("1", 1)]),
    "two indices": ([[jnp.ones(4)] * 2] * 3, P(), [("{0-2}.{0-1}", 6)]),
    "no full grid": ([[jnp.ones(4)] * 2, [jnp.ones(4)]], P(), [("0.0", 1), ("0.1", 1), ("1.0", 1)]),
    "names are not indices": ({"a": jnp.ones(4), "b": jnp.ones(4)}, P(), [("a", 1), ("b", 1)]),
    "text that looks like one": (
        {"0": jnp.ones(4), "1": jnp.ones(4)},
        P(),
        [('"0"', 1), ('"1"', 1)],
    ),
    "a bare array": (jnp.ones(4), P(), [("(the array)", 1)]),
}


@pytest.mark.parametrize("case", FOLDS)
def test_what_is_folded(case: str) -> None:
    tree, layout, expected = FOLDS[case]
    plan = ft.plan(tree, layout, SIZES)
    lines = fold(plan.rows)
    assert [(line.path, line.rows) for line in lines] == expected
    assert sum(line.each for line in lines) == plan.bytes_per_device
    assert sum(line.total for line in lines) == plan.total_bytes
    for line in lines:
        assert line.title in str(plan)


KEYS = st.one_of(
    st.sampled_from(["a", "weight", "b.c", "[dim]", "ключ", "<b>"]),
    st.text(st.characters(exclude_categories=["C", "Z", "M"]), min_size=1, max_size=130),
)
NAMED = st.dictionaries(KEYS, st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=5)


@given(NAMED, st.integers(0, 3))
def test_it_fits_a_log_and_leaves_out_no_path(
    shapes: dict[str, tuple[int, int]], depth: int
) -> None:
    tree: Any = {
        key: jax.ShapeDtypeStruct((size,) * ndim, jnp.float32)
        for key, (size, ndim) in shapes.items()
    }
    for level in range(depth):
        tree = {f"a_rather_long_name_{level}": tree}
    plan = ft.plan(
        tree, P(("data", "model", "expert")), {"data": 1, "model": 1, "expert": 1}, check=False
    )
    text = str(plan)
    assert all(cell_len(line) <= WIDTH for line in text.split("\n")) and WIDTH == 100
    squeezed = "".join(text.split())
    for row in plan:
        shown = str(row.path)
        assert shown in squeezed
        if cell_len(shown) <= WIDTH:
            assert shown in text  # in one piece, to be searched for


def test_problems_are_below_the_table_and_fit_too() -> None:
    long = {"a_very_long_name_of_a_module_that_goes_on": {"and_on_and_on_and_on": jnp.ones((3, 5))}}
    plan = ft.plan(long, P("data", "model"), SIZES, check=False)
    text = str(plan)
    assert (
        text.count(
            "PROBLEM a_very_long_name_of_a_module_that_goes_on.and_on_and_on_and_on: dimension"
        )
        == 2
    )
    assert "a multiple of 4" in " ".join(text.split()) and max(map(len, text.splitlines())) <= WIDTH
    dead = ft.plan(long, ft.StateSharding({"x": P(), ...: P()}), SIZES, check=False)
    assert "PROBLEM filter 'x': matches no leaf" in str(dead)


def test_memory_kinds_and_what_no_spec_says(mesh: Mesh) -> None:
    assert "P('data') pinned_host" in " ".join(
        str(ft.plan(jnp.ones(4), ft.on_host(P("data")), SIZES)).split()
    )
    assert " - " in str(ft.plan({"w": jnp.ones(4)}))


def test_each_row_costs_the_same_and_needs_no_rich():
    def calls(rows: int) -> int:
        tree = {f"w{i}": {"a": jax.ShapeDtypeStruct((8, i + 1), jnp.float32)} for i in range(rows)}
        plan = ft.plan(tree, P(), SIZES)
        return python_calls(lambda: str(plan))

    assert calls(1000) < 12 * calls(100)


# HTML


def test_each_field_keeps_rows_apart() -> None:
    row = ft.plan([jnp.ones((4, 4))], P(), SIZES)["0"]
    changes = {
        "spec": P("data", None),
        "reason": "because",
        "memory_kind": "pinned_host",
        "copies": 2,
        "shape": (4, 5),
    }
    for name, value in changes.items():
        other = row._replace(path=ft.Path((1,)), **{name: value})
        assert len(fold([row, other])) == 2, name
    assert len(fold([row, row._replace(path=ft.Path((1,)))])) == 1


class Reader(HTMLParser):
    """The cells of each row, the notes, and every tag; fails where tags do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.notes: list[str] = []
        self.tags: set[str] = set()
        self.classes: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)
        self.classes += [value for name, value in attrs if name == "class"]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "p":
            self.notes.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th", "code"):
            self.rows[-1][-1] += data
        elif self.open and self.open[-1] == "p":
            self.notes[-1] += data


def test_the_page() -> None:
    plan = ft.plan({"blocks": [block(), block()], "head": block(16)}, RULES, SIZES)
    page = Reader(plan.html())
    assert page.rows[0] == ["path", "array", "axes", "spec", "per device", "why"]
    first = [
        "blocks.{0-1}.w ×2",
        "f32[4, 8]",
        "embed hidden",
        "P(None, 'model')",
        "64 B",
        "embed→None, hidden→model",
    ]
    assert page.rows[1] == first
    assert len(page.rows) == 5 and page.tags >= {"html", "head", "title", "body"}
    mesh, unused = page.notes
    assert mesh == "mesh (data=2, model=4): 6 arrays, 576 B in all, 144 B on each device"
    assert unused == "rules that no leaf needed: vocab"
    fragment = plan._repr_html_()
    assert fragment in plan.html() and not fragment.startswith("<!doctype")
    assert Reader(fragment).rows == page.rows


def test_what_every_device_keeps_is_marked() -> None:
    rows = Reader(
        ft.plan({"a": jnp.ones(4), "b": jnp.ones(4)}, {"a": P(), "b": P("data")}, SIZES).html()
    )
    assert rows.classes.count("copied") == 1
    assert Reader(ft.plan(jnp.ones(4), P(), {"data": 1}).html()).classes.count("copied") == 0
    assert "each byte on 8 devices" in ft.plan(jnp.ones(4), P(), SIZES).html()


def test_everything_is_escaped() -> None:
    evil = '<script>alert("1")</script>&amp;'

    def by(path: Any, leaf: Any) -> P:
        return P("data")

    by.__qualname__ = "<b>by</b>"
    plan = ft.plan({evil: jnp.ones(3)}, by, {"data": 2}, check=False)
    page = Reader(plan.html())
    assert "script" not in page.tags and "b" not in page.tags
    assert page.rows[1][0] == str(ft.Path((evil,))) and "<b>by</b>" in page.rows[1][-1]
    assert any("<script>" in note for note in page.notes) and "problem" in page.classes
