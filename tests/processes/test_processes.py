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

import functree as ft
from tests.lib.checks import raises
from tests.lib.covering import whole_tables
from tests.lib.gcs_emulator import Emulator
from tests.lib.launch import ROOT, Running, ended, started
from tests.lib.meshes import MESH

WORKER = str(ROOT / "tests" / "processes" / "process_cases.py")
_CHECK = r"\(`ft\.check_processes`\)"
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
    "other_seed_in_the_closure": [
        "<lambda> makes no tree",
        "in comparison ",
        "(`ft.init(<lambda>, ...)(...)`)",
        "program",
        "process {odd} differs",
        "dense<0>",
        "dense<1>",
    ],
    "other_setting": [
        "make makes no tree",
        "settings",
        "process {odd} differs",
        "jax_threefry_partitionable = True",
        "jax_threefry_partitionable = False",
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
        "Try: if each process has rows of its own, say `local=True`; else all processes have to",
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
    "other_setting_of_a_step": [
        "<lambda> does not run",
        "settings",
        "jax_softmax_custom_jvp = True",
        "jax_softmax_custom_jvp = False",
    ],
    "other_setting_of_a_later_call": [
        "<lambda> does not run",
        "settings",
        "jax_default_matmul_precision = float32",
        "jax_default_matmul_precision = bfloat16",
    ],
    "other_array_in_the_closure": [
        "<lambda> does not run",
        "program",
        "process 0: ...",
        "00007A45",  # 4000.0, and what is around it
        "process {odd}: ...",
        "00107A45",
    ],
    "other_numpy_argument": [
        "<lambda> does not run",
        "(`<lambda>(...)`)",
        "arguments",
        "process 0: y: f32[8, 16] with the checksum ",
        "process {odd}: y: f32[8, 16] with the checksum ",
    ],
    "other_numpy_argument_by_rules": [
        "loss does not run",
        "arguments",
        "process 0: x: f32[8, 16] with the checksum ",
        "process {odd}: x: f32[8, 16] with the checksum ",
    ],
    "other_mesh_of_a_step": [
        "<lambda> does not run",
        "mesh",
        "process 0: mesh (data={count}, ",
        "process {odd}: mesh (data=",
        "other=1)",
    ],
    "one_call_apart": [
        "check_processes: the {count} processes compare different things",
        "process 0",
        "is at its comparison ",
        "`ft.check_processes` at ",
        "process_cases.py:",
        "process {odd}",
        "is at its comparison ",
        "`ft.shard` at ",
        "process_cases.py:",
        "Try: one process has called something that another has not, here or before",
    ],
    "one_step_apart": [
        "in comparison ",
        "(`ft.check_processes`)",
        "process 0: 0",
        "process {odd}: 1",
    ],
    "one_line_apart": ["step", "process {odd} differs", "line", "process_cases.py:"],
    "an_error_inside_of_two": ["mine alone"],
    "another_thing_inside_of_two": ["check_processes: the {count} processes differ", "step"],
    "an_error_in_one": [
        "f does not run: process {odd} of {count} failed with ValueError:\nmine alone"
    ],
    "an_array_that_does_not_fit_in_one": [
        "process {odd} of {count} failed with ShardingError",
        '"batch" has size 7',
    ],
    "part_of_the_devices": ["the mesh has no device of process", "make a mesh of all devices"],
    "rows_that_do_not_fit": [
        "the arrays cannot be placed",
        "process {odd} differs",
        "Try: each process has to hand in as many rows as the others, and all processes have to",
    ],
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
    "saved_in_a_bucket_that_one_does_not_reach": [
        "process {odd} of {count} failed",
        "gs://bucket/unreached cannot be written: the bucket has not answered for 60 seconds",
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
    "saved_another_tree": [
        "cannot be written",
        "(`ft.save`)",
        "arrays",
        "process {odd} differs",
        "process 0: up float32[16, 32]",
        "process {odd}: down float32[32, 16]",
    ],
    "saved_with_other_meta": ["meta", "process {odd} differs", '"epoch": 0', '"epoch": 1'],
    "saved_with_another_number": [
        "static leaves",
        "process 0: rate: 0.1",
        "process {odd}: rate: 0.2",
    ],
    "saved_with_other_options": ["options", "verify=True", "verify=False"],
    "opened_otherwise": ["is not opened", "(`ft.Checkpoints`)", "keep", "process {odd}: 2"],
    "saved_at_another_step": ["nothing is saved", "(`ft.Checkpoints.save`)", "step", "{odd}: 1"],
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
    "restored_unverified": ["verify", "process 0: True", "process {odd}: False"],
    "restored_from_another_manifest": ["is not restored", "(`ft.restore`)", "manifest", '"of": 1'],
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
    "loaded_otherwise": [
        "no weights are loaded",
        "(`ft.load_weights`)",
        "arrays",
        "embed.weight: f32[96, 32] P(None, None)",
        "embed.weight: f32[96, 32] P('data', None)",
    ],
    "other_tensors": [
        "the processes read other weights",
        "b",
        "values in process {odd}",
        "same files",
    ],
    "other_tensors_without_copies": [
        "no weights are loaded",
        "(`ft.load_tensors`)",
        "process {odd} differs",
        "bias begins with",
    ],
    "tensors_loaded_otherwise": [
        "no weights are loaded",
        "arrays",
        "b: f32[4096] P(None) on",
        "b: f32[4096] P('data') on",
    ],
    "tensors_of_other_names": [
        "no weights are loaded",
        "names",
        "process 0: w: qkv.weight[1/3].T",
        "process {odd}: w: qkv.weight[2/3].T",
    ],
    "tensors_that_one_process_lacks": ["no weights are loaded", "process {odd}", "have no `bia`"],
    "loaded_with_another_config": ["config", "process 0: ...", "max_seq=8", "max_seq=16"],
    "another_step_restored": ["nothing is restored", "step", "process 0: 2", "process {odd}: 3"],
    "other_model_published": ["no weights are saved", "process {odd} differs", "merged0"],
    "published_with_another_config": [
        "no weights are saved",
        "(`ft.save_weights`)",
        "config",
        "max_seq=8",
        "max_seq=16",
    ],
    "published_otherwise": [
        "model",
        "norm.scale: f32[32] P(None)",
        "norm.scale: f32[32] P('data')",
    ],
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
        "check_processes: the {count} processes differ in comparison ",
        "(`ft.check_processes`)",
        "stop",
        "process 0: False",
        "process {odd}: True",
    ],
}

