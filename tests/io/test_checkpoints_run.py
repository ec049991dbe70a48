"""The checkpoints of a run: which are saved, which are kept, and what happens to them
(`python -m tests.faults`)."""

import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import functree as ft
from tests import faults
from tests.lib.checks import raises
from tests.lib.launch import ended, started
from tests.lib.meshes import lay

ELEMENTS = 2**16

# After a read that failed, orbax leaves tasks behind that were never awaited.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning"
)


@pytest.fixture(autouse=True)
def _nothing_is_left_for_other_tests() -> Iterator[None]:
    yield
    gc.collect()


def tree(step: int) -> Any:
    return {"w": lay(jnp.full((8, 4), step, jnp.float32), "data")}


def value(found: Any) -> float:
    return float(found["w"][0, 0])


def test_silent_failure_38_each_step_that_is_due_is_saved(tmp_path: Path) -> None:
    """In the background, and whole before the next: none is skipped, however fast they come."""
    with ft.Checkpoints(tmp_path, keep=None) as checkpoints:
        saved = [checkpoints.save(step, tree(step), meta={"step": step}) for step in range(12)]
    assert all(saved) and checkpoints.steps == tuple(range(12))
    for step in (0, 5, 11):
        assert value(checkpoints.restore(tree(0), step)) == step
        found = ft.inspect(tmp_path / str(step))
        assert (found.step, found.meta) == (step, {"step": step})
    assert value(checkpoints.restore(tree(0))) == 11
    for thread in [one for one in threading.enumerate() if "checkpoint" in one.name]:
        thread.join(10)
        assert not thread.is_alive()


def test_which_are_kept(tmp_path: Path) -> None:
    with ft.Checkpoints(tmp_path, keep=2, every=5) as checkpoints:
        saved = [step for step in range(21) if checkpoints.save(step, tree(step))]
        assert saved == [0, 5, 10, 15, 20]
        assert checkpoints.save(21, tree(21), force=True)
        checkpoints.wait()
        assert checkpoints.steps == (20, 21) and checkpoints.latest == 21
        assert not checkpoints.save(22, tree(22))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["20", "21"]
    again = ft.Checkpoints(tmp_path)
    assert again.steps == (20, 21) and repr(again) == f"<Checkpoints at {tmp_path}>"
    with raises(
        "it contains the checkpoints of a run: pass the folder of one step, such as ", "/21"
    ):
        ft.inspect(tmp_path)


def test_an_array_may_be_donated_while_it_is_saved(tmp_path: Path) -> None:
    step = ft.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate="t")
    state = tree(0)
    with ft.Checkpoints(tmp_path, keep=None) as checkpoints:
        for i in range(5):
            checkpoints.save(i, state)
            state = step(state)
    assert [value(checkpoints.restore(tree(0), i)) for i in range(5)] == [0, 1, 2, 3, 4]


def test_what_is_refused(tmp_path: Path) -> None:
    checkpoints = ft.Checkpoints(tmp_path / "run")
    assert (checkpoints.steps, checkpoints.latest) == ((), None)
    with raises("has no checkpoint (saved steps: none)", error=ft.CheckpointError):
        checkpoints.restore(tree(0))
    with raises(
        "Checkpoints.save was called outside a `with` statement",
        "with ft.Checkpoints(folder) as checkpoints:",
    ):
        checkpoints.save(0, tree(0))
    with checkpoints:
        checkpoints.save(3, tree(3))
        with raises(
            "already has a checkpoint for step 3: to replace it, remove ",
            "run/3",
            error=ft.CheckpointError,
        ):
            checkpoints.save(3, tree(4))
        with pytest.warns(ft.FunctreeWarning, match="step 2 is saved, but .* from step 3 of .*run"):
            assert checkpoints.save(2, tree(2))
        with raises("has no checkpoint for step 4 (saved steps: 2, 3)", error=ft.CheckpointError):
            checkpoints.restore(tree(0), 4)


