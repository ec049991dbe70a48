"""The folder of a checkpoint: what is functree's in it, and what is never removed."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import functree as ft
from functree.io.checkpoints import write
from tests.lib.checks import raises

TREE = {"w": np.arange(3.0)}
NAME = "arrays-0123456789ab"


def file(path: Path, text: str = "mine") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def aged(path: Path, hours: float = 26) -> None:
    """Something was written so long ago."""
    then = time.time() - 3600 * hours
    os.utime(path, (then, then), follow_symlinks=False)


# What a user may have beside the values, and is not functree's: by its name.
FOREIGN = [
    "arrays-train.npy",
    "arrays-train/part.npy",
    ".arrays",
    f"{NAME}c",
    NAME.upper(),
    f"{NAME}.npy",
    f"{NAME}.json.bak",
    f"{NAME}.begun-mine",
    f"{NAME}.orbax-checkpoint-tmp-mine/part.npy",
    "functree.json.bak",
]


def existing(path: Path) -> dict[str, str]:
    """The files below a folder, apart from those of functree, with their text."""
    found: dict[str, str] = {}
    for one in sorted(path.rglob("*")):
        if one.is_file() and "mine" == one.read_bytes()[:5].decode(errors="replace"):
            found[str(one.relative_to(path))] = one.read_text()
    return found


def replace(path: Path) -> None:
    ft.save(path, TREE, overwrite=True)


def retain(path: Path) -> None:
    """The step that a folder is goes, since a newer one is saved."""
    with ft.Checkpoints(path.parent, keep=1) as checkpoints:
        checkpoints.save(8, TREE)
    assert not (path / "functree.json").exists()


def sweep(path: Path) -> None:
    """What a killed process has left goes after a day."""
    (path / "functree.json").unlink()
    for one in path.iterdir():
        aged(one)
    with ft.Checkpoints(path.parent) as checkpoints:
        checkpoints.save(8, TREE)


def fail(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ft.CheckpointError):
        patch.setattr(write, "start_saving", lambda *_: 1 / 0)
        ft.save(path, TREE, overwrite=True)


REMOVE: dict[str, Callable[[Path], None]] = {
    "replaced": replace,
    "an old step": retain,
    "what a process left": sweep,
    "a failed save": fail,
}


@pytest.mark.parametrize("how", REMOVE)
@pytest.mark.parametrize("what", FOREIGN)
def test_what_stays_beside_a_checkpoint(what: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / "7"
    ft.save(path, TREE)
    file(path / what)
    values = next(one.name for one in path.glob("arrays-*") if (one / "state").is_dir())
    REMOVE[how](path)
    assert existing(path) == {what: "mine"}
    # And what is functree's is gone, if no manifest names it.
    assert (path / values).exists() == (how == "a failed save")


@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_in_the_way_of_a_checkpoint(what: str, tmp_path: Path) -> None:
    file(tmp_path / "7" / what)
    refused = raises("is not a checkpoint, but contains `", "`: save to another path")
    for overwrite in (False, True):
        with refused:
            ft.save(tmp_path / "7", TREE, overwrite=overwrite)
    with refused, ft.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, TREE)
    assert existing(tmp_path / "7") == {what: "mine"}
    # The remedy, literally.
    ft.save(tmp_path / "elsewhere than that", TREE)


MANIFESTS: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "a file of the user's": (lambda path: path.write_text('{"functree": "my notes"}'), True),
    "JSON of a plan": (lambda path: path.write_text('{\n "functree": "plan"}'), True),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), True),
    "a damaged manifest": (lambda path: path.write_text(path.read_text()[:-9]), False),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_of_another_is_not_replaced(what: str, tmp_path: Path) -> None:
    change, is_foreign = MANIFESTS[what]
    path = tmp_path / "7"
    ft.save(path, TREE)
    change(path / "functree.json")
    if not is_foreign:
        ft.save(path, TREE, overwrite=True)
        # It does not say which values are its own: they go after a day.
        assert len(list(path.glob("arrays-*"))) == 2 and ft.inspect(path).rows
        return
    why = "cannot be read: it is not a" if what == "a folder" else "was not written by functree"
    with raises(f"functree.json {why}"):
        ft.save(path, TREE, overwrite=True)
    if what != "a folder":  # which is no step
        with (
            pytest.warns(
                ft.FunctreeWarning, match="7 was not removed, since `ft.Checkpoints` did not"
            ),
            ft.Checkpoints(tmp_path, keep=1) as checkpoints,
        ):
            checkpoints.save(8, TREE)
    assert (path / "functree.json").exists()


def test_a_link_to_the_checkpoint_of_another_run_is_not_followed(tmp_path: Path) -> None:
    ft.save(tmp_path / "other", TREE)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "0").symlink_to(tmp_path / "other")
    with (
        pytest.warns(ft.FunctreeWarning, match="0 was not removed, since `ft.Checkpoints` did not"),
        ft.Checkpoints(tmp_path / "run", keep=1) as checkpoints,
    ):
        checkpoints.save(1, TREE)
    assert ft.inspect(tmp_path / "other").rows and checkpoints.steps == (0, 1)


def test_values_on_another_disk_are_not_followed(tmp_path: Path) -> None:
    ft.save(tmp_path / "c", TREE)
    values = next((tmp_path / "c").glob("arrays-*"))
    shutil.move(values, tmp_path / "moved")
    values.symlink_to(tmp_path / "moved")
    ft.save(tmp_path / "c", TREE, overwrite=True)
    assert not values.is_symlink() and (tmp_path / "moved" / "state").is_dir()


def test_an_empty_folder_of_the_user_stays(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "run" / "2024").mkdir(parents=True)
    fail(tmp_path / "c")
    fail(tmp_path / "made" / "here")
    with ft.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, TREE)
    assert (tmp_path / "c").is_dir() and (tmp_path / "run" / "2024").is_dir()
    assert not (tmp_path / "made" / "here").exists()


def test_names_that_are_no_steps(tmp_path: Path) -> None:
    """A folder called `007` would be one step with `7`, and be counted twice."""
    others = ("007", "8.5", "mine", "³")
    for name in ("7", *others):
        ft.save(tmp_path / name, TREE)
    with ft.Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps == (7,)
        checkpoints.save(8, TREE)
    assert checkpoints.steps == (7, 8)
    assert all(ft.inspect(tmp_path / name).rows for name in others)


# What writers leave


LEFT: dict[str, Callable[[Path], Any]] = {
    "values": lambda path: (path / NAME / "state").mkdir(parents=True),
    "unfinished values": lambda path: (path / f"{NAME}.orbax-checkpoint-tmp").mkdir(parents=True),
    "the word of a process that began": lambda path: file(path / f"{NAME}.begun", ""),
    "the word of a process that failed": lambda path: file(path / f"{NAME}.failed", ""),
    "half a manifest": lambda path: file(path / "functree.json.__lock", "{"),
    "a link": lambda path: (path.mkdir(), (path / NAME).symlink_to(path.parent)),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_writers_left_is_no_checkpoint_and_goes_after_a_day(what: str, tmp_path: Path) -> None:
    path = tmp_path / "7"
    LEFT[what](path)
    (left,) = path.iterdir()
    with raises("is not a checkpoint: it contains no functree.json"):
        ft.inspect(path)
    with ft.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(8, TREE)
        aged(left, 24)
        checkpoints.save(9, TREE)
        checkpoints.wait()
        assert checkpoints.steps == (8, 9) and os.path.lexists(left)
        aged(left)
        checkpoints.save(10, TREE)
    assert not path.exists() and checkpoints.steps == (8, 9, 10)
    # It is in the way of none, and the next that saves there removes it.
    LEFT[what](path)
    ft.save(path, TREE)
    assert os.path.lexists(left) == (what != "half a manifest")
    if os.path.lexists(left):
        aged(left)
    ft.save(path, TREE, overwrite=True)
    assert not os.path.lexists(left) and len(list(path.iterdir())) == 2


def test_what_a_manifest_names_stays_however_old(tmp_path: Path) -> None:
    ft.save(tmp_path / "7", TREE)
    for one in (tmp_path / "7").iterdir():
        aged(one, 1000)
    with ft.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(8, TREE)
        assert np.array_equal(checkpoints.restore(TREE, 7)["w"], TREE["w"])
    # A manifest that cannot be read may name them.
    manifest = tmp_path / "7" / "functree.json"
    text = manifest.read_text()
    manifest.write_text(text[:-9])
    with ft.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(9, TREE)
    manifest.write_text(text)
    assert np.array_equal(checkpoints.restore(TREE, 7)["w"], TREE["w"])
