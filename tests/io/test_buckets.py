"""Checkpoints in a bucket: as in a folder, in an emulator of Google Cloud Storage on the loopback
interface (`tests/lib/gcs_emulator.py`); kills and races of whole processes are in
`python -m tests.faults ... --store gs`."""

import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from functree.io.checkpoints import folder as folders
from functree.io.checkpoints import write
from functree.io.checkpoints.folder import BucketFolder, Draft, Folder, folder_at, read_manifest
from functree.io.checkpoints.manifest import Manifest
from tests.lib.checks import raises
from tests.lib.gcs_emulator import Emulator
from tests.lib.launch import free_port
from tests.lib.meshes import lay

BUCKET = "gs://bucket"
NAME = "arrays-0123456789ab"


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    with Emulator().running() as emulator, pytest.MonkeyPatch.context() as patch:
        for name, value in emulator.environment.items():
            patch.setenv(name, value)
        yield emulator
    gc.collect()


@pytest.fixture
def run(emulator: Emulator, request: pytest.FixtureRequest) -> str:
    """An address with nothing below it."""
    return f"{BUCKET}/{re.sub(r'[^a-z0-9]', '-', request.node.name.lower())}"


@contextmanager
def later(hours: float) -> Iterator[None]:
    """So many hours later."""
    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + 3600 * hours)
        yield


def tree(step: int = 0) -> Any:
    return {
        "w": lay(jnp.full((8, 4), step, jnp.float32), "data"),
        "b": jnp.arange(3),
        "n": np.arange(4),
        "none": np.zeros((0, 3)),
    }


def value(found: Any) -> float:
    return float(found["w"][0, 0])


def below(emulator: Emulator, address: str) -> list[str]:
    """What is below an address; of the values, their folder alone."""
    prefix = address.removeprefix(f"{BUCKET}/") + "/"
    found: dict[str, None] = {}
    for name in emulator.objects.names("bucket"):
        if name.startswith(prefix):
            found[re.sub(r"(arrays-\w{12})/.*", r"\1/", name.removeprefix(prefix))] = None
    return list(found)


def put(emulator: Emulator, address: str, text: str = "mine") -> None:
    """An object of the user's."""
    name = address.removeprefix(f"{BUCKET}/")
    assert emulator.objects.put("bucket", name, text.encode(), {}).status == 200


# As in a folder


def test_a_checkpoint_in_a_bucket(run: str, emulator: Emulator) -> None:
    path = f"{run}/first"
    ft.save(path, tree(3), meta={"tokens": 4096})
    back = ft.restore(path, tree())
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(tree(3))))
    assert back["w"].sharding.spec == ft.P("data", None) and type(back["n"]) is np.ndarray
    part = ft.restore(path, tree(7), only="b")
    assert value(part) == 7 and part["b"].tolist() == [0, 1, 2]
    found = ft.inspect(path)
    assert found.meta == {"tokens": 4096} and found["w"].spec == ft.P("data", None)
    assert f"{path}: 4 arrays" in str(found)

    with raises(f"{path} is already a checkpoint: save to another path, or pass", *()):
        ft.save(path, tree())
    ft.save(path, tree(5), overwrite=True)
    assert value(ft.restore(path, tree())) == 5
    assert str(found.diff(ft.inspect(path))).startswith("w: digest")
    # The values of the one that was replaced are gone.
    names = below(emulator, path)
    assert len(names) == 2 and names[1] == "functree.json", names
    # An object can have the name of a folder.
    ft.save(f"{path}/functree.json", {"n": np.arange(2)})
    assert len(ft.inspect(f"{path}/functree.json")) == 1


def test_the_checkpoints_of_a_run(run: str, emulator: Emulator) -> None:
    with ft.Checkpoints(run, keep=2) as checkpoints:
        assert checkpoints.steps == ()
        for step in (0, 20, 21):
            checkpoints.save(step, tree(step))
        assert value(checkpoints.restore(tree())) == 21
    assert checkpoints.steps == (20, 21)
    assert {name.partition("/")[0] for name in below(emulator, run)} == {"20", "21"}
    assert value(ft.Checkpoints(run).restore(tree(), 20)) == 20
    with raises(f"{run} is not a checkpoint: it contains the checkpoints of a run", f"{run}/21"):
        ft.restore(run, tree())
    with raises(f"{run}/none is not a checkpoint: it does not exist"):
        ft.inspect(f"{run}/none")