def test_a_run_that_goes_on_from_an_earlier_step(tmp_path: Path) -> None:
    """What it saves is newer than what was there before, whatever the steps: else its own would be
    removed."""
    with ft.Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, tree(step))
    kept = []
    with (
        ft.Checkpoints(tmp_path, keep=3) as checkpoints,
        pytest.warns(ft.FunctreeWarning, match="step 1. is saved"),
    ):
        for step in (11, 12, 13, 14):
            checkpoints.save(step, tree(step))
            checkpoints.wait()
            kept.append(checkpoints.steps)
    assert kept == [(11, 20, 30), (11, 12, 30), (11, 12, 13), (12, 13, 14)]


def test_a_failure_is_raised_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of it stays; what was there is still whole."""

    class Broken:
        def result(self, timeout: float | None = None) -> None:
            raise ValueError("RESOURCE_EXHAUSTED: No space left on device\nand more")

    with pytest.raises(
        ft.CheckpointError, match="5 cannot be written: RESOURCE_EXHAUSTED: No space left"
    ) as caught:
        with ft.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(4, tree(4))
            checkpoints.wait()
            with monkeypatch.context() as patch:
                patch.setattr("functree.io.checkpoints.write.start_saving", lambda *_: Broken())
                checkpoints.save(5, tree(5))
            checkpoints.save(6, tree(6))
    assert isinstance(caught.value.__cause__, ValueError)
    assert [one.name for one in tmp_path.iterdir()] == ["4"] and value(
        checkpoints.restore(tree(0))
    ) == 4

    class Late(Broken):
        def result(self, timeout: float | None = None) -> None:
            raise TimeoutError("orbax has waited for 1200 s")

    monkeypatch.setattr("functree.io.checkpoints.write.start_saving", lambda *_: Late())
    with raises("5 cannot be written: orbax has waited for 1200 s", error=ft.CheckpointError):
        ft.save(tmp_path / "5", tree(5))


ENDS = {  # how the interpreter may end inside of a `with` statement
    "a generator that is suspended": "g = run(); next(g)",
    "entered and not left": "c = ft.Checkpoints(path).__enter__(); c.save(0, tree)",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "processes"), [("entered and not left", 1), ("a generator that is suspended", 2)]
)
def test_a_program_that_ends_inside_of_the_statement(
    end: str, processes: int, tmp_path: Path
) -> None:
    """It ends, within seconds: the checkpoint is whole, or a warning says that it was not saved."""
    code = f"""
from tests.lib.launch import initialized
initialized()
import jax, numpy as np, functree as ft
path = {str(tmp_path / "run")!r}
tree = {{"w": ft.shard(np.ones((8, 2**21), np.float32), ft.P("data"), ft.make_mesh(data=8))}}
def run():
    with ft.Checkpoints(path) as c:
        c.save(0, tree)
        yield
{ENDS[end]}
print("end", flush=True)
"""
    ends = ended(started(["-c", code], processes), 60)
    for status, out, err in ends:
        assert status == 0 and out.splitlines()[-1] == "end", err
    saved = ft.Checkpoints(tmp_path / "run").steps == (0,)
    told = "run/0 was not saved, since the program ended inside `with Checkpoints`: leave the"
    assert saved or told in ends[0][2]


def test_half_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    ft.save(tmp_path / "c", tree(1))
    manifest = tmp_path / "c" / "functree.json"
    text = manifest.read_text()
    body = json.loads(text)
    del body["checksum"]
    foreign = "is not the manifest of a checkpoint"
    texts = {"": foreign, text[: len(text) // 2]: foreign, json.dumps(body): foreign}
    texts[text.replace('"axes"', '"axis"')] = "has changed since it was written"
    for broken, why in texts.items():
        manifest.write_text(broken)
        with raises(f"functree.json {why}", error=ft.CheckpointError):
            ft.restore(tmp_path / "c", tree(0))
    manifest.write_text(text)
    assert value(ft.restore(tmp_path / "c", tree(0))) == 1


# What happens to them


@pytest.mark.slow
def test_flipped_bits(tmp_path: Path) -> None:
    found = faults.flips(tmp_path, 40, 5 * 2**20 // 3)  # 5 MB
    assert sum(found.values()) == 40 and found["noticed, by path (values)"] > 10
    assert not any("MISSED" in what for what in found)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_writers(processes: int, tmp_path: Path) -> None:
    found = faults.kills(tmp_path, 2, ELEMENTS, processes)  # at first, and when it goes on
    assert set(found) <= {"0 steps lost", "1 steps lost", "whole", "dead folders"}
    assert found["whole"] and not found["dead folders"], faults.left_over(str(tmp_path / "run"))


@pytest.mark.slow
def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    found = faults.races(tmp_path, 1, ELEMENTS)
    assert found["1 saved"] == 1 and found["read under retention"] > 3
    assert not found["FOREIGN"] and not found["MIXED"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_file_system_that_takes_no_more(processes: int, tmp_path: Path) -> None:
    """An error that says so, also while a checkpoint is replaced; what was there before is still
    whole, and so is what comes afterwards.

    With two processes only the disk of the last one takes no more; both say so, and both end.
    """
    code = f"""
