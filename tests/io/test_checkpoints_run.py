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
    assert again.steps == (20, 21) and "2 steps, latest 21" in repr(again)


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
    with raises("has no checkpoint: its steps are none", error=ft.CheckpointError):
        checkpoints.restore(tree(0))
    with raises("`save` writes in the background", "with ft.Checkpoints(folder) as checkpoints:"):
        checkpoints.save(0, tree(0))
    with checkpoints:
        checkpoints.save(3, tree(3))
        with raises("has step 3 already: remove ", "run/3 to replace it", error=ft.CheckpointError):
            checkpoints.save(3, tree(4))
        with pytest.warns(ft.FunctreeWarning, match="step 2 is saved, and .* has step 3"):
            assert checkpoints.save(2, tree(2))
        with raises("has no checkpoint of step 4: its steps are 2, 3", error=ft.CheckpointError):
            checkpoints.restore(tree(0), 4)
    for wrong in (dict(keep=0), dict(keep=True), dict(every=0), dict(every=2.5)):
        with raises("there are no such checkpoints", *wrong):
            ft.Checkpoints(tmp_path, **wrong)


def test_one_that_is_kept_is_never_the_one_that_was_just_saved(tmp_path: Path) -> None:
    with ft.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(10, tree(10))
        with pytest.warns(ft.FunctreeWarning):
            checkpoints.save(2, tree(2))
    assert checkpoints.steps == (2,)


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
    monkeypatch.undo()

    with (
        pytest.raises(KeyError) as error,
        ft.Checkpoints(tmp_path) as checkpoints,
        monkeypatch.context() as patch,
    ):
        patch.setattr("functree.io.checkpoints.write.start_saving", lambda *_: Broken())
        checkpoints.save(5, tree(5))
        raise KeyError("mine")
    assert any("the last checkpoint was not saved" in note for note in error.value.__notes__)


ENDS = {  # how the interpreter may end inside of a `with` statement
    "a generator that is suspended": "g = run(); next(g)",
    "entered and not left": "c = ft.Checkpoints(path).__enter__(); c.save(0, tree)",
    "after a child was forked": (
        "import multiprocessing\n"
        "c = ft.Checkpoints(path).__enter__(); c.save(0, tree)\n"
        "child = multiprocessing.get_context('fork').Process(target=print, args=('child',))\n"
        "child.start(); child.join(); print(child.exitcode)"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "end, processes",
    [*((end, 1) for end in ENDS if "generator" not in end), ("a generator that is suspended", 2)],
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
    told = "run/0 was not saved, since the program has ended inside of `with Checkpoints`: leave it"
    assert saved or told in ends[0][2]


def test_nothing_is_left_of_a_failure_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is empty once the error is told, although orbax waits for the other process."""
    given_up = threading.Event()

    class Waiting:
        def result(self, timeout: float | None = None) -> None:
            raise TimeoutError

    def is_done(running: Any) -> bool:
        if isinstance(running, Waiting):
            assert given_up.wait(10)
            return False
        given_up.set()
        raise ft.CheckpointError("process 1 of 2 failed")

    with ft.Checkpoints(tmp_path / "run") as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr("functree.io.checkpoints.write.start_saving", lambda *_: Waiting())
            for module in ("write", "checkpoints"):
                patch.setattr(f"functree.io.checkpoints.{module}.is_done", is_done)
            checkpoints.save(1, tree(1))
            with raises("process 1 of 2 failed", error=ft.CheckpointError):
                checkpoints.wait()
            assert not list((tmp_path / "run").iterdir())
        checkpoints.save(1, tree(1))
    assert value(checkpoints.restore(tree(0))) == 1


LEFT = """
from tests.lib.launch import initialized
initialized()
import jax, numpy as np, functree as ft, os, resource, sys
tree = {"w": ft.shard(np.ones((8, 2**16), np.float32), ft.P("data"), ft.make_mesh(data=8))}
def most_bytes(number):  # of a file that this process writes
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, resource.RLIM_INFINITY))
for failing in (1, 0):
    try:
        with ft.Checkpoints(sys.argv[1]) as checkpoints:
            if jax.process_index() == failing:
                most_bytes(2**12)
            checkpoints.save(1, tree)
            raise KeyError("mine")
    except KeyError as error:
        print(failing, *error.__notes__)
    most_bytes(resource.RLIM_INFINITY)
with ft.Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(2, tree)
# On a busy machine, orbax may still make the folder of a step that was given up. It is no
# checkpoint, and is removed when the process that left it is dead.
steps = os.listdir(sys.argv[1])
whole = [step for step in steps if os.path.exists(f"{sys.argv[1]}/{step}/functree.json")]
print(checkpoints.steps, whole)
"""


@pytest.mark.slow
def test_an_error_of_the_program_while_one_process_cannot_save(tmp_path: Path) -> None:
    """The others do not wait for it, and what comes afterwards is whole."""
    for process, (status, out, err) in enumerate(
        ended(started(["-c", LEFT, str(tmp_path / "run")], 2), 60)
    ):
        assert status == 0, err
        # Threads of Gloo print too, sometimes in the middle of each other's lines.
        own = ("0 and ", "1 and ", "(2,) ")
        lines = [line for line in out.splitlines() if line.startswith(own)]
        assert lines[2:] == ["(2,) ['2']"]
        for failing, line in zip((1, 0), lines, strict=False):
            why = "File too large" if process == failing else "another process could not do so"
            assert line.startswith(f"{failing} and the last checkpoint was not saved: ")
            assert why in line


def test_half_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    ft.save(tmp_path / "c", tree(1))
    manifest = tmp_path / "c" / "functree.json"
    text = manifest.read_text()
    body = json.loads(text)
    del body["checksum"]
    texts = "", text[: len(text) // 2], text.replace('"axes"', '"axis"'), json.dumps(body)
    for broken in texts:
        manifest.write_text(broken)
        with raises("functree.json is not ", error=ft.CheckpointError):
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
    whole.

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
for run in (lambda: ft.save(path, large, overwrite=True), lambda: ft.save(path + "2", large), in_a_run):
    start = time.monotonic()
    try:
        run()
    except ft.CheckpointError as error:
        print("after", round(time.monotonic() - start), "seconds:", str(error).replace(chr(10), " "), flush=True)
"""
    ends = ended(started(["-c", code], processes, FUNCTREE_SHUTDOWN_SECONDS="3"), 90)
    for status, out, err in ends:
        # No process waits at its end for those that could not write: JAX would end all of them.
        assert status == 0, err
        lines = [line for line in out.splitlines() if "cannot be written" in line]
        assert len(lines) == 3 and all("File too large" in line for line in lines), (out, err)
        assert all(int(line.split()[1]) < 10 for line in lines), lines
    if processes == 2:
        assert "process 1 of 2 failed with CheckpointFileError" in ends[0][1]
    mesh = ft.make_mesh(data=8)
    small = faults.state(1, 2**12, mesh)
    assert faults.is_state(ft.restore(tmp_path / "c", small), 1, 2**12, mesh)
    assert {one.name for one in tmp_path.iterdir()} <= {"c", "c3"} and len(
        list((tmp_path / "c").iterdir())
    ) == 2
    assert ft.Checkpoints(tmp_path / "c3").latest is None
