"""Plans and ledgers: what differs between two of them, and their JSON."""

import html
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import functree as ft
from functree.report.diff import Change, Diff, by_bytes
from functree.report.table import Bytes
from tests.lib.checks import raises
from tests.lib.meshes import MESH, SIZES
from tests.lib.training import gradient

TREE = {
    "layers": [{"w": jnp.ones((8, 16)), "b": jnp.ones(16)} for _ in range(3)],
    "key": jax.random.key(0),
    "half": jnp.ones((4, 4), "bfloat16"),
    "a.b": {(1, 2): jnp.ones(8)},
}


def plan(spec: Any, mesh: Any = SIZES, tree: Any = TREE) -> ft.Plan:
    layout = ft.StateSharding([("layers.*.w", spec), (..., ft.P())])
    return ft.plan(tree, layout, mesh)


def test_equal_plans_do_not_differ() -> None:
    diff = plan(ft.P("model")).diff(plan(ft.P("model")))
    assert not diff and diff.rows == () and str(diff) == "nothing differs"
    assert "on each device" not in diff.html()


def test_a_plan_differs_by_path() -> None:
    diff = plan(ft.P("model")).diff(plan(ft.P(None, "model")))
    assert [(str(row.path), row.what, row.before, row.after) for row in diff.rows] == [
        (f"layers.{i}.w", "spec", "P('model', None)", "P(None, 'model')") for i in range(3)
    ]
    assert str(diff).splitlines() == [
        "on each device: 648 B in both",
        "layers.{0-2}.w: spec P('model', None) → P(None, 'model') (×3)",
    ]
    assert str(plan(ft.P("model")).diff(plan(ft.P()))).startswith(
        "on each device: 648 B → 1.8 KiB (+178 %)\n"
    )