from tests.lib.launch import initialized
initialized()
import jax, resource, signal, time
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import functree as ft
from tests import faults
mesh = ft.make_mesh(data=8)
path, small, large = {str(tmp_path / "c")!r}, faults.state(1, 2**12, mesh), faults.state(2, 2**22, mesh)
ft.save(path, small)
if jax.process_index() == {processes - 1}:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
def in_a_run():
    with ft.Checkpoints(path + "3") as checkpoints:
        checkpoints.save(1, large)
def left_by_an_error():
    try:
        with ft.Checkpoints(path + "4") as checkpoints:
            checkpoints.save(1, large)
            raise KeyError("mine")
    except KeyError as error:
        raise ft.CheckpointError(*error.__notes__)
replaced, new = lambda: ft.save(path, large, overwrite=True), lambda: ft.save(path + "2", large)
for run in (replaced, new, in_a_run, left_by_an_error):
    start = time.monotonic()
    try:
        run()
    except ft.CheckpointError as error:
        print("after", round(time.monotonic() - start), "seconds:", str(error).replace(chr(10), " "), flush=True)
with ft.Checkpoints(path + "4") as checkpoints:
    checkpoints.save(2, small)
"""
    ends = ended(started(["-c", code], processes, FUNCTREE_SHUTDOWN_SECONDS="3"), 120)
    for process, (status, out, err) in enumerate(ends):
        # No process waits at its end for those that could not write: JAX would end all of them.
        assert status == 0, err
        lines = [line for line in out.splitlines() if "cannot be written" in line]
        assert len(lines) == 4 and all("File too large" in line for line in lines[:3]), (out, err)
        # One that leaves by an error of its own talks to no other: it finds a word of that.
        why = "File too large" if process == processes - 1 else "another process failed to write it"
        assert "the last checkpoint was not saved: " in lines[3] and why in lines[3]
        assert all(int(line.split()[1]) < 10 for line in lines), lines
    if processes == 2:
        assert "process 1 of 2 failed with CheckpointFileError" in ends[0][1]
    mesh = ft.make_mesh(data=8)
    small = faults.state(1, 2**12, mesh)
    for name in ("c", "c4/2"):
        assert faults.is_state(ft.restore(tmp_path / name, small), 1, 2**12, mesh)
        assert len(list((tmp_path / name).iterdir())) == 2
    assert {one.name for one in tmp_path.iterdir()} <= {"c", "c3", "c4"}
    assert ft.Checkpoints(tmp_path / "c3").latest is None
    assert ft.Checkpoints(tmp_path / "c4").steps == (2,)
