"""A plan as a page, and as a fragment for a notebook."""

import html
import re
from html.parser import HTMLParser
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import functree as ft
from functree.layout.plan.text import MOST_LINES
from tests.lib.meshes import SIZES

P = PartitionSpec
TREE = {
    "blocks": [{"w": jnp.ones((4, 8)), "b": jnp.ones(8)} for _ in range(2)],
    "head": jnp.ones((8, 16)),
}
RULES = ft.StateSharding({"**.w": P(None, "model"), "head": P(("data", "model")), ...: P()})


class Reader(HTMLParser):
    """The tags, the classes and the texts of a page; fails where tags do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.classes: list[str] = []
        self.paths: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)
        for name, value in attrs:
            if name == "class":
                self.classes += value.split()
            elif name == "data-path":
                self.paths.append(value)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


def test_the_page() -> None:
    plan = ft.plan(TREE, RULES, SIZES)
    page = Reader(plan.html())
    assert page.paths == ["blocks.{0-1}.b", "blocks.{0-1}.w", "head"]
    assert page.texts["h1"] == ["Plan on the mesh (data=2, model=4)"]
    assert page.texts["h2"] == ["8 devices, 192 B each", "Arrays"]
    # The figures at the head, and then what is replicated.
    assert page.texts["b"] == ["192 B", "832 B", "88 B", "5"]
    assert [text.split(":")[0] for text in page.texts["p"]] == [
        "replicated over data, model",
        "replicated over data",
    ]
    assert page.classes.count("device") == 8 and page.tags.count("script") == 1
    text = plan.html()
    for shown in (
        "f32[4, 8/model]",
        "f32[8/data/model, 16]",
        html.escape("'**.w': P(None, 'model') as given"),
        "device 5, data=1, model=1",
        "×2",
    ):
        assert shown in text


def test_a_fragment_for_a_notebook() -> None:
    plan = ft.plan(TREE, RULES, SIZES)
    fragment = plan._repr_html_()
    reader = Reader(fragment)
    assert fragment.startswith("<style>") and "script" not in reader.tags
    assert reader.paths == Reader(plan.html()).paths and "device" not in reader.classes
    many = {f"w{i:03}": jax.ShapeDtypeStruct((i + 1,), jnp.float32) for i in range(MOST_LINES + 9)}
    short = Reader(ft.plan(many, P(), SIZES)._repr_html_())
    assert short.paths == [f"w{i:03}" for i in range(9, MOST_LINES + 9)]
    assert "and 9 more lines for smaller arrays (" in short.texts["p"]
    assert len(Reader(ft.plan(many, P(), SIZES).html()).paths) == MOST_LINES + 9
    alike = {f"w{i:03}": jax.ShapeDtypeStruct((8,), jnp.float32) for i in range(MOST_LINES + 9)}
    assert len(Reader(ft.plan(alike, P(), SIZES)._repr_html_()).paths) == MOST_LINES


def test_a_page_is_the_same_in_each_run() -> None:
    # So a page that is kept in a repository does not change.
    assert ft.plan(TREE, RULES, SIZES).html() == ft.plan(TREE, RULES, SIZES).html()


def test_copies_are_marked() -> None:
    def copied(layout: P, sizes: dict[str, int]) -> list[str]:
        page = ft.plan(jnp.ones(8), layout, sizes).html()
        return re.findall(r'class="p0 copied" style="width:(\S+)%', page)

    assert copied(P(), SIZES) == ["87.5"] and copied(P("data"), SIZES) == ["75"]
    assert copied(P(("data", "model")), SIZES) == [] and copied(P(), {"data": 1}) == []


def test_moments_are_one_line_without_a_picture() -> None:
    ts = ft.TrainState.create({"a": jnp.ones((4, 8)), "b": jnp.ones(8)}, optax.adam(1e-3))
    page = ft.plan(ts, P(), SIZES).html()
    reader = Reader(page)
    assert reader.paths[-1] == "opt_state.0.nu.**" and "like the parameters, in f32" in page
    assert reader.classes.count("drawn") == len(reader.paths) - 2


def test_live_arrays_on_a_mesh_and_off_it(mesh: Mesh) -> None:
    other = ft.make_mesh(x=8)
    tree = {
        "a": ft.shard(jnp.ones(8), P("model"), mesh),
        "b": ft.shard(jnp.ones(8), P("x"), other),
        "c": jnp.ones(8),
    }
    page = ft.plan(tree).html()
    assert "on the mesh (x=8)" in page and "f32[8] no spec" in page
    # What is on another mesh is not drawn as on this one, although its axis has the same name.
    tree["b"] = ft.shard(jnp.ones(8), P("model"), ft.make_mesh(model=8))
    assert len(re.findall(r'<use href="#(\S+)"', ft.plan(tree).html())) == 1


@pytest.mark.parametrize("tree", [{}, {"a": jnp.ones((0, 4))}, jnp.ones(())])
def test_pages_of_next_to_nothing(tree: Any) -> None:
    for sizes in ({}, SIZES):
        Reader(ft.plan(tree, P(), sizes).html())


def test_a_large_mesh_has_the_first_devices_only() -> None:
    text = ft.plan(TREE, P(), {"a": 64, "b": 4}).html()
    assert Reader(text).classes.count("device") == 16
    assert ">and 240 more<" in text
    # A device has no place along an axis of size 1.
    assert "device 1, data=1<" in ft.plan(TREE, P(), {"data": 2, "model": 1}).html()


def test_everything_is_escaped() -> None:
    evil = '<u>alert("1")</u>&amp;'

    def by(path: Any, leaf: Any) -> P:
        return P("data")

    by.__qualname__ = "<s>by</s>"
    plan = ft.plan({evil: jnp.ones(3)}, by, {"data": 2}, check=False)
    page = Reader(plan.html())
    assert not {"u", "s"} & set(page.tags) and page.paths == [str(ft.Path((evil,)))]
    assert "problem" in page.classes and html.escape("<s>by</s>") in plan.html()
