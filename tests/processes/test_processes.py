"""Several processes, real ones: what works in one works in two and four; what differs is an error
that names it.

`process_cases.py` has the cases.
"""

import json
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import raises
from covering import whole_tables
from launch import ROOT, ended, started
from meshes import MESH

import functree as ft

WORKER = str(ROOT / "tests" / "lib" / "process_cases.py")
LIMIT = 10.0  # seconds in which each case has to end


def told_by(processes: int, folder: Path) -> list[dict[str, Any]]:
    """What each process tells of each case."""
    ends = ended(started([WORKER], processes, FUNCTREE_FOLDER=str(folder)), 300)
    lines = [
        [line for line in out.splitlines() if line.startswith("RESULTS")] for _, out, _ in ends
    ]
    assert all(status == 0 for status, _, _ in ends) and all(lines), ends[-1][2][-3000:]
    return [json.loads(line[0].removeprefix("RESULTS")) for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process alone tells of the cases that return numbers."""
    return told_by(1, tmp_path_factory.mktemp("alone"))[0]


def of_one_process(steps: int) -> list[float]:
    """The losses of the same training, by plain JAX and one process."""
    rng = jax.random.split(jax.random.key(0))
    w = (jax.random.normal(rng[0], (16, 32)) * 0.3, jax.random.normal(rng[1], (32, 16)) * 0.3)
    tx = optax.adam(1e-2)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w[0]) @ w[1] - jnp.sin(x)) ** 2)

    @jax.jit
    def step(w: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(w, updates), state, value

    losses, state = [], tx.init(w)
    with jax.numpy_dtype_promotion("standard"):
        for i in range(steps):
            w, state, value = step(
                w, state, np.random.default_rng(i).normal(size=(8, 16)).astype(np.float32)
            )
            losses.append(float(value))
    return losses


# What differs in the last process ─► what the first one says of it. `{odd}` is the last process.
DIFFERENCES: dict[str, list[str]] = {
    "other_shapes": [
        "make makes no tree",
        "process {odd} differs from process 0",
        "embed: 32",
        "embed: 16",
    ],
    "other_key": [
        "make makes no tree",
        "process {odd} differs",
        "key: key<fry>[] [0, 0]",
        "key: key<fry>[] [0, 1]",
    ],
    "other_layout": [
        "make makes no tree",
        "process {odd} differs",
        "up: f32[16, 32] P(None, 'model')",
    ],
    "other_devices": ["make makes no tree", "process {odd} differs", "devices [0, 1,"],
    "other_mesh": ["the arrays cannot be placed", "process {odd} differs", "mesh (data="],
    "other_batch": [
        "the arrays cannot be placed",
        "process {odd} differs",
        "(the array): f32[8, 16] ",
    ],
    "other_batch_shape": [
        "the arrays cannot be placed",
        "process {odd} differs",
        "f32[8, 16]",
        "f32[4, 16]",
    ],
    "other_program": [
        "<lambda> does not run",
        "process {odd} differs",
        "stablehlo.sine",
        "stablehlo.cosine",
    ],
    "other_collectives": [
        "f does not run",
        "process {odd} differs",
        "sdy.sharding_constraint",
        '{"data"}, {}',
    ],
    "other_argument": ["<lambda> does not run", "process {odd} differs", "dense<2.0", "dense<3.0"],
    "an_error_in_one": [
        "f does not run: process {odd} of {count} failed with ValueError:\nmine alone"
    ],
    "an_array_that_does_not_fit_in_one": [
        "process {odd} of {count} failed with ShardingError",
        '"batch" has size 7',
    ],
    "part_of_the_devices": ["the mesh has no device of process", "make a mesh of all devices"],
    "rows_that_do_not_fit": ["the arrays cannot be placed", "process {odd} differs"],
    "rows_of_one_part": [
        "has copies that have different values in process {odd}",
        "give the same rows",
    ],
    "rows_that_are_none": [
        "w   f32[16, 32]",
        "is an array of all processes, and not the rows of this one",
    ],
    "saved_elsewhere": [
        "process {odd} of {count} failed",
        "does not see the folder",
        "a file system that all",
    ],
    "saved_by_one_alone": [
        "w   f32[3]",
        "is only on devices of process 0, and there are {count}",
        "ft.shard(tree",
    ],
    "saved_with_other_numpy": [
        "cannot be written",
        "arrays of numpy",
        "process {odd} differs",
        "n ",
    ],
    "saved_torn": [
        "cannot be written",
        "w",
        "has copies that have different values in process {odd}",
    ],
    "restored_otherwise": [
        "is not restored",
        "like",
        "process {odd} differs",
        "up: f32[16, 32] P(None, 'model')",
    ],
    "restored_by_one_that_does_not_fit": [
        "process {odd} of {count} failed",
        "up   f32[32, 32]",
        "another shape",
    ],
    "restored_with_the_files_of_one_process_torn": [
        "process {odd} of {count} failed",
        "cannot be read",
    ],
    "other_weights": [
        "the processes read other weights",
        "norm.scale",
        "values in process {odd}",
        "same files",
    ],
    "other_weights_without_copies": [
        "no weights are loaded",
        "process {odd} differs",
        "model.norm.weight begins with",
    ],
    "another_step_restored": ["nothing is restored", "step", "process 0: 2", "process {odd}: 3"],
    "other_model_published": ["no weights are saved", "process {odd} differs", "merged0"],
    "published_with_other_numpy": [
        "norm.scale",
        "has copies that have different values in process {odd}",
    ],
    "published_by_each_alone": [
        "no weights are saved",
        "embed.weight",
        "is only on devices of process 0",
        "ft.shard(",
    ],
    "other_step": [
        "check_processes: the {count} processes differ",
        "stop",
        "process 0: False",
        "process {odd}: True",
    ],
}


@pytest.mark.parametrize("processes", [2, 4])
def test_silent_failure_36_what_works_and_what_differs(
    processes: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    told = told_by(processes, tmp_path)
    alike = {name for name, one in alone.items() if one["alike"]}
    if processes == 4 and not whole_tables():
        alike &= told[0].keys()
    works: dict[str, Any] = {
        "plans": [["P(None, 'model')", "P('model', None)"], 2 * 16 * 32 * 4 // (8 // processes)],
        "rows": [[True, True], "P('data', None)", [8, 16]],
        "whole_arrays": [[True] * 5, True],
        "one_program": [1, True],
        "prepared_once": True,
        "a_model_with_functions": True,
        "saved_while_steps_run": [[2, 3], True],
        "saved": [True, [2, 3], "P(None, ('data', 'model'))"],
        "the_same": None,
        "not_preempted": [False] * 3,
    }
    [late] = told[0].pop("one_comes_late")["returned"]
    who = f"process 0 of {processes} has waited for the others for 0.5 s at {WORKER}"
    assert re.fullmatch(rf"{who}:\d+: does each of them come there\?", late)
    assert set(told[0]) == {"losses", *works, *alike, *DIFFERENCES}
    assert len(alike) >= (4 if processes == 4 else 9)
    for one in told:
        np.testing.assert_allclose(one["losses"]["returned"], of_one_process(20), rtol=1e-6)
        assert {name: one[name].get("returned", one[name]) for name in works} == works
        for name in alike:
            assert "returned" in one[name], (name, one[name])
            np.testing.assert_allclose(
                one[name]["returned"], alone[name]["returned"], rtol=2e-5, atol=1e-5, err_msg=name
            )
    for name, fragments in DIFFERENCES.items():
        for process, one in enumerate(told):
            assert "raised" in one[name] and one[name]["seconds"] < LIMIT, (
                name,
                process,
                one[name],
            )
        text = told[0][name]["text"]
        for fragment in fragments:
            wanted = fragment.replace("{odd}", str(processes - 1)).replace(
                "{count}", str(processes)
            )
            assert wanted in text, (name, wanted, text)
            text = text[text.index(wanted) + len(wanted) :]


def test_of_one_process_there_is_nothing_to_compare() -> None:
    """The checks do nothing, and cost nothing: the arguments are not looked at."""
    ft.check_processes(step=3, anything=object())
    f = ft.jit(lambda x: 2 * x, check_processes=True)
    assert float(f(jnp.float32(2))) == 4 and len(f.compilations) == 1
    x = np.ones((8, 4), np.float32)
    rows = ft.shard(x, ft.P("data"), MESH, local=True)
    assert np.array_equal(rows, x) and rows.sharding.spec == ft.P("data", None)
    with raises("no array can be placed", "local=2", "it must be True or False"):
        ft.shard(x, ft.P(), MESH, local=2)  # type: ignore[arg-type]


# Processes that end


def _await(path: Path, running: Sequence["subprocess.Popen[str]"], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until and all(one.poll() is None for one in running), ended(
            running, 1
        )
        time.sleep(0.05)


LOOP = """
import sys, time
from launch import initialized
initialized()
import jax, jax.numpy as jnp, functree as ft
from pathlib import Path
mesh = ft.make_mesh(data=8)
step = ft.jit(lambda x: x + jnp.sin(x).sum(), check_processes=True)
x, stopped = ft.shard(jnp.ones((8, 4)), ft.P("data"), mesh), None
for i in range(4000):
    x = jax.block_until_ready(step(x))
    Path(sys.argv[1], f"runs{jax.process_index()}").touch()
    if ft.preempted(i):
        stopped = i
        break
    time.sleep(0.01)
print("stopped", stopped)
"""


def test_a_killed_process_ends_the_others(tmp_path: Path) -> None:
    running = started(["-c", LOOP, str(tmp_path)], 2, FUNCTREE_HEARTBEAT_SECONDS="5")
    _await(tmp_path / "runs1", running)
    running[1].kill()
    start = time.monotonic()
    ends = ended(running, 30)
    assert time.monotonic() - start < 10
    assert ends[0][0] not in (0, -signal.SIGKILL), ends[0]  # it ended by itself, with an error


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_of_one_process_stops_all_at_one_step(processes: int, tmp_path: Path) -> None:
    running = started(["-c", LOOP, str(tmp_path)], processes)
    for process in range(processes):
        _await(tmp_path / f"runs{process}", running)
    running[-1].send_signal(signal.SIGTERM)
    ends = ended(running, 30)
    assert all(status == 0 for status, _, _ in ends), ends
    steps = {out.split()[-1] for _, out, _ in ends}
    assert len(steps) == 1 and steps.pop().isdigit()


def test_preempted_listens_in_the_main_thread() -> None:
    code = """
import os, signal, threading, functree as ft
failed = []
def other():
    try:
        ft.preempted(0)
    except ft.FunctreeError as error:
        failed.append(str(error))
thread = threading.Thread(target=other); thread.start(); thread.join()
print(failed)
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
print(ft.preempted(0)); os.kill(os.getpid(), signal.SIGTERM); print(ft.preempted(1), ft.preempted(2), heard)
signal.signal(signal.SIGTERM, signal.SIG_DFL) if heard else None
os.kill(os.getpid(), signal.SIGTERM)
"""
    [(status, out, err)] = ended(started(["-c", code]), 30)
    first, *lines = out.splitlines()
    assert "has to listen for SIGTERM in the main thread" in first, err
    assert lines == ["False", "True True [1]"] and status == -signal.SIGTERM
    with raises("preempted cannot tell", "step=-1"):
        ft.preempted(-1)
