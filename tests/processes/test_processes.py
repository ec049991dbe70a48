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

import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from tests.lib.checks import raises
from tests.lib.covering import whole_tables
from tests.lib.gcs_emulator import Emulator
from tests.lib.launch import ROOT, Running, ended, started
from tests.lib.meshes import MESH
from tests.processes.process_cases import ALIKE, CASES, DIFFERENCES, HANDED

WORKER = str(ROOT / "tests" / "processes" / "process_cases.py")
LIMIT = 10.0  # seconds in which each case has to end


def told_by(processes: int, folder: Path) -> list[dict[str, Any]]:
    """What each process tells of each case."""
    with Emulator().running() as emulator:
        # Each process has other hashes of texts, so other orders of sets.
        environment = {"FUNCTREE_FOLDER": str(folder), "PYTHONHASHSEED": "random"}
        running = started([WORKER], processes, **environment, **emulator.environment)
        ends = ended(running, 300)
    lines = [
        [line for line in out.splitlines() if line.startswith("RESULTS")] for _, out, _ in ends
    ]
    assert all(status == 0 for status, _, _ in ends) and all(lines), ends[-1][2][-3000:]
    return [json.loads(line[0].removeprefix("RESULTS")) for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process alone tells of the cases that return numbers."""
    return told_by(1, tmp_path_factory.mktemp("alone"))[0]


def check_text(text: str, fragments: Sequence[str], processes: int) -> None:
    """Each fragment is in the text, after the one before."""
    for fragment in fragments:
        wanted = fragment.replace("{odd}", str(processes - 1)).replace("{count}", str(processes))
        assert wanted in text, (wanted, text)
        text = text[text.index(wanted) + len(wanted) :]


# In four processes the cases do what they do in two, on other sizes of the mesh.
@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4] if whole_tables() else [2])
def test_silent_failure_36_what_works_and_what_differs(
    processes: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    told = told_by(processes, tmp_path)
    [late] = told[0]["one_comes_late"]["returned"]
    who = f"process 0 of {processes} has waited 0.5 s for the others in comparison"
    asked = "check that all processes reach this call"
    assert re.fullmatch(rf"{who} \d+ \(`ft\.check_processes`\) at {WORKER}:\d+: {asked}", late)
    assert told[0].keys() == CASES.keys() and alone.keys() == ALIKE.keys()
    for one in told:
        for name in CASES.keys() - ALIKE.keys() - DIFFERENCES.keys():
            assert "returned" in one[name], (name, one[name])
        for name in ALIKE:
            assert "returned" in one[name], (name, one[name])
            np.testing.assert_allclose(
                one[name]["returned"], alone[name]["returned"], rtol=2e-5, atol=1e-5, err_msg=name
            )
        losses = one["losses"]["returned"], alone["losses"]["returned"]
        np.testing.assert_allclose(*losses, rtol=1e-6)
        for name in DIFFERENCES:
            assert "raised" in one[name] and one[name]["seconds"] < LIMIT, (name, one[name])
        for name, text in one["handed"]["returned"].items():
            differ = [] if name == "object" else ["differ in comparison "]
            check_text(text, [*differ, *HANDED[name][1]], processes)
    for name, fragments in DIFFERENCES.items():
        check_text(told[0][name]["text"], fragments, processes)


def test_of_one_process_there_is_nothing_to_compare() -> None:
    """The checks do nothing, and cost nothing: the arguments are not looked at."""
    ft.check_processes(step=3, anything=object())
    f = ft.jit(lambda x: 2 * x, check_processes=True)
    assert float(f(jnp.float32(2))) == 4 and len(f.compilations) == 1
    x = np.ones((8, 4), np.float32)
    rows = ft.shard(x, ft.P("data"), MESH, local=True)
    assert np.array_equal(rows, x) and rows.sharding.spec == ft.P("data", None)
    with raises("shard: invalid arguments", "local=2", "it must be True or False"):
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
from tests.lib.launch import initialized
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


@pytest.mark.slow
def test_a_killed_process_ends_the_others(tmp_path: Path) -> None:
    running = started(["-c", LOOP, str(tmp_path)], 2, FUNCTREE_HEARTBEAT_SECONDS="5")
    _await(tmp_path / "runs1", running)
    running[1].kill()
    start = time.monotonic()
    ends = ended(running, 30)
    assert time.monotonic() - start < 10
    assert ends[0][0] not in (0, -signal.SIGKILL), ends[0]  # it ended by itself, with an error


APART = """
import os, sys
how, rank = sys.argv[1], int(os.environ["FUNCTREE_PROCESS"])
if how == "devices" and rank == 1:
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=2")
from tests.lib.launch import initialized
initialized()
import jax, functree as ft
jax.devices()  # JAX waits here for all processes, for minutes
try:
    if how == "left" and rank == 1:
        sys.exit()
    ft.check_processes(step=1)
    if how == "died" and rank == 1:
        os._exit(3)
    ft.check_processes(step=2)
except ft.FunctreeError as error:
    print(error, flush=True)
    if how == "died":
        os._exit(0)  # JAX would wait for its heartbeat, and end this process
"""

# What has happened to the second process ─► what is said by the first one, and by the second.
APARTS: dict[str, list[list[str]]] = {
    # With gloo, which simulated devices use, the first comparison waits for half a minute.
    "left": [
        [
            "check_processes: not all processes reached comparison 1 (`ft.check_processes`). ",
            "A process has ended, is late, or cannot be reached: read the output of each process",
        ],
        [],
    ],
    "died": [["check_processes: not all processes reached comparison 2 ", "has ended"], []],
    "devices": [
        [
            "check_processes: the processes have different numbers of devices, 4, 2: give all",
        ]
    ]
    * 2,
}


@pytest.mark.slow
def test_processes_that_cannot_be_compared() -> None:
    running: dict[str, Running] = {}
    for how in APARTS:  # at once: most of the time they wait
        running[how] = started(["-c", APART, how], 2, FUNCTREE_SHUTDOWN_SECONDS="90")
    results = {how: ended(running[how], 80) for how in APARTS}
    for how, texts in APARTS.items():
        for (status, out, err), fragments in zip(results[how], texts, strict=True):
            # gloo does not notice the end of a process that it is still connecting to, as it does on
            # a busy machine: then JAX ends this one, after its heartbeat's time.
            if how == "died" and status == -signal.SIGABRT:
                assert "stopped sending heartbeats" in err
                continue
            assert status == (3 if how == "died" and not fragments else 0), err[-3000:]
            check_text(out, fragments, 2)


@pytest.mark.slow
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


@pytest.mark.slow
def test_preempted_listens_in_the_main_thread() -> None:
    code = """
import os, signal, threading, functree as ft
failed = []
def other():
    try:
        ft.preempted(0)
    except ValueError as error:
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
    assert "signal only works in main thread" in first, err
    assert lines == ["False", "True True [1]"] and status == -signal.SIGTERM
    with raises("preempted: invalid arguments", "step=-1"):
        ft.preempted(-1)


@pytest.mark.slow
def test_a_second_sigterm_ends_the_process() -> None:
    """As a run that hangs, and never comes to its next step."""
    code = """
import os, signal, functree as ft
ft.preempted(0)
os.kill(os.getpid(), signal.SIGTERM); print(ft.preempted(1), flush=True)
os.kill(os.getpid(), signal.SIGTERM); print("still there", flush=True)
"""
    [(status, out, _)] = ended(started(["-c", code]), 30)
    assert out.split() == ["True"] and status == -signal.SIGTERM
