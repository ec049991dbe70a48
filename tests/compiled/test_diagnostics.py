"""What the compiler says on standard error: heard, told as warnings, and nothing of the user's own
lost."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import functree as ft
from functree.compiled.diagnostics import listening, warnings_in

pytestmark = pytest.mark.usefixtures("compiles_anew")

LINE = "W1122 17:41:12.864462   30495 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler "
MOVE = "cannot go from sharding {mesh['x'=4,'y'=2], [{'x'}, {}]} to {mesh['x'=4,'y'=2], [{}, {'y'}]} efficiently for HLO"

# As the compilers of jax 0.10.2 and 0.12 write them.
MESSAGES = {
    LINE
    + MOVE
    + " operation %p. As the last resort, SPMD will replicate the tensor and then partition it.": [
        "[SPMD] Involuntary full rematerialization. The compiler " + MOVE + " operation %p"
    ],
    "E1122 17:37:08.980094   27071 slow_operation_alarm.cc:73] Constant folding an instruction is taking > 1s:\n\n"
    "  %sort.0 = f32[524288]{0} sort(%constant.5), dimensions={0}\n\nThis isn't necessarily a bug; constant-folding\n"
    "E1122 17:37:08.980094   27071 slow_operation_alarm.cc:140] The operation took 2m35.2s\n"
    "Constant folding an instruction is taking > 1s:\n": [
        "Constant folding an instruction is taking > 1s: %sort.0 = f32[524288]{0} sort(%constant.5), dimensions={0}"
    ],
    "E1122 17:56:24.873519   18870 slow_operation_alarm.cc:73] \n********************************\n"
    "[Compiling module jit_f for CPU] Very slow compile? If you want to file a bug, run with\n"
    "********************************\n": [
        "[Compiling module jit_f for CPU] Very slow compile? If you want to file a bug, run with"
    ],
    "W1122 17:46:38.445516    5304 hlo_rematerialization.cc:3231] Can't reduce memory use below 13.78GiB (1 bytes) by "
    "rematerialization; only reduced to 13.95GiB": [
        "Can't reduce memory use below 13.78GiB (1 bytes) by rematerialization; only reduced to 13.95GiB"
    ],
    "W1122 17:11:07.746028   21932 tpu_spmd_partitioner.cc:459] Collective matmul V1 is enabled.": [],
    "the user: involuntary full rematerialization\n": [],
    f"{LINE}a\n{LINE}a\n": ["[SPMD] Involuntary full rematerialization. The compiler a"],
}


@pytest.mark.parametrize("text", MESSAGES)
def test_messages(text: str) -> None:
    assert warnings_in(text) == MESSAGES[text]


MESH = Mesh(jax.make_mesh((4, 2), ("x", "y")).devices, ("x", "y"))


def moving(table: Any) -> Any:
    """A program that XLA can only partition by replicating."""
    return ft.constrain(table, ft.P(None, "y"))


def compiled(fun: Any, size: int = 16) -> Any:
    """A function of a table whose rows are sharded over `x`."""
    shape = jax.ShapeDtypeStruct((size, 16), "float32")
    return ft.jit(fun, in_shardings=ft.P("x"), mesh=MESH).lower(shape).compile()


def test_an_involuntary_rematerialization_is_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    ledger = compiled(moving).ledger()
    assert ledger.warnings_known and len(ledger.warnings) == 1
    told = ledger.warnings[0]
    assert (
        told.startswith("[SPMD] Involuntary full rematerialization.") and 'op_name="table"' in told
    )
    assert "As the last resort" not in told
    # It names no cost; the table does, so that warnings can be ranked.
    assert [(one.kind, str(one.arguments), one.bytes) for one in ledger.collectives] == [
        ("all-gather", "('table',)", 1024)
    ]
    short = "involuntary full rematerialization of f32[4,16], table"
    assert str(ledger).endswith(f"\n1 compiler warning (see `ledger.warnings`):\n{short}")
    assert short in ledger.html()
    assert "Involuntary full rematerialization" in capfd.readouterr().err  # passed on as it was


def test_what_jax_has_in_its_cache_is_not_known() -> None:
    assert (
        not compiled(jnp.sin).ledger().warnings
        and compiled(jnp.sin).ledger().warnings_known is False
    )
    assert "the compiler's warnings are unknown" in str(compiled(jnp.sin).ledger())


@pytest.mark.slow
def test_the_persistent_cache(tmp_path: Path) -> None:
    script = tmp_path / "cached.py"
    script.write_text(
        "import sys, jax, functree as ft\n"
        "mesh = ft.make_mesh(x=4, y=2)\n"
        "exec(sys.argv[1])\n"
        "shape = jax.ShapeDtypeStruct((16, 16), 'float32')\n"
        "ledger = ft.ledger(f, shape, in_shardings=ft.P('x'), mesh=mesh)\n"
        "print(len(ledger.warnings), ledger.warnings_known, *[one.arguments for one in ledger.collectives])\n"
    )
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    printed: list[str] = []
    # The parameter is renamed: the program from the cache has the old name in its metadata.
    for name in ("old", "new"):
        function = f"def f({name}):\n    return ft.constrain({name}, ft.P(None, 'y'))"
        done = subprocess.run(
            [sys.executable, str(script), function], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.strip())
    assert printed == ["1 True ('old',)", "0 False ('new',)"]


def test_order_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    for i in range(100):
        os.write(2, f"{i} before\n".encode())
        with listening():
            os.write(2, f"{i} meanwhile\n".encode())
            with listening():
                os.write(2, f"{i} twice\n".encode())
        os.write(2, f"{i} after\n".encode())
    expected = [
        f"{i} {when}" for i in range(100) for when in ("before", "meanwhile", "twice", "after")
    ]
    assert capfd.readouterr().err.splitlines() == expected


def test_nothing_of_the_users_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    """Several threads compile, and others write: nothing is lost or doubled, whatever the order of
    two threads."""
    number = 300

    def write(name: str) -> None:
        for i in range(number):
            os.write(2, f"{name} {i}\n".encode())

    heard: list[tuple[str, ...] | None] = []

    def listen() -> None:
        for _ in range(20):
            with listening() as said:
                os.write(2, f"{LINE}a\n".encode())
            heard.append(said.warnings)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "two")]
    threads += [threading.Thread(target=listen) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = capfd.readouterr().err.splitlines()
    for name in ("one", "two"):
        assert sorted(line for line in written if line.startswith(name)) == sorted(
            f"{name} {i}" for i in range(number)
        )
    assert len([line for line in written if line.startswith("W1122")]) == len(heard) == 40
    assert all(
        warnings == ("[SPMD] Involuntary full rematerialization. The compiler a",)
        for warnings in heard
    )


def test_two_threads_compile() -> None:
    def ledger_of(size: int) -> ft.Ledger:
        return compiled(lambda table: moving(table), size).ledger()

    with ThreadPoolExecutor(2) as threads:
        ledgers = list(threads.map(ledger_of, (24, 32)))
    assert [one.collectives[0].bytes for one in ledgers] == [24 * 64, 32 * 64]
    assert all(one.warnings_known and one.warnings for one in ledgers)


def test_a_process_that_is_started_meanwhile_keeps_its_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with listening():
        child = subprocess.Popen(["sh", "-c", "sleep 0.3; echo late >&2"])
    assert child.wait() == 0
    for _ in range(100):
        if "late" in capfd.readouterr().err:
            break
        threading.Event().wait(0.05)
    else:
        pytest.fail("what the child wrote was lost")


MANY_FILES = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
"""
LISTENED = """
import os
from contextlib import suppress
from functree.compiled.diagnostics import listening
with listening() as said, suppress(OSError): os.write(2, b"written")
print(said.warnings)
"""
# What runs before, the log level, what is known of warnings, and what is passed on.
PROCESSES: dict[str, tuple[str, str, str, str]] = {
    "many open files": (MANY_FILES, "1", "()", "written"),
    "no standard error": ("import os; os.close(2)", "1", "None", ""),
    "errors only": ("", "2", "None", "written"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PROCESSES)
def test_other_processes(case: str) -> None:
    before, level, *expected = PROCESSES[case]
    done = subprocess.run(
        [sys.executable, "-c", before + LISTENED],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": level},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [done.stdout.strip(), done.stderr.strip()] == expected
