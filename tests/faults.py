"""What can happen to checkpoints: flipped bits, killed writers, two writers at once.

Each function lets it happen so often, and returns what was found. The tests do it a few times; to
do it in full:

    python -m tests.faults flips --count 200 --megabytes 50
    python -m tests.faults kills --count 50
    python -m tests.faults kills --count 50 --processes 2
    python -m tests.faults races --count 8

And in a bucket, which is an emulator of one on this machine:

    python -m tests.faults flips --count 200 --store gs
    python -m tests.faults kills --count 50 --store gs
    python -m tests.faults kills --count 50 --processes 2 --store gs
    python -m tests.faults races --count 8 --store gs
    python -m tests.faults outages --count 4 --store gs
"""

import argparse
import collections
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__" and "FUNCTREE_PROCESS" not in os.environ:
    # Before JAX makes its devices. For the processes that are started here, and under pytest,
    # others do this.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    )

import jax
import jax.numpy as jnp
import numpy as np

import functree as ft
from functree.io.checkpoints import folder as folders
from tests.lib import gcs_emulator
from tests.lib.launch import Running, ended, free_port, initialized, started

BUCKET = "faults"
LAYOUT = ft.StateSharding({"**.key": ft.P(), "**.step": ft.P(), ...: ft.P("data")})


def state(step: int, elements: int, mesh: jax.sharding.Mesh) -> Any:
    """A state whose values follow from its step."""
    make = ft.init(_state, LAYOUT, mesh)
    return make(jnp.int32(step), elements)