def test_nothing_else_is_ever_removed(run: str, emulator: Emulator) -> None:
    mine = [f"{run}/7/{name}" for name in ("arrays-train.npy", f"{NAME}c/part.npy")]
    for name in mine:
        put(emulator, name)
    small = {"n": np.arange(2)}
    with raises(f"{run}/7 is not a checkpoint, but contains `arrays-"):
        ft.save(f"{run}/7", small, overwrite=True)
    for name in mine:
        emulator.objects.delete("bucket", name.removeprefix(f"{BUCKET}/"), {})
    ft.save(f"{run}/7", small)
    for name in mine:
        put(emulator, name)
    ft.save(f"{run}/7", small, overwrite=True)
    with ft.Checkpoints(run, keep=1) as checkpoints:
        checkpoints.save(8, small)
    assert checkpoints.steps == (8,)
    kept = [name.removeprefix(f"{BUCKET}/") for name in mine]
    assert [one for one in emulator.objects.names("bucket") if f"{run[12:]}/7/" in one] == sorted(
        kept
    )


# The laws of a folder on a disk and in a bucket


def folder_of(kind: str, run: str, path: Path) -> Folder:
    return folder_at(path / "c" if kind == "folder" else run)


def manifest(name: str | None = None) -> Manifest:
    return Manifest((), name, None, {}, {}, None)


def begun(folder: Folder, overwrite: bool = False) -> Draft:
    """A process has written some of its values."""
    draft = Draft(folder, overwrite)
    folder.write(f"{draft.name}/part", b"1")
    return draft


KINDS = ("folder", "bucket")


@pytest.mark.parametrize("kind", KINDS)
def test_laws_of_a_folder(kind: str, run: str, tmp_path: Path) -> None:
    folder = folder_of(kind, run, tmp_path)
    nothing = folder.read()
    assert folder.names() == [] and nothing.data is None
    folder.make()
    # One is first, and the other one sees it; it is replaced whole.
    assert folder.commit("one", nothing.generation)
    assert not folder.commit("two", nothing.generation)
    first = folder.read()
    assert first.data == b"one" and folder.names() == ["functree.json"]
    assert folder.commit("three", first.generation) and folder.read().data == b"three"
    assert not folder.commit("four", first.generation)
    # The answer to a first attempt may have been lost: then the manifest is its own.
    assert folder.commit("three", first.generation)
    # Of one that was removed the generation does not come again.
    folder.write("functree.json", None)
    assert folder.read() == nothing and not folder.commit("five", first.generation)
    assert folder.commit("six", nothing.generation)
    # Other files, and their ages.
    folder.write("a", b"")
    folder.write("b/c", b"1")
    assert sorted(folder.names()) == ["a", "b", "functree.json"]
    with later(2):
        assert [round(folder.age(name) / 3600) for name in ("a", "b")] == [2, 2]
    assert folder.age("none") == 0
    for name in ("a", "b", "none"):
        folder.remove(name)
    assert folder.names() == ["functree.json"]
    # A folder of this one.
    inside = folder.at("5")
    assert inside.path == folder.path / "5" and folder.with_manifest(["5", "6"]) == []
    assert inside.commit("inside", inside.read().generation)
    assert folder.with_manifest(["5", "6"]) == ["5"] and "5" in folder.names()
    # Its name is how another one begins.
    folder.write("55/a", b"")
    folder.remove("5")
    assert sorted(folder.names()) == ["55", "functree.json"]
    assert "5" not in folder.names() and folder.read().data == b"six"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_of_two_writers_one_wins(kind: str, overwrite: bool, run: str, tmp_path: Path) -> None:
    """The other one is told, and removes nothing but what it has written."""
    folder = folder_of(kind, run, tmp_path)
    if overwrite:
        ft.save(run if kind == "bucket" else folder.path, {"n": np.arange(2)})
    first, second = begun(folder, overwrite), begun(folder, overwrite)
    first.commit(manifest(first.name))
    with raises("another process was the first to save a checkpoint to "):
        second.commit(manifest(second.name))
    second.discard()
    first.discard()
    assert sorted(folder.names()) == [first.name, "functree.json"]
    assert read_manifest(folder).arrays == first.name