# The table of `docs/processes.md`: what is compared ─► the cases in which it differs. Those of
# `check_processes` are in `HANDED`.
ROWS: dict[str, dict[str, list[str]]] = {
    "`ft.init(make, ...)(...)`": {
        "settings": ["other_setting"],
        "arguments, with their values": ["other_shapes", "other_key"],
        "the plan": ["other_layout", "other_devices"],
        "the lowered program": ["other_seed_in_the_closure"],
    },
    "`ft.shard(x, ...)` of host arrays": {
        "the plan": ["other_mesh", "other_batch_shape", "rows_that_do_not_fit"],
        "checksums of the values": ["other_batch", "rows_of_one_part"],
    },
    "`ft.save`": {
        "the arrays": ["saved_another_tree"],
        "values of copies, and of numpy": ["saved_torn", "saved_with_other_numpy"],
        "static leaves": ["saved_with_another_number"],
        "`meta`": ["saved_with_other_meta"],
        "options": ["saved_with_other_options"],
    },
    "`ft.restore`": {
        "the manifest": ["restored_from_another_manifest"],
        "the arrays and their shardings": ["restored_otherwise"],
        "options": ["restored_unverified"],
    },
    "`ft.Checkpoints`": {
        "the folder and options": ["opened_otherwise"],
        "the step": ["saved_at_another_step", "another_step_restored"],
        "as `ft.save` and `ft.restore`": [],
    },
    "`ft.load_weights`": {
        "the config": ["loaded_with_another_config"],
        "the arrays and their shardings": ["loaded_otherwise"],
        "how each tensor begins": ["other_weights_without_copies"],
        "values of copies": ["other_weights"],
    },
    "`ft.load_tensors`": {
        "the arrays and their shardings": ["tensors_loaded_otherwise"],
        "their names": ["tensors_of_other_names"],
        "how each tensor that is read begins": ["other_tensors_without_copies"],
        "values of copies": ["other_tensors"],
    },
    "`ft.save_weights`": {
        "the folder": ["other_model_published"],
        "the config": ["published_with_another_config"],
        "the plan": ["published_otherwise"],
        "values of copies, and of numpy": ["published_with_other_numpy"],
    },
    "`ft.jit(..., check_processes=True)`, once for each compilation": {
        "settings": ["other_setting_of_a_step", "other_setting_of_a_later_call"],
        "arguments, of numpy with their values": [
            "other_numpy_argument",
            "other_numpy_argument_by_rules",
        ],
        "the mesh": ["other_mesh_of_a_step"],
        "the lowered program": [
            "other_program",
            "other_collectives",
            "other_argument",
            "other_array_in_the_closure",
        ],
    },
    "`ft.check_processes(...)`": {
        "plans": ["plan"],
        "layouts": ["layout", "filter"],
        "meshes": ["mesh"],
        "programs": ["program"],
        "numbers": ["number", "type"],
        "texts": ["text", "line", "pattern"],
        "arrays": ["array", "key"],
        "sets": ["set", "set in a module", "key of a dict"],
        "mappings": ["mapping"],
        "dataclasses": ["dataclass"],
        "functions, by name": ["function", "arguments of a partial"],
        "trees of these": ["tree"],
        "anything else is an error": ["object"],
    },
}


