"""Explorations on eight simulated devices: the figures by closed forms, the order, what is dropped,
what is said."""

import dataclasses
import importlib.util
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import functree as ft
from functree.devices.targets import target_devices
from functree.explorer.hardware import ASSUMED, KINDS
from functree.explorer.ranking import Candidate, problem_lines, ranked
from functree.explorer.step import Step
from tests.lib.checks import compilations, raises

P = ft.P
BATCH, EMBED, HIDDEN = 64, 32, 128
# Of which a second computes and moves as many as a device of these tests should.
HARDWARE = ft.Hardware(flops=1e9, memory=2**30, links=1e8, efficiency=0.5)


class Layer(eqx.Module):
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]


LAYER = Layer(
    jax.ShapeDtypeStruct((EMBED, HIDDEN), "float32"),
    jax.ShapeDtypeStruct((HIDDEN, EMBED), "float32"),
)
X = jax.ShapeDtypeStruct((BATCH, EMBED), "float32")
DATA = ft.AxisRules({"batch": "data", ...: None})
TENSOR = ft.AxisRules({"batch": "data", "hidden": "model", "embed": None})
LAYOUTS = {"data": DATA, "tensor": TENSOR}


def apply(layer: Layer, x: Float[Array, "batch embed"]) -> Float[Array, "batch embed"]:
    return x + jnp.tanh(x @ layer.up) @ layer.down


def explored(step: Any = apply, args: Any = (LAYER, X), **options: Any) -> ft.Ranking:
    given = {"meshes": [{"data": 2, "model": 4}], "layouts": LAYOUTS, "hardware": HARDWARE}
    return ft.explore(step, args, **{**given, **options})


@pytest.fixture(scope="module")
def ranking() -> ft.Ranking:
    layouts = {**LAYOUTS, "wrong": ft.AxisRules({"batch": "data", "hiden": "model"})}
    return explored(layouts=layouts)


def test_a_compiler_that_is_missing_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    target_devices.cache_clear()
    with raises("target='tpu:v5e:2x4' needs a compiler: run `pip install"):
        explored(target="tpu:v5e:2x4")