@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_that_was_asleep_for_a_day(kind: str, run: str, tmp_path: Path) -> None:
    """What it wrote may be gone: it does not commit, and what was there before stays."""
    folder = folder_of(kind, run, tmp_path)
    ft.save(run if kind == "bucket" else folder.path, {"n": np.arange(2)})
    before = read_manifest(folder), sorted(folder.names())
    draft = begun(folder, True)
    with later(24.5), raises("began more than 24 hours ago", "save again"):
        draft.commit(manifest(draft.name))
    draft.discard()
    assert (read_manifest(folder), sorted(folder.names())) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_whose_answer_is_lost(
    kind: str, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest may be there, so what it names stays."""
    folder = folder_of(kind, run, tmp_path)
    real = type(folder).commit

    def silent(*given: Any) -> bool:
        real(*given)
        raise OSError("no answer")

    path = run if kind == "bucket" else folder.path
    with monkeypatch.context() as patch, raises(f"{path} cannot be written: no answer"):
        patch.setattr(type(folder), "commit", silent)
        ft.save(path, {"n": np.arange(3)})
    assert ft.restore(path, {"n": np.zeros(3, int)})["n"].tolist() == [0, 1, 2]


# What cannot be reached


NO_FOLDER = [
    "is not the address of a folder in a bucket: pass an address such as gs://bucket/run/1"
]
ADDRESSES = {
    "s3://bucket/run": [
        "s3://bucket/run cannot be used",
        "orbax",
        "can access only `gs://` buckets",
    ],
    "GS://bucket/run": ["GS://bucket/run cannot be used"],
    "gs:/bucket/run": [
        "gs:/bucket/run lacks a slash",
        "pass the bucket's address as a string",
    ],
    "gs://b/run": ["gs://b/run cannot be opened", "Invalid GCS bucket name"],
    "gs://": NO_FOLDER,
    "gs://bucket//run": NO_FOLDER,
    "gs://bucket/run*": NO_FOLDER,
    "gs://bucket/a[1]/b": NO_FOLDER,
    "gs://bucket/../b": NO_FOLDER,
    "gs://bucket/a\nb": [r"'gs://bucket/a\nb' is not the address of a folder in a bucket"],
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_that_are_refused(
    address: str, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each door, before anything is written."""
    monkeypatch.chdir(tmp_path)
    before = emulator.objects.names("bucket")
    doors: list[Callable[[], Any]] = [
        lambda: ft.save(address, {"n": np.arange(2)}),
        lambda: ft.inspect(address),
        lambda: ft.Checkpoints(address),
    ]
    for door in doors:
        with raises(*ADDRESSES[address], error=ft.CheckpointError):
            door()
    assert os.listdir(tmp_path) == [] and emulator.objects.names("bucket") == before


@pytest.mark.parametrize("name", ["x y&b=c", "x%20y+é", "a:b", "..x"])
def test_addresses_that_are_not(name: str, run: str, emulator: Emulator) -> None:
    ft.save(f"{run}/{name}/c/", {"n": np.arange(2)})
    ft.save(f"{run}/{name}/c", {"n": np.arange(3)}, overwrite=True)
    assert ft.restore(f"{run}/{name}/c", {"n": np.zeros(3, int)})["n"].tolist() == [0, 1, 2]
    assert name in folder_at(run).names()


def test_paths_that_are_no_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("run:1", "exp:/b", "x/s3://b", "C/gs"):
        ft.save(path, {"n": np.arange(2)})
        assert len(ft.inspect(path)) == 1


@pytest.mark.parametrize("package", ["gcsfs", "tensorstore"])
def test_without_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == package else real(name))
    with raises(f"`{package}` is not installed: run `pip install 'functree[gcs]'`"):
        ft.inspect("gs://bucket/run")


def test_a_bucket_that_does_not_answer(
    run: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after the deadline, at each door."""
    ft.save(run, tree(1))
    monkeypatch.setattr(folders, "DEADLINE", 0.3)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{free_port()}")
    doors: list[Callable[[], Any]] = [
        lambda: ft.save(run, tree(2)),
        lambda: ft.restore(run, tree()),
        lambda: ft.inspect(run),
    ]
    for door in doors:
        start = time.monotonic()
        with raises("the bucket has not answered for 0.3 seconds", error=ft.CheckpointError):
            door()
        assert time.monotonic() - start < 5
    monkeypatch.undo()
    assert value(ft.restore(run, tree())) == 1


def test_a_bucket_that_answers_no_more(
    run: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax would try for many minutes: an error while it waits, and no step that is half there."""

    class Waiting:
        def result(self, timeout: float | None = None) -> None:
            time.sleep(timeout or 0)
            raise TimeoutError

    def refuse(*_: object) -> None:
        raise OSError("the bucket has not answered for 60 seconds")

    with ft.Checkpoints(run) as checkpoints:
        checkpoints.save(1, tree(1))
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(write, "start_saving", lambda *_: Waiting())
            patch.setattr(folders, "ASKED_AFTER", 0.0)
            checkpoints.save(2, tree(2))
            patch.setattr(BucketFolder, "read", refuse)
            patch.setattr(BucketFolder, "names", refuse)
            text = f"{run}/2 cannot be written: the bucket has not answered for 60 seconds"
            with raises(text):
                checkpoints.wait()
        assert checkpoints.steps == (1,)
        checkpoints.save(2, tree(2))
    assert checkpoints.steps == (1, 2)


def test_a_bucket_that_refuses(
    run: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be read, and not written."""
    ft.save(run, tree(1))
    monkeypatch.setattr(emulator, "read_only", True)
    with raises(f"{run} cannot be written: Forbidden", error=ft.CheckpointError):
        ft.save(run, tree(2), overwrite=True)
    assert value(ft.restore(run, tree())) == 1