def test_each_row_of_the_table_is_run() -> None:
    page = (ROOT / "docs" / "processes.md").read_text()
    rows: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("| `ft."):
            what, compared = line.strip("| ").split(" | ")
            rows[what] = compared
    assert rows == {what: "; ".join(row) for what, row in ROWS.items()}
    cases = [case for row in ROWS.values() for some in row.values() for case in some]
    handed = [case for some in ROWS["`ft.check_processes(...)`"].values() for case in some]
    assert set(cases) - set(handed) <= set(DIFFERENCES)
    assert set(handed) == set(HANDED)


# What `check_processes` is handed ─► what its message says of it.
HANDED: dict[str, list[str]] = {
    "plan": ["up: f32[16, 32] P(None, 'model')", "up: f32[16, 32] P(None, None)"],
    "layout": ["AxisRules", "FSDP"],
    "mesh": ["mesh (data=", "mesh (data=8)"],
    "filter": ["'a'", "'b'"],
    "program": ["stablehlo.sine", "stablehlo.cosine"],
    "number": ["process 0: 1", ": 2"],
    "type": ["process 0: 1", ": 1.0"],
    "text": ["process 0: '1'", ": 1"],
    "line": ["(nothing)", ": "],
    "array": ["f32[8, 16] with the checksum ", "f32[8, 16] with the checksum "],
    "key": ["key<fry>[] [0, 0]", "key<fry>[] [0, 1]"],
    "tree": ["process 0: a.1: 2", ": a.1: 3"],
    "set": ["set{'x', 'y', 'z'}", "set{'w', 'x', 'y'}"],
    "set in a module": ["names: frozenset{'x', 'y', 'z'}", "names: frozenset{'w', 'x', 'y'}"],
    "key of a dict": ["{frozenset{'a', 'b'}: 1}", "{frozenset{'a', 'c'}: 1}"],
    "mapping": ["mappingproxy{'a': 1}", "mappingproxy{'a': 2}"],
    "dataclass": ["Config(names=set{'x'})", "Config(names=set{'y'})"],
    "object": ["a.b: object objects cannot be compared between processes: compare what they hold"],
    "arguments of a partial": ["{'x': 1}", "{'x': 2}"],
    "function": ["sin", "cos"],
    "pattern": ["re.compile('a')", "re.compile('b')"],
}


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
    alike = {name for name, one in alone.items() if one["alike"]}
    works: dict[str, Any] = {
        "plans": [["P(None, 'model')", "P('model', None)"], 2 * 16 * 32 * 4 // (8 // processes)],
        "rows": [[True, True], "P('data', None)", [8, 16]],
        "whole_arrays": [[True] * 5, True],
        "one_program": [1, True],
        "prepared_once": True,
        "a_model_with_functions": True,
        "saved_while_steps_run": [[2, 3], True],
        "saved": [True, [2, 3], "P(None, ('data', 'model'))"],
        "saved_in_a_bucket": [[1, 2], True],
        "equal_numpy_arguments": True,
        "the_same": None,
        "equal_sets": [[16, 8], True],
        "not_preempted": [False] * 3,
    }
    [late] = told[0].pop("one_comes_late")["returned"]
    who = f"process 0 of {processes} has waited for the others for 0.5 s at {WORKER}"
    assert re.fullmatch(
        rf"{who}:\d+, at comparison \d+ {_CHECK}: does each of them come there\?", late
    )
    assert set(told[0]) == {"losses", "handed", *works, *alike, *DIFFERENCES}
    assert len(alike) >= 9
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
        check_text(text, fragments, processes)
    for one in told:
        handed = one["handed"]["returned"]
        assert handed.keys() == HANDED.keys()
        for name, text in handed.items():
            differ = [] if name == "object" else ["differ in comparison "]
            check_text(text, [*differ, *HANDED[name]], processes)


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
            "check_processes: not all processes have come to comparison 1 (`ft.check_processes`): ",
            "one has ended before, comes too late or cannot be reached; its own output says which",
        ],
        [],
    ],
    "died": [["check_processes: not all processes have come to comparison 2 ", "has ended"], []],
    "devices": [
        [
            "check_processes: the 2 processes have unequal numbers of devices",
            "process 1",
            "has 2 of the 6 devices, and most have 4",
            "Try: give each process as many devices as the others",
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