def _state(step: Any, elements: int) -> Any:
    key = jax.random.fold_in(jax.random.key(0), step)
    w = jax.random.normal(key, (8, elements // 16))
    half = jax.random.normal(jax.random.fold_in(key, 1), (8, elements // 16), jnp.bfloat16)
    return {
        "step": step,
        "key": key,
        "model": {"w": w, "half": half, "small": jnp.arange(16, dtype=jnp.int8)},
    }


def is_state(found: Any, step: int, elements: int, mesh: jax.sharding.Mesh) -> bool:
    """Whether a state is that of a step, bit by bit."""
    return all(map(_is_same, jax.tree.leaves(found), jax.tree.leaves(state(step, elements, mesh))))


def _is_same(one: Any, other: Any) -> bool:
    if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes()


def flips(
    folder: Path, count: int, elements: int, seed: int = 0, store: str = "file"
) -> collections.Counter[str]:
    """Single bits flipped in the files of a checkpoint, half of them anywhere, half in a file of
    any size.

    Returns:
        How often a flip was noticed, with the path of a leaf or without, or changed nothing; and
            `MISSED`: how often
        something else was loaded than was saved.
    """
    chance = random.Random(seed)
    mesh = ft.make_mesh(data=8)
    path = place(folder, "checkpoint", store)
    ft.save(path, state(1, elements, mesh), meta={"tokens": 12})
    like = ft.abstract(_state, LAYOUT, mesh)(jnp.int32(0), elements)
    files = [file for file in _files(path) if file.size]
    found: collections.Counter[str] = collections.Counter()
    for i in range(count):
        sizes = [file.size if i % 2 else 1 for file in files]
        file = chance.choices(files, sizes)[0]
        at, bit = chance.randrange(file.size), 1 << chance.randrange(8)
        file.flip(at, bit)
        what = _noticed(path, like, elements, mesh)
        file.flip(at, bit)
        found[f"{what} ({'values' if file.size > elements else 'metadata'})"] += 1
        _progress(f"flip {i + 1} of {count}: {what} in {file.name}")
    assert _noticed(path, like, elements, mesh) == "nothing changed"  # all bits are back
    return found


class _File:
    """A file on a disk."""

    def __init__(self, path: Path):
        self.name, self.size = str(path), path.stat().st_size

    def flip(self, at: int, bit: int) -> None:
        """Flip a bit of a byte."""
        with open(self.name, "r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)[0]
            opened.seek(at)
            opened.write(bytes([byte ^ bit]))


class _Object:
    """An object in the bucket."""

    def __init__(self, name: str):
        self.name, self.size = name, len(gcs_emulator.read(BUCKET, name))

    def flip(self, at: int, bit: int) -> None:
        """Flip a bit of a byte."""
        data = bytearray(gcs_emulator.read(BUCKET, self.name))
        data[at] ^= bit
        gcs_emulator.write(BUCKET, self.name, bytes(data))


def _files(path: str) -> list[_File] | list[_Object]:
    """What a checkpoint is made of."""
    if path.startswith("gs://"):
        prefix = path.removeprefix(f"gs://{BUCKET}/") + "/"
        return [_Object(name) for name in gcs_emulator.names(BUCKET, prefix)]
    return [_File(file) for file in sorted(Path(path).rglob("*")) if file.is_file()]


def _noticed(path: str, like: Any, elements: int, mesh: jax.sharding.Mesh) -> str:
    try:
        meta = ft.inspect(path).meta
        found = ft.restore(path, like)
    except ft.CheckpointError as error:
        return "noticed, by path" if error.problems[0].path is not None else "noticed"
    is_same = meta == {"tokens": 12} and is_state(found, 1, elements, mesh)
    return "nothing changed" if is_same else "MISSED"


def kills(
    folder: Path,
    count: int,
    elements: int,
    processes: int = 1,
    seed: int = 0,
    store: str = "file",
) -> collections.Counter[str]:
    """A training that saves each step, killed at a random moment and started again.

    Returns:
        How many starts there were, the steps that were lost at most, and how often something was
            wrong.
    """
    chance = random.Random(seed)
    mesh = ft.make_mesh(data=8)
    run, log = place(folder, "run", store), folder / "log"
    found: collections.Counter[str] = collections.Counter()
    for i in range(count):
        training = _training(run, log, elements, processes)
        _wait_for_steps(log, training)
        time.sleep(chance.uniform(0, 0.6))
        # One dies, and its supervisor kills the others a moment later.
        chance.shuffle(training)
        for process in training:
            process.send_signal(signal.SIGKILL)
            time.sleep(chance.uniform(0, 0.1))
        ended(training, 10)
        returned = max(map(int, log.read_text().split()), default=-1)
        latest, is_whole = _latest_state(run, elements, mesh)
        lost = returned - (-1 if latest is None else latest)
        found[f"{max(lost, 0)} steps lost"] += 1
        found["whole" if is_whole else "BROKEN"] += 1
        _progress(f"kill {i + 1} of {count}: step {returned} of {processes} processes, {lost} lost")
    save_after_a_day(run, state(0, elements, mesh))
    found["dead folders"] = len(left_over(run))
    return found


def save_after_a_day(run: str, tree: Any) -> None:
    """Save one more step, by clocks of a day later: what was killed is removed."""
    real = time.time
    with (
        mock.patch.object(time, "time", lambda: real() + 26 * 3600),
        ft.Checkpoints(run) as checkpoints,
    ):
        checkpoints.save(10**6, tree)


def place(folder: Path, name: str, store: str) -> str:
    """Where something is saved: in a folder, or in the bucket."""
    return str(folder / name) if store == "file" else f"gs://{BUCKET}/{folder.name}/{name}"


def left_over(run: str) -> set[str]:
    """The folders of a run that are no step, or have values that no manifest names."""
    if run.startswith("gs://"):
        return _left_in_bucket(run)
    found: set[str] = set()
    for one in Path(run).rglob("*"):
        if one.is_dir() and ("tmp" in one.name or _is_dead(one)):
            found.add(str(one))
    return found


def _left_in_bucket(run: str) -> set[str]:
    saved = gcs_emulator.names(BUCKET, run.removeprefix(f"gs://{BUCKET}/") + "/")
    found: set[str] = set()
    for name in saved:
        step, arrays, rest = name.partition("/arrays-")
        values, manifest = f"arrays-{rest[:12]}", f"{step}/functree.json"
        if not arrays:
            continue
        if manifest not in saved or values.encode() not in gcs_emulator.read(BUCKET, manifest):
            found.add(f"{step}/{values}")
    return found


def _is_dead(folder: Path) -> bool:
    """Whether a folder is a step without a manifest, or has values that no manifest names."""
    if folder.name.isdigit():
        # An empty one may be the user's: it stays.
        return any(folder.iterdir()) and not (folder / "functree.json").is_file()
    return (
        folder.name.startswith("arrays-")
        and folder.name not in (folder.parent / "functree.json").read_text()
    )


@contextmanager
def emulated() -> Iterator["subprocess.Popen[bytes]"]:
    """A bucket on this machine, in a process of its own; this one and those that it starts find it."""
    emulator = gcs_emulator.of_port(free_port())
    os.environ |= gcs_emulator.environment(emulator.port)
    try:
        yield emulator.process
    finally:
        emulator.process.kill()
        emulator.process.wait()


def hastened() -> None:
    """Shorten the times after which a bucket cannot be reached."""
    folders.DEADLINE = 4.0
    folders.ASKED_AFTER = 0.5


def _training(
    run: str, log: Path, elements: int, processes: int = 1, **environment: str
) -> Running:
    """Processes that run `train`."""
    log.write_text("")
    arguments = ["-m", "tests.faults", "train", run, str(log), str(elements)]
    return started(arguments, processes, **environment)


def _latest_state(run: str, elements: int, mesh: jax.sharding.Mesh) -> tuple[int | None, bool]:
    """The latest step of a run, and whether it is whole; it is if there is none."""
    latest = ft.Checkpoints(run).latest
    if latest is None:
        return None, True
    like = ft.abstract(_state, LAYOUT, mesh)(jnp.int32(0), elements)
    found = ft.restore(f"{run}/{latest}", like)
    return latest, is_state(found, latest, elements, mesh)


def _wait_for_steps(log: Path, running: Sequence["subprocess.Popen[str]"]) -> None:
    """Wait until a training has saved a step."""
    until = time.monotonic() + 60
    while not log.read_text():
        if time.monotonic() > until or any(process.poll() is not None for process in running):
            raise RuntimeError(f"the training does not run: {ended(running, 1)}")
        time.sleep(0.02)


def train(run: str, log: str, elements: int) -> None:
    """Save each step of a training that goes on from the latest, until it is killed."""
    hastened()
    if os.environ.get("FAULTS_UNREACHED") == os.environ.get("FUNCTREE_PROCESS"):
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = "http://127.0.0.1:9"
    initialized()
    mesh = ft.make_mesh(data=8)
    with ft.Checkpoints(run, keep=2) as checkpoints:
        step = -1
        if checkpoints.latest is not None:
            like = ft.abstract(_state, LAYOUT, mesh)(jnp.int32(0), elements)
            step = int(checkpoints.restore(like)["step"])
        while True:
            step += 1
            checkpoints.save(step, state(step, elements, mesh))
            if jax.process_index() == 0:
                with open(log, "a") as opened:
                    opened.write(f"{step}\n")


def races(folder: Path, count: int, elements: int, store: str = "file") -> collections.Counter[str]:
    """Two processes save to one path at once, and a reader restores the latest of a run that keeps
    only one.

    Returns:
        What became of it: `MIXED` if something was restored that nobody saved, `FOREIGN` for an
            error of another kind.
    """
    mesh = ft.make_mesh(data=8)
    like = ft.abstract(_state, LAYOUT, mesh)(jnp.int32(0), elements)
    found: collections.Counter[str] = collections.Counter()
    for i in range(count):
        path = place(folder, f"race{i}", store)
        writers: Running = []
        for step in ("1", "2"):
            writers += started(["-m", "tests.faults", "write", path, step, str(elements)])
        ends = ended(writers, 60)
        won = [step for step, (_, out, _) in enumerate(ends, 1) if out.strip() == "saved"]
        lost = [out for _, out, _ in ends if out.strip() != "saved"]
        found[f"{len(won)} saved"] += 1
        found["FOREIGN"] += sum("CheckpointFileError" not in out for out in lost)
        found["FOREIGN"] += sum(status != 0 for status, _, _ in ends)
        found["MIXED"] += not is_state(ft.restore(path, like), won[-1], elements, mesh)
        _progress(f"race {i + 1} of {count}: {len(won)} saved")
    run, log = place(folder, "run", store), folder / "log"
    training = _training(run, log, elements)
    _wait_for_steps(log, training)
    reader = ft.Checkpoints(run)
    while reader.latest is None:
        time.sleep(0.02)
    until = time.monotonic() + 2 * count
    while time.monotonic() < until:
        read = reader.restore(like)
        found["read under retention"] += 1
        found["MIXED"] += not is_state(read, int(read["step"]), elements, mesh)
    training[0].kill()
    ended(training, 10)
    return found


def write(path: str, step: str, elements: int) -> None:
    """Save a state when the other writer is ready too, and print what became of it."""
    hastened()
    tree = state(int(step), elements, ft.make_mesh(data=8))
    ft.save(f"{path}.warm{step}", tree)
    until = time.monotonic() + 60
    while not all(_is_saved(f"{path}.warm{one}") for one in (1, 2)):
        if time.monotonic() > until:
            raise RuntimeError("the other writer did not come")
        time.sleep(0.001)
    try:
        ft.save(path, tree)
        print("saved")
    except ft.FunctreeError as error:
        print(type(error).__name__, error)


def _is_saved(path: str) -> bool:
    try:
        ft.inspect(path)
    except ft.CheckpointError:
        return False
    return True


# What `docs/checkpoints.md` says to set, with other numbers.
GIVING_UP = {
    "FSSPEC_GCS": '{"requests_timeout": 4}',
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "4",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}


def outages(
    folder: Path, count: int, elements: int, emulator: "subprocess.Popen[bytes]"
) -> collections.Counter[str]:
    """The bucket does not answer any more while two processes save each step, or one of them has
    never reached it.

    Returns:
        How many processes have told the error, and how many of these still waited at their end:
        Python waits for the threads of orbax, which try on.
    """
    found: collections.Counter[str] = collections.Counter()
    mesh = ft.make_mesh(data=8)
    log = folder / "log"
    for i in range(count):
        run = place(folder, f"run{i}", "gs")
        unreached = {"FAULTS_UNREACHED": "1"} if i % 2 else {}
        training = _training(run, log, elements, 2, **unreached, **GIVING_UP)
        if i % 2 == 0:
            _wait_for_steps(log, training)
            while ft.Checkpoints(run).latest is None:
                time.sleep(0.05)
            emulator.send_signal(signal.SIGSTOP)
        ends = ended(training, 40)
        emulator.send_signal(signal.SIGCONT)
        for status, _, text in ends:
            found["told" if "the bucket has not answered" in text else "NOT TOLD"] += 1
            found["waited at the end"] += status == -signal.SIGKILL
        latest, is_whole = _latest_state(run, elements, mesh)
        if latest is not None:
            found["whole" if is_whole else "BROKEN"] += 1
        save_after_a_day(run, state(0, elements, mesh))
        found["dead folders"] += len(left_over(run))
        _progress(f"outage {i + 1} of {count}: {found}")
    return found


def _progress(text: str) -> None:
    if sys.stderr.isatty() or __name__ == "__main__":
        print(text, file=sys.stderr)


def _done(folder: Path, elements: int, given: argparse.Namespace) -> collections.Counter[str]:
    """What was found of what the command line says."""
    with ExitStack() as around:
        emulator: Any = None
        if given.store == "gs":
            hastened()
            emulator = around.enter_context(emulated())
        what = {
            "flips": lambda: flips(folder, given.count, elements, given.seed, given.store),
            "kills": lambda: kills(
                folder, given.count, elements, given.processes, given.seed, given.store
            ),
            "races": lambda: races(folder, given.count, elements, given.store),
            "outages": lambda: outages(folder, given.count, elements, emulator),
        }
        return what[given.what]()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["flips", "kills", "races", "outages", "train", "write"])
    parser.add_argument("rest", nargs="*", help="of the processes that this one starts")
    parser.add_argument("--count", type=int, default=50, help="how often")
    parser.add_argument("--megabytes", type=float, default=4, help="the size of the state")
    parser.add_argument("--processes", type=int, default=1, help="of the training that is killed")
    parser.add_argument("--store", choices=["file", "gs"], default="file", help="what is saved to")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.what in ("train", "write"):
        {"train": train, "write": write}[given.what](*given.rest[:-1], int(given.rest[-1]))  # type: ignore[operator]
        return
    elements = int(given.megabytes * 2**20 / 6) * 2
    folder = Path(tempfile.mkdtemp(prefix="functree-faults-"))
    try:
        found = _done(folder, elements, given)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for what, times in sorted(found.items()):
        print(f"{what}: {times}")
    if any(times for what, times in found.items() if what.isupper() and times):
        sys.exit(1)


if __name__ == "__main__":
    main()
