"""The examples, run as a user runs them: each in a process of its own, and with other options and
mistakes in this one."""

import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import functree as ft
from tests.examples.scripts import EXAMPLES, as_a_script, run, run_here, variables_of
from tests.lib.launch import ROOT

pytestmark = pytest.mark.slow  # whole scripts

Captured = pytest.CaptureFixture[str]
# A whole run that takes a few seconds, most of them to compile.
TINY = "--steps 3 --layers 1 --embed 16 --heads 4 --batch 8 --seq 16 --sample 8 --megabytes 0.1".split()
PNG = b"\x89PNG\r\n\x1a\n"


TWO_AXES = "data=2, model=4"
# The rules, other options, the mesh, how the embedding is sharded, what is moved, and the sample.
TRAINED: list[tuple[str, str, str, str, str, str]] = [
    ("fsdp", "--generate class", "data=8", r"\d+/data, \d+", "all-gather +data", "class"),
    (
        "tp",
        "--accumulate 2 --dtype bfloat16 --sample 40",
        TWO_AXES,
        r"\d+/model, \d+",
        "all-reduce +model",
        "def ",
    ),
    ("fsdp+tp+sp", "--sample 0", TWO_AXES, r"\d+/model, \d+/data", "all-gather +model", ""),
]


@pytest.mark.parametrize(("rules", "options", "mesh", "cut", "moved", "sample"), TRAINED)
def test_train_lm(
    rules: str,
    options: str,
    mesh: str,
    cut: str,
    moved: str,
    sample: str,
    tmp_path: Path,
    capsys: Captured,
):
    picture = tmp_path / "curve.png"
    given = [*TINY, "--rules", rules, "--out", str(picture), *options.split()]
    code, out, err = run_here(capsys, "train_lm.py", *given)
    assert (code, err) == (0, "")
    for line in (
        rf"mesh \({mesh}\): 12 arrays, .* on each device$",
        rf"The optimizer: mesh \({mesh}\): 26 arrays",
        rf"embed\.weight +\w+\[{cut}\] ",
        r"The speed: [\d,]+ tokens/s, on 8 × cpu\.$",
        rf"The training step: cpu, mesh \({mesh}\): .* moved to each device$",
        rf"    {moved} +\S+ [KM]iB$",
        r".*step 3/3 .* loss \d\.\d\d · [\d,]+ tokens/s",
    ):
        assert re.search(f"^{line}", out, re.M), line
    assert_learned(out)
    assert f"A sample:\n\n{sample}" in out if sample else "A sample:" not in out
    assert out.count("tokens/s") == 2, "where there is no terminal, the bar is written once"
    assert f"The loss over the steps: {picture}" in out and picture.read_bytes().startswith(PNG)


def assert_learned(out: str) -> None:
    before, after = re.search(
        r"Held-out text: (.*) bits per byte .*, (.*) after\.$", out, re.M
    ).groups()
    assert float(after) < float(before) < 10


def test_train_lm_with_experts(tmp_path: Path, capsys: Captured):
    given = [*TINY, "--rules", "fsdp+ep", "--experts", "4", "--out", str(tmp_path / "curve.png")]
    code, out, err = run_here(capsys, "train_lm.py", *given, "--sample", "4")
    assert (code, err) == (0, "")
    assert re.search(r"^blocks\.layer\.mlp\.gate +\w+\[\d+, 4/model, ", out, re.M)
    assert_learned(out)
    assert "A sample:" in out


def test_ctrl_c_leaves_the_picture_of_what_there_is(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
):
    printed = Console.print

    def print_and_interrupt(console: Console, *objects: Any, **options: Any) -> None:
        printed(console, *objects, **options)
        if objects and str(objects[0]).startswith("step     0:"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Console, "print", print_and_interrupt)
    picture = tmp_path / "curve.png"
    given = [*TINY, "--steps", "1000000", "--out", str(picture)]
    code, out, err = run_here(capsys, "train_lm.py", *given)
    assert (code, err) == (130, "")
    assert re.search(r"^Stopped after \d+ of 1000000 steps\.$", out, re.M)
    assert picture.read_bytes().startswith(PNG)


def test_train_lm_as_a_pipeline(tmp_path: Path, capsys: Captured) -> None:
    given = [*TINY, "--rules", "fsdp", "--out", str(tmp_path / "curve.png")]
    given += "--layers 2 --pipe 2 --microbatches 2".split()
    code, out, err = run_here(capsys, "train_lm.py", *given)
    assert (code, err) == (0, "")
    assert re.search(r"^mesh \(pipe=2, data=4\): 12 arrays, .* on each device$", out, re.M)
    assert re.search(r"^ +collective-permute +pipe ", out, re.M)


