"""The examples, run as a user runs them: in a process of their own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
# A whole run that takes a few seconds, most of them to compile.
TINY = "--steps 3 --layers 1 --embed 16 --heads 4 --batch 8 --seq 16 --sample 8 --megabytes 0.1".split()
PNG = b"\x89PNG\r\n\x1a\n"


def start(name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    everything = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "100", **environment}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.Popen(command, env=everything, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(name: str, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    process = start(name, *arguments, **environment)
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


@pytest.mark.parametrize("rules", ["fsdp", "tp", "fsdp+tp"])
def test_train_lm(rules: str, tmp_path: Path):
    picture = tmp_path / "curve.png"
    code, out, err = run("train_lm.py", *TINY, "--rules", rules, "--out", str(picture))
    assert (code, err) == (0, "")
    mesh = "data=8" if rules == "fsdp" else "data=2, model=4"
    assert re.search(r"^path +array +spec +per device$", out, re.M)
    assert re.search(rf"^mesh \({mesh}\): 12 arrays, .* on each device$", out, re.M)
    assert re.search(rf"^The optimizer: mesh \({mesh}\): 26 arrays", out, re.M)
    table = {"fsdp": "P('data', None)", "tp": "P('model', None)", "fsdp+tp": "P('model', 'data')"}[rules]
    assert re.search(rf"^embed\.weight .* {re.escape(table)} ", out, re.M)
    before, after = re.search(r"^Held-out text: (.*) bits per byte before training, (.*) after\.$", out, re.M).groups()
    assert float(after) < float(before) < 10
    assert re.search(r"^A sample:\n\ndef ", out, re.M)
    assert re.search(r"step 3/3 .* loss \d\.\d\d · [\d,]+ tokens/s", out)
    assert out.count("tokens/s") == 1, "where there is no terminal, the bar is written once"
    assert f"The loss over the steps: {picture}" in out and picture.read_bytes().startswith(PNG)


def test_verbose_shows_the_optimizer_and_matplotlib_may_be_missing(tmp_path: Path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    code, out, err = run("train_lm.py", *TINY, "--verbose", "--out", str(tmp_path / "no.png"), PYTHONPATH=path)
    assert (code, err) == (0, "")
    assert re.search(r"^1\.0\.mu\.blocks\.layer\.attn\.query ", out, re.M)
    assert [line for line in out.splitlines() if "matplotlib" in line] == [
        "No picture of the loss: matplotlib is missing; pip install functree[examples]"
    ]
    assert not (tmp_path / "no.png").exists()


def test_ctrl_c_leaves_the_picture_of_what_there_is(tmp_path: Path):
    picture = tmp_path / "curve.png"
    process = start("train_lm.py", *TINY, "--steps", "1000000", "--out", str(picture))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step     0:"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert re.search(r"^Stopped after \d+ of 1000000 steps\.$", out, re.M)
    assert picture.read_bytes().startswith(PNG)


def test_help():
    code, out, err = run("train_lm.py", "--help")
    assert (code, err) == (0, "")
    for flag in "--mesh --rules --steps --layers --embed --batch --seq --lr --seed --out".split():
        assert flag in out
    assert "(default: fsdp+tp)" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--mesh data=3", "the mesh (data=3) has no axis `model`"),
        ("--mesh data=2,modle=4", "did you mean `modle`?"),
        ("--mesh nonsense", "'nonsense' is no mesh: write axes and their sizes, as in data=2,model=4"),
        (
            "--embed 24 --heads 6",
            'blocks.layer.attn.query f32[1, 24, 6, 4]   "layers embed heads head_dim": "heads" has',
        ),
        ("--batch 3", '"batch" has size 3; rule batch→data needs a multiple of data=2'),
        ("--out nowhere/curve.png", "there is no folder 'nowhere'"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, said: str):
    code, _, err = run("train_lm.py", *TINY, *arguments.split())
    assert code == 2
    assert err.count("\n") == 1 and err.startswith("train_lm.py: error: ") and said in err


def test_bring_your_own():
    source = (EXAMPLES / "bring_your_own.py").read_text().splitlines()
    for mark in ("  # +fsdp", "  # +tensor"):
        assert 0 < sum(line.endswith(mark) for line in source) <= 10
    unmarked = [line for line in source if "ft." in line and "#" not in line and "`" not in line]
    assert [line.strip() for line in unmarked] == ["print(ft.plan(model, layout, mesh))"] * 2
    code, out, err = run("bring_your_own.py")
    assert (code, err) == (0, "")
    assert re.search(r"^mesh \(data=8\): 30 arrays", out, re.M)
    assert re.search(r"^mesh \(data=2, model=4\): 30 arrays", out, re.M)
    assert len(re.findall(r"^Loss .*, unsharded .* No gradient differs by more than ", out, re.M)) == 2