def test_the_figures_are_those_of_closed_forms(ranking: ft.Ranking) -> None:
    tensor, data, _ = ranking
    products = 2 * 2 * (BATCH // 2) * EMBED * HIDDEN  # on each device, if the hidden ones are whole
    assert (tensor.layout_name, tensor.flops) == ("tensor", products // 4)
    assert (data.layout_name, data.flops) == ("data", products)
    result = BATCH // 2 * EMBED * 4
    assert tensor.wire_bytes == {"model": 2 * result * 3 // 4} and data.wire_bytes == {}
    assert tensor.bytes_per_device == 2 * EMBED * HIDDEN * 4 // 4 + result
    assert data.bytes_per_device == 2 * EMBED * HIDDEN * 4 + result
    assert tensor.compute_seconds == products / 4 / (1e9 * 0.5)
    assert tensor.wire_seconds == 2 * result * 3 / 4 / 1e8
    for row in (tensor, data):
        assert row.score == (row.compute_seconds or 0) + (row.wire_seconds or 0)
        assert row.ledger is not None and row.peak_bytes == row.ledger.memory.peak
        assert row.mesh == {"data": 2, "model": 4} and not row.problems and not row.notes
        assert not row.tied


def test_it_is_a_sequence(ranking: ft.Ranking) -> None:
    assert len(ranking) == 3 and list(ranking) == [ranking[0], ranking[1], ranking[-1]]
    assert ranking.best == (ranking[0],) and ranking.frontier == (ranking[0],)
    assert repr(ranking) == "<Ranking of 3 candidates for the given hardware>"
    assert repr(ranking[0]) == "<Candidate tensor on data=2,model=4>"
    assert len({*ranking}) == 3  # hashable


def test_what_cannot_run_says_why(ranking: ft.Ranking) -> None:
    wrong = ranking[-1]
    assert wrong.layout_name == "wrong" and wrong.score is None and wrong.flops is None
    named = [(str(one.path), one.why) for one in wrong.problems]
    assert ("x", "no rule names `embed`") in named and len(named) == 5
    assert ("layer.up", "no rule names `hidden`; did you mean the rule for `hiden`?") in named


def test_the_text(ranking: ft.Ranking) -> None:
    lines = str(ranking).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "no target was given: ranked for the given hardware"
    text = str(ranking)
    assert "score = flops / (0.001 TF/s × 0.5) + bytes sent / (0.1 GB/s per link)" in text
    assert "does not forecast times" in text.replace("\n", " ")
    assert "compiled for this machine's devices" in text
    first = next(line for line in lines if " tensor " in line)
    assert first.startswith("*   tensor                  data=2,model=4")
    assert first.endswith("      262 µs       61 µs      324 µs")
    assert "    3.24 × the best\n" in text
    assert "    each device sends: model 6 KiB\n" in text
    assert "cannot run:\n    wrong on data=2,model=4\n" in text
    assert 'x f32[64, 32] "batch embed": no rule names `embed`' in text


def test_pages_and_json(ranking: ft.Ranking) -> None:
    page = ranking.html()
    assert page.startswith("<!doctype html>") and "http" not in page
    for text in ("tensor", "data=2,model=4", "Cannot run", "× the best", "does not forecast"):
        assert text in page
    fragment = ranking._repr_html_()
    assert "<html" not in fragment and "Cannot run" in fragment
    data = json.loads(ranking.to_json())
    assert (data["functree"], data["format"]) == ("ranking", 1)
    assert data["hardware"]["links"] == 1e8
    first = data["rows"][0]
    assert first["wire_bytes"] == {"model": 6144} and first["score"] == ranking[0].score
    assert data["rows"][-1]["problems"][0]["path"] == "layer.up"
    links = {"data": 1e8, ("data", "model"): 2e8}
    hardware = dataclasses.replace(HARDWARE, links=links)
    data = json.loads(ft.Ranking(ranking.rows, hardware, "TPU v5e").to_json())
    assert data["hardware"]["links"] == {"data": 1e8, "data,model": 2e8}


def test_the_layout_of_a_row_is_what_was_given(ranking: ft.Ranking) -> None:
    assert ranking[0].layout is TENSOR
    assert eval(repr(ranking[0].layout), {"AxisRules": ft.AxisRules}) == TENSOR
    given = {"both": (TENSOR, P("data")), "alone": (TENSOR, TENSOR)}
    assert {row.layout_name: row.layout for row in explored(layouts=given)} == given


def row(name: str, score: float | None, peak: int = 1) -> ft.Candidate:
    return ft.Candidate({"data": 8}, name, peak_bytes=peak, score=score)


def test_a_tie_is_within_15_percent_of_the_best() -> None:
    given = [row("c", 1.16), row("a", 1.0), row("none", None), row("b", 1.14)]
    found = ranked(given)
    assert [one.layout_name for one in found] == ["a", "b", "c", "none"]
    assert [one.tied for one in found] == [True, True, False, False]
    assert not ranked([given[0], given[1]])[0].tied
    tied = ft.Ranking(found, HARDWARE, "TPU v5e")
    assert tied.best == found[:2]
    text = " ".join(str(tied).split())
    assert "= a tie: a on data=8, b on data=8 are within 15 % of" in text
    assert "measure them to find" in text and "= a tie: " in tied.html()


def test_the_frontier_is_what_no_other_is_better_than_in_both() -> None:
    given = [row("fast", 1.0, 9), row("worse", 2.0, 9), row("large", 3.0, 5), row("small", 3.0, 4)]
    assert [(one.layout_name, one.is_frontier) for one in ranked(given)] == [
        ("fast", True), ("worse", False), ("small", True), ("large", False),
    ]  # fmt: skip


def test_what_does_not_fit_is_dropped_on_paper() -> None:
    small = dataclasses.replace(HARDWARE, memory=20_000)
    with compilations() as compiled:
        ranking = explored(hardware=small, layouts={"data": DATA})
    assert not compiled
    row = ranking[0]
    assert row.bytes_per_device == 36864 and row.peak_bytes is None
    assert row.problems[0].why == (
        "the arguments take 36 KiB on each device, but a device has 19.5 KiB (the given hardware)"
    )
    assert row.problems[0].remedy.startswith("shard the largest arguments over more mesh axes")
    assert [str(one.path) for one in row.problems[1:]] == ["layer.up", "layer.down", "x"]
    assert "takes 16 KiB on each device, with the spec P(None, None)" in str(row.problems[1])
    assert "cannot run:\n    data on data=2,model=4\n        the arguments take 36 KiB" in str(
        ranking
    )


def test_what_the_compiler_finds_too_large_is_no_candidate() -> None:
    between = dataclasses.replace(HARDWARE, memory=40_000)
    row = explored(hardware=between, layouts={"data": DATA})[0]
    assert row.score is None and row.peak_bytes is not None and row.peak_bytes > 40_000
    (problem,) = row.problems
    assert problem.why == (
        "the program, whose arguments take 36 KiB, needs 56 KiB on each device, but a device has "
        "39.1 KiB (the given hardware)"
    )
    assert "recompute activations in the backward pass (`remat=`)" in problem.remedy


def test_without_a_target_a_peak_above_the_memory_of_an_assumed_kind_is_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assumed = KINDS[ASSUMED]

    def explored_with(memory: int) -> ft.Candidate:
        small = dataclasses.replace(assumed.hardware, memory=memory)
        monkeypatch.setitem(KINDS, ASSUMED, assumed._replace(hardware=small))
        return explored(hardware=None, layouts={"data": DATA})[0]

    between, large = explored_with(40_000), explored_with(60_000)
    assert between.score is not None and not between.problems and not large.notes
    assert between.notes == (
        "data on data=2,model=4: may not fit: the program, whose arguments take 36 KiB, needs 56 "
        "KiB on each device, but a device has 39.1 KiB (TPU v5e); give a target to be sure",
    )
    # The bytes of the arguments are the same on every machine.
    why = explored_with(20_000).problems[0].why
    assert why.endswith("each device, but a device has 19.5 KiB (TPU v5e)")


def test_of_many_problems_the_first_are_printed() -> None:
    problems = [ft.Problem(ft.Path((i,)), (2,), "f32[2]", f"why {i}", "") for i in range(5)]
    lines = list(problem_lines(Candidate({}, "many", problems=tuple(problems))))
    more = "and 2 more problems (see `row.problems`)"
    assert lines == [*(f"{i} f32[2]: why {i}" for i in range(3)), more]


def test_rules_of_the_layout_are_those_of_the_body() -> None:
    def body(layer: Layer, x: Float[Array, "batch embed"]) -> Any:
        return ft.constrain(x @ layer.up, "batch hidden").sum()

    assert explored(body, layouts={"tensor": TENSOR})[0].problems == ()
    # Specs are no rules: those of the function stay.
    layouts = {"specs": (P(), P("data"))}
    jitted = ft.jit(body, rules=TENSOR, mesh=ft.make_mesh(data=4, model=2))
    assert explored(jitted, layouts=layouts)[0].problems == ()


def test_the_options_of_jit_are_kept_but_for_layouts() -> None:
    @ft.jit(donate="layer", static_argnames="scale", in_shardings=(P("data"), P("data"), None))
    def step(layer: Layer, x: Float[Array, "batch embed"], scale: float) -> Any:
        return jax.tree.map(lambda w: w * scale + x.sum(), layer)

    row = explored(step, (LAYER, X, 2.0), layouts={"tensor": (TENSOR, DATA, None)})[0]
    assert row.problems == () and row.ledger is not None
    # The donated state is closed: the result is sharded as it is, in its memory.
    assert row.ledger.memory.aliases == 2 * EMBED * HIDDEN * 4 // 4


def test_methods_and_arrays_that_are_somewhere() -> None:
    class Model(eqx.Module):
        layer: Layer

        @ft.jit
        def __call__(self, x: Float[Array, "batch embed"]) -> Any:
            return apply(self.layer, x)

        def plain(self, x: Float[Array, "batch embed"]) -> Any:
            return apply(self.layer, x)

    key = jax.random.key(0)
    mesh = ft.make_mesh(data=4, model=2)
    weights = Layer(jax.random.normal(key, (EMBED, HIDDEN)), jnp.ones((HIDDEN, EMBED)))
    model = Model(ft.shard(weights, TENSOR, mesh))
    x = jax.device_put(jnp.ones((BATCH, EMBED)), jax.NamedSharding(mesh, P("data")))
    expected = explored(layouts={"tensor": TENSOR})[0].flops
    for step in (model.__call__, model.plain, model):
        assert explored(step, (x,), layouts={"tensor": TENSOR})[0].flops == expected


def test_the_layout_of_the_result() -> None:
    # Whole on each device: gathered over `data`.
    assert all("data" in row.wire_bytes for row in explored(out_shardings=P()))
    only = explored(out_shardings={"tensor": P(), "data": P("data")})
    assert {row.layout_name for row in only if "data" in row.wire_bytes} == {"tensor"}


def test_the_errors_of_the_function() -> None:
    def raising(layer: Layer, x: Float[Array, "batch embed"]) -> Any:
        raise ValueError("not yet")

    with pytest.raises(ValueError, match="not yet"):
        explored(raising)

    def sometimes(layer: Layer, x: Float[Array, "batch embed"]) -> Any:
        if jax.sharding.get_abstract_mesh().shape["model"] == 4:
            raise ValueError("not for four\nmore")
        return x.sum()

    ranking = explored(sometimes, meshes=8, layouts={"tensor": TENSOR})
    refused = {row.mesh["model"]: row.problems[0].why for row in ranking if row.problems}
    assert refused == {4: "ValueError: not for four"}


def test_an_interrupt_keeps_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = Step.compile

    def interrupted(self: Step, options: Any) -> Any:
        if options["mesh"].shape["model"] == 2:
            raise KeyboardInterrupt
        return compile_(self, options)

    monkeypatch.setattr(Step, "compile", interrupted)
    ranking = explored(meshes=8, layouts={"tensor": TENSOR})
    assert [row.mesh["model"] for row in ranking] == [1, 2, 4, 8]
    assert ranking[0].score is not None
    assert all("interrupted" in row.problems[0].why for row in ranking.rows[1:])


def test_progress_is_said_if_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    explored()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("functree.explorer.progress.PATIENCE", 0.0)
    explored(progress=False)
    assert capsys.readouterr().err == ""
    explored()
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("explore: 0 of 2 compiled; now data on data=2,model=4 0:00:")
    assert second.startswith("explore: 1 of 2 compiled; now tensor on data=2,model=4 0:00:")


def test_without_hardware_that_of_one_kind_is_named() -> None:
    ranking = explored(hardware=None, layouts={"data": DATA})
    assert ranking.kind == "TPU v5e" and ranking.hardware.flops == 197e12
    first = "no target was given: ranked for TPU v5e\ncompiled for this machine's devices"
    assert str(ranking).startswith(first)


def test_a_kernel_that_is_not_known_is_said() -> None:
    def solve(layer: Layer, x: Float[Array, "batch embed"]) -> Any:
        return jnp.linalg.svd(layer.up, compute_uv=False).sum() + x.sum()

    ranking = explored(solve, layouts={"data": DATA})
    (note,) = ranking[0].notes
    assert note.startswith("data on data=2,model=4: lapack_") and "lapack_" in str(ranking)


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no layouts": (
        {"args": X, "layouts": {}},
        ("args=float32[64, 32]", "the arguments as a tuple", "layouts={}", "a dict from names to"),
    ),
    "no meshes": (
        {"meshes": []},
        ("meshes=[]", 'it must be dicts of sizes, such as `[{"data": 8,'),
    ),
    "a text": ({"meshes": ["data=8"]}, ("meshes=['data=8']", "it must be dicts of sizes")),
    "no size": ({"meshes": 0}, ("meshes=0", "or the total number of devices")),
    "a wrong size": (
        {"meshes": {"data": 0}},
        ("a dict of mesh sizes must map names to positive integers",),
    ),
    "no mesh axes": (
        {"meshes": 8, "layouts": {"none": P()}},
        ("cannot divide 8 devices, because the layouts",),
    ),
    "other devices than the target": (
        {"meshes": {"data": 4}, "layouts": {"data": DATA}, "target": "tpu:v5e:2x4"},
        ("data=4 needs 4 devices, but target='tpu:v5e:2x4' has 8",),
    ),
    "more devices than there are": (
        {"meshes": {"data": 8, "model": 2}},
        ("data=8 × model=2 needs 16 devices, but there are 8: use smaller sizes, pass `target=`",),
    ),
    "links of other mesh axes": (
        {"hardware": dataclasses.replace(HARDWARE, links={"data": 1.0, "modle": 1.0})},
        (
            "`links` has no bandwidth for the mesh axis `model`: add an entry; did you mean `modle`?",
        ),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    options, message = WRONG[name]
    with raises(*message):
        explored(**options)


def test_a_layout_of_another_structure_is_a_problem_of_its_row() -> None:
    ranking = explored(layouts={"three": (DATA, DATA, DATA), "tensor": TENSOR})
    assert ranking[0].layout_name == "tensor"
    assert "layouts has 3 layouts, but apply has 2 positional" in ranking[1].problems[0].why
