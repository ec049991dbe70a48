"""What a ledger says: which collectives are one line, idle mesh axes, warnings, pages."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import functree as ft
from functree.compiled.collective import Cause
from functree.compiled.table import (
    LONGEST,
    short_warning,
    table_rows,
    warning_lines,
)

MESH = ft.make_mesh(data=2, model=4)
MEMORY = ft.Memory({ft.Path("m.a"): 512, ft.Path("x"): 512}, 256, 0, 2048, 3072)


def moved(path: str | None, **changes: Any) -> ft.Collective:
    """A collective for one parameter of `m`, or for none."""
    values: dict[str, Any] = {
        "kind": "all-gather",
        "mesh_axes": ("data",),
        "group_size": 2,
        "bytes": 64,
        "count": 1,
        "paths": () if path is None else (ft.Path(path),),
        "arguments": () if path is None else ("m",),
        "phase": "forward",
        "source": "/home/u/nn/f.py:9",
        "op": "all-gather.1",
    }
    return ft.Collective(**(values | changes))


QKV = [moved(f"b.{i}.{name}", bytes=32 + i) for i in range(3) for name in ("q", "k")]
TABLES: dict[str, tuple[list[ft.Collective], list[tuple[str, str, int]]]] = {
    "layers of several sizes": (
        [moved("b.0.w"), moved("b.1.w", bytes=8)],
        [("m.b.{0-1}.w", "2", 72)],
    ),
    "query and key": (QKV, [("m.b.{0-2}.{q,k}", "6", 198)]),
    "weights and biases of them": (
        [moved(f"{name}.{leaf}") for name in ("q", "k") for leaf in ("weight", "bias")],
        [("m.{q,k}.{weight,bias}", "4", 256)],
    ),
    "one that is much larger": (
        [moved("a", bytes=1), moved("b", bytes=160), moved("c", bytes=11), moved("d", bytes=10)],
        [("m.{b,c}", "2", 171), ("m.{a,d}", "2", 11)],
    ),
    "nothing that is moved": ([moved("a", bytes=0), moved("b", bytes=0)], [("m.{a,b}", "2", 0)]),
    "not in all layers": (
        [moved("b.0.q"), moved("b.0.k"), moved("b.1.q", bytes=1)],
        [("m.b.{0-1}.q", "2", 65), ("m.b.0.k", "1", 64)],
    ),
    "no full grid": (
        [moved("a.0.0", bytes=3), moved("a.0.1", bytes=2), moved("a.1.0", bytes=1)],
        [("m.a.0.0", "1", 3), ("m.a.0.1", "1", 2), ("m.a.1.0", "1", 1)],
    ),
    "other kinds, mesh axes and phases": (
        [moved("w", bytes=4), moved("v", kind="all-reduce", bytes=3),
         moved("u", mesh_axes=("model",), bytes=2), moved("t", phase="backward", bytes=1)],
        [("m.w", "1", 4), ("m.v", "1", 3), ("m.u", "1", 2), ("m.t", "1", 1)],
    ),
    "of parameters and of activations": (
        [moved("w", moves="itself"), moved("v", moves="itself"), moved("u", moves="activation")],
        [("m.{w,v}", "2", 128), ("m.u", "1", 64)],
    ),
    "other arguments": (
        [moved("w"), moved("w", arguments=("n",), bytes=8)], [("m.w", "1", 64), ("n.w", "1", 8)],
    ),
    "one of an unknown number": (
        [moved("a", count=None), moved("b", count=4)], [("m.{a,b}", "?", 320)],
    ),
    "several parameters each": (
        [moved("a", paths=(ft.Path("b.0"), ft.Path("c.0")), arguments=("m", "m")),
         moved("a", paths=(ft.Path("b.1"), ft.Path("c.1")), arguments=("m", "m"))],
        [("m.b.{0-1}, m.c.{0-1}", "2", 128)],
    ),
    "no parameter": ([moved(None), moved(None, bytes=1)], [("no parameter", "1", 64), ("no parameter", "1", 1)]),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLES)
def test_what_is_one_line(case: str) -> None:
    collectives, expected = TABLES[case]
    rows = table_rows(collectives)
    assert [(row.title, row.runs, row.total) for row in rows] == expected
    assert sorted(id(one) for row in rows for one in row.collectives) == sorted(
        map(id, collectives)
    )


def test_the_lines_that_call_a_package_are_told() -> None:
    linear = "/venv/lib/python3.11/site-packages/equinox/nn/_linear.py:9"
    both = [
        moved(path, source=linear, called_from=f"/home/u/train.py:{line}")
        for path, line in (("b.0.w", 12), ("b.1.w", 3))
    ]
    (row,) = table_rows(both)
    assert row.where == "nn/_linear.py:9, called from u/train.py:3,12, 64 B each time"
    # What serves no parameter is only one line if it is called from one line.
    lost = [moved(None, source=one.source, called_from=one.called_from) for one in both]
    assert len(table_rows(lost)) == 2 and len(table_rows([lost[0], lost[0]])) == 1


def test_lines_of_source() -> None:
    sources = ["/a/nn/f.py:10", "/a/nn/f.py:9", "C:\\nn\\g.py:1", None]
    (row,) = table_rows([moved(f"p{i}", source=source) for i, source in enumerate(sources)])
    assert row.details == "forward, nn/f.py:9,10, nn/g.py:1, 64 B each time"
    many = [moved(f"p{i}", source=f"f{i}.py:1") for i in range(5)]
    assert "f0.py:1, f1.py:1, f2.py:1, 2 more files" in table_rows(many)[0].details


@pytest.mark.parametrize(
    ("moves", "text"),
    [
        ("itself", "the array itself"),
        ("gradient", "its gradient"),
        ("activation", "an activation"),
        ("update", "a part of its update"),
        (None, ""),
    ],
)
def test_what_is_moved(moves: str | None, text: str) -> None:
    one = moved("w", moves=moves)
    (row,) = table_rows([one])
    assert row.details == ", ".join(filter(None, ("forward", text, "nn/f.py:9")))
    of_one = ledger(one)
    assert row.details in str(of_one) and text in of_one.html()
    assert ft.Ledger.from_json(of_one.to_json()) == of_one


def ledger(*collectives: ft.Collective, **changes: Any) -> ft.Ledger:
    values = {"memory": MEMORY, "backend": "tpu v5e", "sizes": {"data": 2, "model": 4}}
    return ft.Ledger(collectives, **(values | changes))


def test_the_whole_text() -> None:
    one = ledger(
        *QKV, moved(None, bytes=2), idle=("model",), warnings=("very slow compile",) * 2,
        not_understood=("something",),
    )  # fmt: skip
    assert str(one) == (
        "for                                                   moved by            over              runs        bytes\n"
        "m.b.{0-2}.{q,k}                                       all-gather          data              6           198 B\n"
        "    forward, nn/f.py:9\n"
        "no parameter                                          all-gather          data              1             2 B\n"
        "    forward, nn/f.py:9\n"
        "\n"
        "tpu v5e, mesh (data=2, model=4): 200 B moved to each device\n"
        "    all-gather            data                                       200 B\n"
        "    1.0 % of these bytes could not be attributed to a parameter\n"
        "nothing is moved or sharded over model\n"
        "memory of each device: arguments 1 KiB, outputs 256 B, temporaries 2 KiB, peak 3 KiB\n"
        "not understood: something\n"
        "2 compiler warnings (see `ledger.warnings`):\n"
        "very slow compile (×2)"
    )
    assert repr(one) == "<Ledger of 7 collectives for tpu v5e>"
    nothing = str(ledger())
    assert nothing.startswith(
        "tpu v5e, mesh (data=2, model=4): 0 B moved to each device\nmemory of"
    )


def test_many_lines_and_donated_memory() -> None:
    many = [moved(f"p{i}", kind=f"k{i}", bytes=100_000) for i in range(42)]
    text = str(ledger(*many, moved(None, bytes=1), memory=ft.Memory({}, 256, 128, 0, 640)))
    assert (
        "and 3 smaller rows, 195.3 KiB in total (`ledger.collectives` holds all collectives)"
        in text
    )
    assert "less than 0.1 % of these bytes could not be attributed to a parameter" in text
    assert "outputs 256 B (128 B in donated arguments)" in text


REMATERIALIZED = (
    "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {devices=[4,1]<=[4]} to "
    "{replicated} efficiently for HLO operation %x = f32[8,16]{1,0} copy(%y), sharding={replicated}, "
    'metadata={op_name="jit(f)/dot"'
)
WARNINGS = {
    REMATERIALIZED + " stack_frame_id=3} at /home/u/nn/mlp.py:3": (
        "involuntary full rematerialization of f32[8,16], nn/mlp.py:3"
    ),
    REMATERIALIZED + "}": "involuntary full rematerialization of f32[8,16], dot",
    "[SPMD] Involuntary full rematerialization. Other words": "involuntary full rematerialization",
    "[SPMD] other": "other",
    "x" * 200: "x" * LONGEST + "…",
}


@pytest.mark.parametrize("warning", WARNINGS)
def test_warnings_in_short(warning: str) -> None:
    assert short_warning(warning) == WARNINGS[warning]


def test_many_warnings_are_counted() -> None:
    assert warning_lines(()) == []
    lines = warning_lines([f"w{i % 6}" for i in range(7)])
    assert lines == [
        "7 compiler warnings (see `ledger.warnings`):", "w0 (×2)", "w1", "w2", "w3", "and 2 more",
    ]  # fmt: skip


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def double(x: jax.Array) -> jax.Array:
    return 2 * x


IDLE: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "sharded": (ft.P("data"), ft.P("data"), ("model",)),
    "moved": (ft.P("data"), ft.P(), ("model",)),
    "only the result": (ft.P(), ft.P("model"), ("data",)),
    "both": (ft.P("data", "model"), ft.P("data", "model"), ()),
    "none": (ft.P(), ft.P(), ("data", "model")),
}


def inside(x: jax.Array) -> jax.Array:
    return ft.constrain(x, ft.P("data")).sum()


def test_a_mesh_axis_that_is_used_inside_only_is_not_idle() -> None:
    of = ft.ledger(inside, shape(8), in_shardings=ft.P(), out_shardings=ft.P(), mesh=MESH)
    assert of.idle == ("model",) and [one.mesh_axes for one in of.collectives] == [("data",)]


@pytest.mark.parametrize("case", IDLE)
def test_idle_mesh_axes(case: str) -> None:
    given, returned, expected = IDLE[case]
    mesh = ft.make_mesh(data=2, model=4, one=1)
    of = ft.ledger(double, shape(8, 8), in_shardings=given, out_shardings=returned, mesh=mesh)
    assert of.idle == expected
    text = f"nothing is moved or sharded over {' and '.join(expected)}"
    for shown in (str(of), of.html()):
        assert (text in shown) == bool(expected)


def test_idle_is_not_said_where_it_is_not_known() -> None:
    of = ft.ledger(jax.jit(double), shape(8))
    assert of.sizes == {} and of.idle == ()


# Pages


@pytest.mark.parametrize("part", [{"x": 4096}, {"temporaries": 4096}, {"outputs": 4096}])
def test_a_peak_below_one_of_the_parts_is_explained(part: dict[str, int]) -> None:
    """The compiler for TPUs reserves memory for what is printed; arguments may be on the host."""
    sizes = {"x": 512, "outputs": 256, "aliases": 0, "temporaries": 2048, "peak": 3072} | part
    memory = ft.Memory({ft.Path("x"): sizes.pop("x")}, **sizes)
    one = ledger(memory=memory)
    for text in (str(one), one.html()):
        assert "the peak is less than another figure" in text


def paths_in(page: str) -> list[str]:
    return re.findall('data-path="(.*?)"', page)


def test_the_page() -> None:
    several = moved(
        "a", paths=(ft.Path("b.0"), ft.Path("c.0")), arguments=("m", "m"), mesh_axes=None
    )
    one = ledger(*QKV, moved(None, phase=None), several, idle=("model",), warnings=("<slow>",))
    page = one.html()
    assert paths_in(page) == [
        "m.b.{0-2}.q", "m.b.{0-2}.k", "no parameter", "several parameters", "m.a", "x",
    ]  # fmt: skip
    for text in (
        "By mesh axis", "By kind", "By phase", "unknown", "for m.b.0, m.c.0", "peak 3 KiB", "&lt;slow&gt;",
        "nothing is moved or sharded over model", "temporaries", "cpu" if one.backend == "cpu" else "tpu v5e",
    ):  # fmt: skip
        assert text in page
    assert page.count(">for ") == 1  # the title of a row says its one parameter
    fragment = one._repr_html_()
    assert "<script" not in fragment and paths_in(fragment) == paths_in(page)
    assert "Moved between" not in ledger().html()


def test_a_notebook_has_the_largest_collectives() -> None:
    many = ledger(*[moved(f"p{i}.w", bytes=i + 1, kind=f"k{i}") for i in range(250)])
    assert len(paths_in(many.html())) == 252
    fragment = many._repr_html_()
    assert len(paths_in(fragment)) == 202 and "and 50 smaller rows" in fragment
    assert "p249.w" in fragment and "p0.w" not in fragment


def test_the_text_of_a_cause() -> None:
    cause = Cause("dot_general", None, "x @ w", ("f32[8, 4/data]",), "f32[8]", (), "it sums")
    text = "`x @ w` takes f32[8, 4/data] and returns f32[8]"
    assert str(cause) == f"it sums: {text}"
    assert str(cause._replace(reason="")) == f"not asked for: {text}"
    assert str(cause._replace(after="")) == "it sums"