def test_a_plan_differs_in_all_that_it_says() -> None:
    other = {**TREE, "half": jnp.ones((4, 8), "bfloat16"), "new": jnp.ones(2)}
    del other["key"]
    diff = plan(ft.P("model")).diff(plan(ft.P("model"), {"data": 4, "model": 2}, other))
    texts = {(str(row.path), row.what): (row.before, row.after) for row in diff.rows}
    assert texts["", "mesh"] == ({"data": 2, "model": 4}, {"data": 4, "model": 2})
    assert texts["key", "array"] == ("key<fry>[] P()", None)
    assert texts["new", "array"] == (None, "f32[2] P(None)")
    assert texts["half", "array"] == ("bf16[4, 4]", "bf16[4, 8]")
    assert texts["half", "bytes on each device"] == (32, 64)
    assert texts["layers.0.w", "bytes on each device"] == (128, 256)
    with raises("diff: `other` must be a plan, not 3"):
        plan(ft.P()).diff(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mesh", [SIZES, MESH], ids=["sizes", "mesh"])
def test_a_plan_as_json(mesh: Any) -> None:
    before = plan(ft.P("model"), mesh)
    after = ft.Plan.from_json(before.to_json())
    assert after.rows == before.rows and after.sizes == SIZES and str(after) == str(before)
    # It is a layout, as any plan is.
    assert ft.plan(TREE, after, SIZES).rows == before.rows
    for attribute in ("specs", "shardings"):
        with raises("read from JSON", "ft.plan(tree, plan, mesh)", error=ft.ShardingError):
            getattr(after, attribute)


def test_a_plan_with_problems_as_json() -> None:
    before = ft.plan({"w": jnp.ones((3, 5))}, ft.P("model"), SIZES, check=False)
    assert before.problems and ft.Plan.from_json(before.to_json()).problems == before.problems


def test_a_plan_of_live_arrays_as_json() -> None:
    other = ft.make_mesh(data=4, devices=jax.devices()[:4])
    tree = {
        "a": ft.shard(jnp.ones(8), ft.P("data"), MESH),
        "b": ft.shard(jnp.ones(8), ft.P("data"), other),
    }
    before = ft.plan(tree)
    after = ft.Plan.from_json(before.to_json())
    for old, new in zip(before.rows, after.rows, strict=True):
        assert old._replace(mesh=None) == new._replace(mesh=None)
    assert str(after) == str(before)


def test_a_ledger_as_json() -> None:
    before = gradient("FSDP+TP", None)[0].ledger()
    after = ft.Ledger.from_json(before.to_json())
    assert after == before and hash(after) == hash(before)
    assert str(after) == str(before) and not before.diff(after)
    with raises("expected the JSON text of a ledger, not 3"):
        ft.Ledger.from_json(3)  # pyright: ignore[reportArgumentType]


def test_what_is_moved_in_the_json_of_a_ledger() -> None:
    before = ledger_of(("w", 32, 1))
    data = json.loads(before.to_json())
    moved = data["collectives"][0]
    with raises(
        "invalid ledger JSON: `moves` of 'r' is 'everything': use 'itself', 'gradient', 'act"
    ):
        ft.Ledger.from_json(json.dumps({**data, "collectives": [{**moved, "moves": "everything"}]}))
    # As an earlier functree wrote it.
    assert "moves" not in moved
    del data["idle"]
    assert ft.Ledger.from_json(json.dumps(data)) == before


def test_ledgers_differ_by_parameter_and_in_their_memory() -> None:
    before = ledger_of(("w", 64, 3), memory=ft.Memory({ft.Path("m.w"): 24}, 8, 0, 16, 48))
    given = {ft.Path("m.w"): 12, ft.Path("x"): 4}
    after = ledger_of(("w", 64, 3), ("v", 32, 3), memory=ft.Memory(given, 8, 4, 16, 40))
    assert str(before.diff(after)).splitlines() == [
        "moved to each device: 192 B → 288 B (+50 %)",
        "m.v: all-reduce over a nothing → 96 B",
        "m.w: bytes on each device 24 B → 12 B (−50 %)",
        "bytes of peak 48 B → 40 B (−17 %)",
        "bytes of aliases 0 B → 4 B",
        "x: argument nothing → 4 B",
    ]
    with raises("diff: `other` must be a ledger, not"):
        before.diff(plan(ft.P()))  # pyright: ignore[reportArgumentType]


def change_of(path: str, what: str, before: int | None, after: int | None) -> Change:
    sizes = [None if size is None else Bytes(size) for size in (before, after)]
    return Change(ft.Path(path), what, *sizes)


MIB = 2**20
LAYERS = [change_of(f"b.{i}.w", "bytes of x", 2 * MIB, None) for i in range(4)]
LARGE = change_of("e", "bytes of x", 4 * MIB, MIB)
SMALL = change_of("s", "argument", None, 4096)
RUNS = Change(ft.Path("e"), "runs of x", 1, 2)
OTHER_MESH = Change(ft.Path(), "mesh", {"a": 1}, {"a": 2})


def test_the_most_bytes_first() -> None:
    # Those of all layers together are 8 MiB.
    rows = by_bytes([SMALL, LARGE, RUNS, *LAYERS, OTHER_MESH])
    assert rows == (OTHER_MESH, *LAYERS, LARGE, SMALL, RUNS)
    assert str(Diff(rows)).splitlines() == [
        "mesh {'a': 1} → {'a': 2}",
        "b.{0-3}.w: bytes of x 2 MiB → nothing (×4)",
        "e: bytes of x 4 MiB → 1 MiB (−75 %)",
        "s: argument nothing → 4 KiB",
        "e: runs of x 1 → 2",
    ]


NO_MEMORY = ft.Memory({}, 0, 0, 0, 0)


def ledger_of(*moved: tuple[str, int, int], memory: ft.Memory = NO_MEMORY) -> ft.Ledger:
    """A ledger of all-reduces over `a`: for each the parameter, the bytes and the runs."""
    collectives = [
        ft.Collective(
            "all-reduce", ("a",), 2, size, runs, (ft.Path(name),), ("m",), None, None, "r"
        )
        for name, size, runs in moved
    ]
    return ft.Ledger(tuple(collectives), memory, "cpu", {"a": 2})


def test_the_total_of_two_ledgers_is_first() -> None:
    before = ledger_of(("w", MIB, 4), ("v", 1024, 2))
    after = ledger_of(("w", MIB, 2), ("v", 2048, 1))
    diff = before.diff(after)
    assert str(diff).splitlines() == [
        "moved to each device: 4.0 MiB → 2.0 MiB (−50 %)",
        "m.w: bytes of all-reduce over a 4 MiB → 2 MiB (−50 %)",
        "m.w: runs of all-reduce over a 4 → 2",
        "m.v: runs of all-reduce over a 2 → 1",
    ]
    assert "moved to each device: 4.0 MiB → 2.0 MiB (−50 %)" in diff.html()
    assert str(before.diff(before)) == "nothing differs" and before.diff(before).rows == ()
    assert [row.what for row in diff.rows if not row.path] == []


def test_equal_changes_of_parameters_of_one_module_are_one_line() -> None:
    def rows(*paths: str, what: str = "bytes of x", after: int = MIB) -> list[Change]:
        return [
            Change(ft.Path(path.split(".")), what, Bytes(2 * MIB), Bytes(after)) for path in paths
        ]

    diff = Diff(
        (
            *rows("a.q.w", "a.k.w", "a.v.w"),
            *rows("b.up", "b.gate", "c.up"),
            *rows("b.down", after=3 * MIB),
            *rows("b.up", what="runs of x"),
            *rows("d.q.w", "d.q.b", "d.k.w", "d.k.b", "d.k.c"),
        )
    )
    assert str(diff).splitlines() == [
        "a.{q,k,v}.w: bytes of x 2 MiB → 1 MiB (−50 %) (×3)",
        "b.{up,gate}: bytes of x 2 MiB → 1 MiB (−50 %) (×2)",
        "c.up: bytes of x 2 MiB → 1 MiB (−50 %)",
        "b.down: bytes of x 2 MiB → 3 MiB (+50 %)",
        "b.up: runs of x 2 MiB → 1 MiB (−50 %)",
        "d.q.{w,b}: bytes of x 2 MiB → 1 MiB (−50 %) (×2)",
        "d.k.{w,b,c}: bytes of x 2 MiB → 1 MiB (−50 %) (×3)",
    ]


def shared(block: int, size: int, runs: int, *names: str) -> ft.Collective:
    """An all-reduce over `a` that serves several parameters of a block."""
    paths = tuple(ft.Path(("model", "b", block, name)) for name in names)
    arguments = ("ts",) * len(names)
    return ft.Collective(
        "all-reduce", ("a",), 2, size, runs, paths, arguments, "backward", None, "r"
    )


def test_equal_changes_of_what_several_parameters_share_are_one_line() -> None:
    def ledger(*moved: ft.Collective) -> ft.Ledger:
        return ft.Ledger(moved, NO_MEMORY, "cpu", {"a": 2})

    before = ledger(*(shared(i, MIB, 4, "q", "k") for i in range(3)))
    after = ledger(
        *(shared(i, MIB, 2, "q", "k") for i in range(3)),
        *(shared(i, MIB, 1, "q", "v") for i in (0, 2)),
        shared(1, MIB, 1, "q", "k", "v"),
    )
    diff = before.diff(after)
    reduced = "all-reduce over a (backward) for "
    q, k, v = (f"ts.model.b.{{0-2}}.{name}" for name in "qkv")
    for line in (
        f"bytes of {reduced}{q}, {k} 4 MiB → 2 MiB (−50 %) (×3)",
        f"runs of {reduced}{q}, {k} 4 → 2 (×3)",
        f"{reduced}{q}, {v} nothing → 1 MiB (×2)".replace("0-2", "0,2"),
        f"{reduced}ts.model.b.1.q, ts.model.b.1.k, ts.model.b.1.v nothing → 1 MiB",
    ):
        assert line in " ".join(str(diff).split())
    # The rows are not folded, and tell their paths in words.
    row = diff.rows[0]
    assert row == (ft.Path(), f"bytes of {reduced}ts.model.b.0.q, ts.model.b.0.k", 4 * MIB, 2 * MIB)
    assert len(diff.rows) == 9
    assert f"{reduced}{q}, {k}" in html.unescape(diff.html())


@pytest.mark.parametrize(
    ("before", "after", "percent"),
    [
        (100, 250, " (+150 %)"),
        (3, 2, " (−33 %)"),
        (1000, 1004, " (+0.4 %)"),
        (5, 0, " (−100 %)"),
        (1, 10**4, " (+999,900 %)"),
        (0, 5, ""),
    ],
)
def test_a_total_says_by_how_much_it_has_changed(before: int, after: int, percent: str) -> None:
    total = Change(ft.Path(), "moved", Bytes(before), Bytes(after))
    text = str(Diff((OTHER_MESH,), (total,))).splitlines()[0]
    assert text == f"moved: {Bytes(before)} → {Bytes(after)}{percent}"


def test_sizes_that_are_shown_alike_are_told_apart() -> None:
    rows = [change_of(f"b.{i}", "bytes", MIB + i, None) for i in range(2)]
    assert len(str(Diff(tuple(rows))).splitlines()) == 2


def test_what_differs_as_a_page() -> None:
    page = Diff((OTHER_MESH, *LAYERS, LARGE, SMALL)).html()
    assert page.startswith("<!doctype html>") and page.count('class="leaf"') == 4
    for text in (
        "b.{0-3}.w: bytes of x 2 MiB → nothing (×4)",
        "(−75 %)",
        "{&#x27;a&#x27;: 1}",
    ):
        assert text in page
    assert "nothing differs" in Diff(()).html()
    assert Diff((OTHER_MESH,))._repr_html_().startswith("<style>")


def test_idle_mesh_axes_differ() -> None:
    before, after = (ft.Ledger((), NO_MEMORY, "cpu", {"a": 2}, idle=idle) for idle in ((), ("a",)))
    assert str(before.diff(after)).splitlines() == [
        "moved to each device: 0 B in both",
        "idle mesh axes nothing → a",
    ]
    assert ft.Ledger.from_json(after.to_json()).idle == ("a",)
