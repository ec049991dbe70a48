"""Paths at which nothing can be read or written: the errors of the operating system become those of
the function, and nothing is left behind."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import functree as ft
from tests.lib.checks import raises
from tests.lib.meshes import MESH

TREE = {"w": np.ones(3)}


@pytest.fixture(scope="module")
def model() -> ft.nn.Transformer:
    sizes: Any = dict(layers=1, heads=2, kv_heads=1, head_dim=4, hidden=8)
    config = ft.nn.TransformerConfig(16, 8, **sizes)
    return ft.nn.Transformer.create(config, key=jax.random.key(0))


# The doors


def save_step(path: Any) -> None:
    with ft.Checkpoints(path) as checkpoints:
        checkpoints.save(1, TREE)


# What takes a path, and the error that it documents.
DOORS: dict[str, tuple[Callable[[Any, ft.nn.Transformer], Any], type[Exception]]] = {
    "save": (lambda path, _: ft.save(path, TREE), ft.CheckpointError),
    "save over": (lambda path, _: ft.save(path, TREE, overwrite=True), ft.CheckpointError),
    "save a step": (lambda path, _: save_step(path), ft.CheckpointError),
    "restore": (lambda path, _: ft.restore(path, TREE), ft.CheckpointError),
    "restore the latest": (lambda path, _: ft.Checkpoints(path).restore(TREE), ft.CheckpointError),
    "restore a step": (lambda path, _: ft.Checkpoints(path).restore(TREE, 1), ft.CheckpointError),
    "inspect": (lambda path, _: ft.inspect(path), ft.CheckpointError),
    "save weights": (lambda path, model: ft.save_weights(path, model), ft.FunctreeError),
    "load weights": (lambda path, _: ft.load_weights(path, ft.P(), MESH), ft.FunctreeError),
    "load tensors": (
        lambda path, _: ft.load_tensors(path, TREE, {"*": "*"}, ft.P(), MESH),
        ft.FunctreeError,
    ),
    "read a config": (lambda path, _: ft.nn.config_from_json(path), ft.FunctreeError),
}


# The paths: each is made in an empty folder.


class OfBytes(os.PathLike[bytes]):
    """A path that has no text."""

    def __fspath__(self) -> bytes:
        return b"c"


def a_file(folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file"


def a_link(folder: Path, to: str) -> Path:
    (folder / "link").symlink_to(folder / to)
    return folder / "link"


PATHS: dict[str, Callable[[Path], Any]] = {
    "a file": a_file,
    "below a file": lambda folder: a_file(folder) / "c",
    "a link that leads nowhere": lambda folder: a_link(folder, "nowhere"),
    "a link to itself": lambda folder: a_link(folder, "link"),
    "a link to a file": lambda folder: a_link(folder, a_file(folder).name),
    "a long name": lambda folder: folder / ("a" * 300),
    "a long path": lambda folder: folder.joinpath(*["a" * 200] * 30),
    "where nothing is written": lambda folder: Path("/proc/functree"),
    "a device": lambda folder: Path("/dev/null"),
}
NONSENSE: dict[str, Callable[[Path], Any]] = {
    "a null character": lambda folder: f"{folder}/a\0b",
    "half a character": lambda folder: f"{folder}/\ud800",
    "bytes": lambda folder: OfBytes(),
    "empty": lambda folder: "",
}


def listed(folder: Path) -> list[str]:
    return sorted(str(one) for one in folder.rglob("*"))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", PATHS)
def test_paths(what: str, door: str, tmp_path: Path, model: ft.nn.Transformer) -> None:
    path, (run, kind) = PATHS[what](tmp_path), DOORS[door]
    before = listed(tmp_path)
    with pytest.raises(kind) as caught:
        run(path, model)
    assert str(path) in str(caught.value) and listed(tmp_path) == before
    if kind is ft.CheckpointError:
        assert isinstance(caught.value, OSError)


ADDRESSES = ["gs://bucket/model", Path("gs://bucket/model"), "https://host/model", "file:///model"]
# Those that take no address of a bucket.
LOCAL = ["save weights", "load weights", "load tensors", "read a config"]


@pytest.mark.parametrize("door", LOCAL)
@pytest.mark.parametrize("address", ADDRESSES, ids=repr)
def test_an_address_is_no_folder_of_such_a_name(
    address: Any,
    door: str,
    tmp_path: Path,
    model: ft.nn.Transformer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(
        "not a URL: to copy files to or from a bucket, use the bucket's own tools", error=ValueError
    ):
        DOORS[door][0](address, model)
    assert not listed(tmp_path)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense(what: str, door: str, tmp_path: Path, model: ft.nn.Transformer) -> None:
    run, _ = DOORS[door]
    with raises("it must be the path of a"):
        run(NONSENSE[what](tmp_path), model)


@contextmanager
def nobody() -> Iterator[None]:
    """As a user whose rights are looked at: those of root are not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("door", DOORS)
def test_without_rights(door: str, tmp_path: Path, model: ft.nn.Transformer) -> None:
    run, kind = DOORS[door]
    folder = tmp_path / "c"
    ft.save(folder, TREE)
    ft.save_weights(folder, model)
    mode = stat.S_IMODE(folder.stat().st_mode)
    folder.chmod(0)
    try:
        with nobody(), raises("Permission denied", error=kind):
            run(folder, model)
        with nobody(), raises("Permission denied", error=ft.CheckpointError):
            ft.Checkpoints(folder).steps  # noqa: B018
    finally:
        folder.chmod(mode)


def test_a_user_that_there_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in (lambda path: ft.save(path, TREE), ft.inspect, ft.Checkpoints):
        with raises("~nobody at all/c cannot be found", error=ft.CheckpointError):
            run("~nobody at all/c")
    assert not listed(tmp_path)