def test_train_lm_in_two_processes_and_on_in_one(tmp_path: Path, capsys: Captured) -> None:
    given = [*TINY, "--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "curve.png")]
    given += ["--save-every", "1"]
    code, out, err = run("train_lm.py", *given, "--processes", "2")
    assert code == 0 and ft.Checkpoints(tmp_path / "run").latest == 3, err
    assert_learned(out)
    shutil.rmtree(tmp_path / "run" / "3")
    code, out, err = run_here(capsys, "train_lm.py", *given)
    assert code == 0 and "Resuming after step 2 of" in out, err
    code, _, err = run_here(capsys, "train_lm.py", *given, "--lr", "1.0")
    assert code == 2 and "has a run with --lr 0.003: pass the same options, or another" in err


def test_finetune(tmp_path: Path, capsys: Captured):
    """Only the adapters are trained and saved; the merged model is the published one, and what was
    trained."""
    places = "--adapters", str(tmp_path / "adapters"), "--out", str(tmp_path / "merged")
    code, out, err = run("finetune.py", "--steps", "40", "--sample", "8", *places)
    assert (code, err) == (0, "")
    assert "1,344 of 30,752 parameters are trained" in out and "Saved in" in out
    before, after = map(float, re.search(r"The loss: (\S+) in .*, (\S+) in the last", out).groups())
    assert after < before - 0.5
    saved = ft.inspect(tmp_path / "adapters")
    assert {row.path[-1] for row in saved} == {"lora_a", "lora_b"} and saved.total_bytes == 1344 * 4
    published = ROOT / "tests" / "fixtures" / "hf" / "llama"
    one, other = (
        ft.load_weights(folder, ft.P(), ft.make_mesh(data=8))
        for folder in (published, tmp_path / "merged")
    )
    changed = [
        str(row.path)
        for row in ft.plan(one)
        if not np.array_equal(_at(one, row.path), _at(other, row.path))
    ]
    assert changed == ["blocks.layer.attn.query", "blocks.layer.attn.value"]
    assert len(re.search(r"continues with the tokens \[(.*)\]", out)[1].split(",")) == 8
    code, _, err = run_here(capsys, "finetune.py", *places)
    assert code == 2 and "merged already contains files" in err


def _at(tree: Any, path: ft.Path) -> np.ndarray:
    return np.asarray(ft.select(tree).at(str(path)).get()[0])


def test_generate():
    code, out, err = run("generate.py", *"--steps 120 --new 90".split())
    assert (code, err) == (0, "")
    assert len(re.findall(r"\(a line of the text\)$", out, re.M)) >= 2, out
    assert "Other prompts and options cause no recompilation." in out
    assert re.search(
        r"^A cache for 100 tokens: \(2, 1, 64, 2, 16\) keys, as long as the window$", out, re.M
    )
    assert "\n2 programs: " in out and "updated in place, not copied: 32.0 KiB of" in out
    times = r"^time per token: \d+\.\d\d ms after 10 tokens, \d+\.\d\d ms after 90$"
    assert re.search(times, out, re.M)
    assert re.search(r"^key +f32\[2, 4/data, 64, 2/model, 16\] ", out, re.M)
    assert "4 texts, in shards of (1, 79), equal the texts on one device." in out


def test_bring_your_own():
    source = (EXAMPLES / "bring_your_own.py").read_text().splitlines()
    for mark in ("  # +fsdp", "  # +tensor"):
        assert 0 < sum(line.endswith(mark) for line in source) <= 10
    unmarked = [line for line in source if "ft." in line and "#" not in line and "`" not in line]
    shown = ["print(ft.plan(model, layout, mesh))"] * 2
    assert [line.strip() for line in unmarked] == ["@ft.jit", "@ft.value_and_grad", *shown]
    code, out, err = run("bring_your_own.py")
    assert (code, err) == (0, "")
    assert re.search(r"^mesh \(data=8\): 30 arrays", out, re.M)
    assert re.search(r"^mesh \(data=2, model=4\): 30 arrays", out, re.M)
    assert (
        len(re.findall(r"^Loss .*, unsharded .* No gradient differs by more than ", out, re.M)) == 2
    )


def test_tensor_parallel():
    code, out, err = run(
        "tensor_parallel.py", *"--batch 3 --embed 16 --hidden 32 --model 4".split()
    )
    assert (code, err) == (0, "")
    assert re.search(r"^mlp\.up +f32\[16, 32/model\] ", out, re.M)
    assert re.search(r"^mlp\.down +f32\[32/model, 16\] ", out, re.M)
    assert re.search(r"^mesh \(model=4\): 3 arrays", out, re.M)
    rows = re.findall(r"^(by_\w+) +(P\(.*\)) +(\S+) +(\d .*\S) +(\S+e\S+) +(\d .*\S)$", out, re.M)
    assert [row[0] for row in rows] == ["by_specs", "by_signature", "by_compiler"]
    for _, spec, off, collectives, gradients_off, their_collectives in rows:
        assert (spec, collectives, their_collectives) == (
            "P(None, None)",
            "1 all-reduce",
            "2 all-reduce",
        )
        assert float(off) < 1e-5 and float(gradients_off) < 1e-5
    assert re.search(r"^All results equal the results on one device, to \de-\d\d of ", out, re.M)


def test_three_ways():
    code, out, err = run("three_ways.py", *"--batch 8 --embed 16 --hidden 32".split())
    assert (code, err) == (0, "")
    assert re.search(r"^up +f32\[16, 32/model\] ", out, re.M)
    types = {"automatic": "8,32", "explicit": "8@data,32@model", "manual": "4,8]{V:(data,model)}"}
    results = set()
    for name, shape in types.items():
        assert re.search(rf"^{name} .* float32\[{re.escape(shape)}\S* +1 all-reduce$", out, re.M)
        off, losses = re.search(rf"^{name} +(\S+e-\d\d) +(\d.*\d)$", out, re.M).groups()
        assert float(off) < 1e-5
        results.add(losses)
    assert len(results) == 1, "the three train alike"
    losses = [float(loss) for loss in results.pop().split()]
    assert (
        len(losses) == 5 and losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    )
    assert "\nautomatic: 1 all-reduce\n" in out
    assert re.search(r"^explicit: ShardingTypeError: .*`out_sharding`", out, re.M)
    assert re.search(r"^manual: ShardingError: forgetful: 1 leaf ", out, re.M)
    assert (
        "P('data', None) replicates it over `model`, but its values may differ between devices"
        in out
    )
    assert '"hidden" has size 33; rule hidden→model needs a multiple of model=4' in out


# An example, wrong arguments ─► what it says; those that train, in one line.
MISTAKES = [
    ("train_lm.py", "--mesh data=3", "the mesh (data=3) has no axis `model`"),
    ("train_lm.py", "--batch 3", '"batch" has size 3; rule batch→data needs a multiple of data=2'),
    ("train_lm.py", "--out nowhere/curve.png", "there is no folder 'nowhere'"),
    ("train.py", "--steps 0", "all sizes must be at least 1"),
    ("train.py", "--batch 36", "--batch must be a multiple of --data"),
    ("train.py", "--model 3", "data=8 × model=3 needs 24 devices, but there are 8"),
    ("finetune.py", "--model nowhere", "config.json"),
    ("generate.py", "--steps 1 --mesh data=5,model=2", "10 devices"),
    ("tensor_parallel.py", "--embed 16 --hidden 33", '"hidden" has size 33; rule hidden→model'),
    ("three_ways.py", "--embed 16 --hidden 33", '"hidden" has size 33; rule hidden→model'),
    ("pjit_tour.py", "--html no/page.html", "there is no folder 'no'"),
]


@pytest.mark.parametrize(("name", "arguments", "said"), MISTAKES)
def test_a_mistake_is_no_traceback(name: str, arguments: str, said: str, capsys: Captured):
    given = [*TINY, *arguments.split()] if name == "train_lm.py" else arguments.split()
    code, _, err = run_here(capsys, name, *given)
    assert code == 2 and f"{name}: error: " in err and said in err and "Traceback" not in err
    assert err.count("\n") == 1 or not name.startswith("train")


HELP = {
    **dict.fromkeys(["train_lm.py", "three_ways.py", "train.py", "will_it_fit.py"], "(default: "),
    **dict.fromkeys(["penzai_tour.py", "flax_tour.py", "pjit_tour.py"], "--html FILE"),
}


@pytest.mark.parametrize("name", HELP)
def test_help(name: str, capsys: Captured):
    code, out, err = run_here(capsys, name, "--help")
    assert (code, err) == (0, "") and HELP[name] in out


def test_matplotlib_and_treescope_may_be_missing(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
):
    for name in ("matplotlib.figure", "treescope"):
        monkeypatch.setitem(sys.modules, name, None)
    variables_of("train_lm.py")["draw"](None, None)
    page = tmp_path / "page.html"
    with as_a_script("pictures.py", "--html", str(page)) as file:
        show = runpy.run_path(file)["Show"]("A tour")
        show("ones", np.ones(3))
        show.save()
    out = capsys.readouterr().out
    assert "The loss curve is not drawn: matplotlib is not installed. Try: pip" in out
    assert f"{page} is not written: treescope is not installed. Try: pip" in out
    assert not page.exists()
