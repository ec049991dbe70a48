"""The training script that is copied: killed and started again it ends as a run that nothing stops,
and the page that shows it shows what it prints."""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from tests.examples.scripts import EXAMPLES, as_a_script, run, run_here, variables_of
from tests.lib.launch import ROOT, ended, started, with_devices

pytestmark = pytest.mark.slow  # whole scripts

Captured = pytest.CaptureFixture[str]
PAGE = (ROOT / "docs" / "training-script.md").read_text(encoding="utf-8")
SHORT = "--steps 12 --every 3".split()
HEAD = "step,loss,valid_loss,accuracy"
# Ends itself, as if from outside, when a line that begins so is printed: before that step is saved.
KILLED = """
import builtins, os, runpy, signal, sys

def print_and_die(*objects, print=print, **options):
    print(*objects, **options)
    if str(objects[0]).startswith("{line}"):
        os.kill(os.getpid(), signal.SIGKILL)

builtins.print = print_and_die
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def log_of(out: str) -> list[str]:
    """The lines of the log in what a run prints, its head first."""
    return re.findall(rf"^(?:{HEAD}|\d+,.*)$", out, re.M)


def numbers_of(log: list[str]) -> np.ndarray:
    return np.array([[float(number) for number in line.split(",")] for line in log[1:]])


def digests(checkpoint: Path) -> list[tuple[str, object]]:
    return [(str(row.path), row.digest) for row in ft.inspect(checkpoint).rows]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a run that nothing stops."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    code, out, err = run("train.py", *SHORT, "--folder", str(folder))
    assert (code, err) == (0, "")
    return folder, out


def test_killed_and_started_again_it_ends_with_the_same_numbers(
    unbroken: tuple[Path, str], tmp_path: Path
) -> None:
    given = [*SHORT, "--folder", str(tmp_path / "run")]
    code, out, _ = run("train.py", *given, around=("-c", KILLED.format(line="9,")))
    assert code == -9 and log_of(out)[-1].startswith("9,")
    assert ft.Checkpoints(tmp_path / "run").latest in (3, 6)
    code, out, err = run("train.py", *given)
    assert (code, err) == (0, "")
    folder, expected = unbroken
    assert log_of(out) == log_of(expected)
    assert digests(tmp_path / "run" / "12") == digests(folder / "12")


def test_one_device_is_enough(unbroken: tuple[Path, str], tmp_path: Path) -> None:
    given = [*SHORT, "--folder", str(tmp_path / "run")]
    code, out, err = run("train.py", *given, XLA_FLAGS=with_devices(1))
    assert (code, err) == (0, "") and "mesh (data=1, model=1): 3 arrays" in out
    expected = numbers_of(log_of(unbroken[1]))
    np.testing.assert_allclose(numbers_of(log_of(out)), expected, atol=2e-3)


def test_the_same_file_in_two_processes(unbroken: tuple[Path, str], tmp_path: Path) -> None:
    """Each reads its own rows: together those of one process, in an order that drops other units."""
    code = "import runpy, sys; from tests.lib import launch; launch.initialized(); del sys.argv[0]"
    code += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    given = [str(EXAMPLES / "train.py"), *SHORT, "--folder", str(tmp_path / "run")]
    ends = ended(started(["-c", code, *given], processes=2), 120)
    assert [status for status, _, _ in ends] == [0, 0], ends[-1][2]
    first, second = (log_of(out) for _, out, _ in ends)
    assert first == second
    expected = numbers_of(log_of(unbroken[1]))
    np.testing.assert_allclose(numbers_of(first), expected, atol=0.2)
    np.testing.assert_allclose(numbers_of(first)[:, 2], expected[:, 2], atol=0.02)


def test_it_is_compiled_once_and_the_last_batch_counts_as_it_is(tmp_path: Path) -> None:
    script = variables_of("train.py")
    data, mesh = script["draw"](3, 150), ft.make_mesh(data=4, model=2)
    with as_a_script("train.py"):
        script["train"](str(tmp_path / "run"), steps=4, batch=64, every=2, data=4, model=2)
        assert len(script["train_step"].compilations) == len(script["measure"].compilations) == 1
        model = script["Classifier"](jax.random.key(0))
        placed = ft.shard(model, script["LAYOUT"], mesh)
        loss, right = script["evaluate"](placed, data, 64, mesh)
        quiet = eqx.nn.inference_mode(model)
        _, (losses, rights) = script["loss_fn"](quiet, **jax.tree.map(jnp.asarray, data))
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-3)
    # In bfloat16 two classes may be as likely, and the next bit depends on the devices.
    assert abs(right - np.mean(rights)) * len(rights) <= 2


def test_what_decays_in_other_models() -> None:
    """Attention with three dimensions does; a bias and a norm do not, also in a stack."""
    stacked = eqx.filter_vmap(lambda _: eqx.nn.LayerNorm(4))(jnp.arange(2))
    params = {
        "query": jnp.ones((4, 2, 3)),
        "table": jnp.ones((8, 4)),
        "scale": jnp.ones(4),
        "temperature": jnp.ones(()),
        "query_bias": jnp.ones((2, 3)),
        "bias": jnp.ones((2, 4)),
        "norm": stacked,
    }
    chosen = variables_of("train.py")["decayed"](params)
    assert params["norm"].weight.shape == (2, 4)
    assert [name for name, one in chosen.items() if any(jax.tree.leaves(one))] == ["query", "table"]


def test_another_run_in_the_same_folder_is_an_error(
    unbroken: tuple[Path, str], capsys: Captured
) -> None:
    given = ["--steps", "13", "--folder", str(unbroken[0])]
    code, _, _ = run_here(capsys, "train.py", *given)
    said = "train.py: error: the saved run has {'steps': 12, 'batch': 64, 'processes': 1}"
    assert code == said


# The page


def test_the_page_shows_what_a_run_prints(tmp_path: Path, capsys: Captured) -> None:
    """But for the last digits of the log, which a CPU may have otherwise."""
    [shown] = re.findall(rf"```text\n(.*?{HEAD}.*?)```", PAGE, re.DOTALL)
    code, out, err = run_here(capsys, "train.py", "--folder", str(tmp_path / "run"))
    assert (code, err) == (0, "")
    head, _, log = shown.partition(HEAD)
    printed = " ".join(out.split())
    for part in head.split("..."):
        assert " ".join(part.split()) in printed
    found, expected = numbers_of(log_of(out)), numbers_of(log_of(HEAD + log))
    np.testing.assert_allclose(found, expected, atol=0.05)


def test_the_script_fits_the_page() -> None:
    assert '--8<-- "examples/train.py"' in PAGE
    lines = (EXAMPLES / "train.py").read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 74
