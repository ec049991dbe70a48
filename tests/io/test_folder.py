"""The folder of a checkpoint: what is functree's in it, and what is never removed."""

import shutil
import subprocess
import sys
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


def linked(path: Path) -> None:
    """The name of a lock that is a link to what the user has."""
    file(path.parent.parent / "elsewhere", "")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(path.parent.parent / "elsewhere")


# What a user may have beside the values, and is not functree's: by its name, or without the mark.
FOREIGN: dict[str, Callable[[Path], Any]] = {
    "a file of arrays": lambda path: file(path / "arrays-train.npy"),
    "a folder of arrays": lambda path: file(path / "arrays-train" / "part.npy"),
    "a hidden file": lambda path: file(path / ".arrays"),
    "the whole name, and no mark": lambda path: file(path / NAME / "part.npy"),
    "a mark that has text": lambda path: (
        file(path / NAME / "part.npy"),
        file(path / f"{NAME}.lock"),
    ),
    "a mark that is a link": lambda path: (
        file(path / NAME / "part.npy"),
        linked(path / f"{NAME}.lock"),
    ),
    "a mark that is a folder": lambda path: file(path / f"{NAME}.lock" / "part.npy"),
    "a name that is too long": lambda path: (
        file(path / f"{NAME}c"),
        file(path / f"{NAME}c.lock", ""),
    ),
    "capitals": lambda path: (file(path / NAME.upper()), file(path / f"{NAME.upper()}.lock", "")),
    "another ending, with a mark": lambda path: (
        file(path / f"{NAME}.npy"),
        file(path / f"{NAME}.lock", ""),
    ),
    "a longer ending, with a mark": lambda path: (
        file(path / f"{NAME}.json.bak"),
        file(path / f"{NAME}.lock", ""),
    ),
    "a copy of a lock": lambda path: (
        file(path / f"{NAME}.locked"),
        file(path / f"{NAME}.orbax-checkpoint-tmp-mine" / "part.npy"),
        file(path / f"{NAME}.lock", ""),
    ),
}


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
    """What a killed process has left goes, and then the checkpoint."""
    (path / "functree.json").unlink()
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
    FOREIGN[what](path)
    mine = existing(path)
    assert mine
    values = next(one.name for one in path.glob("arrays-*") if (one / "state").is_dir())
    REMOVE[how](path)
    assert existing(path) == mine
    # And what is functree's is gone, if no manifest names it.
    assert (path / values).exists() == (how == "a failed save")


@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_in_the_way_of_a_checkpoint(what: str, tmp_path: Path) -> None:
    path = tmp_path / "7"
    FOREIGN[what](path)
    mine = existing(path)
    refused = raises("is a folder that is not a checkpoint: it has `", "save elsewhere")
    for overwrite in (False, True):
        with refused:
            ft.save(path, TREE, overwrite=overwrite)
    with refused, ft.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, TREE)
    assert existing(path) == mine
    # The remedy, literally.
    ft.save(tmp_path / "elsewhere than that", TREE)


MANIFESTS: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "a file of the user's": (lambda path: path.write_text('{"functree": "my notes"}'), True),
    "JSON of a plan": (lambda path: path.write_text('{\n "functree": "plan"}'), True),
    "an empty file": (lambda path: path.write_text(""), True),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), True),
    "a damaged manifest": (lambda path: path.write_text(path.read_text()[:-9]), False),
    "a manifest on one line": (
        lambda path: path.write_text(path.read_text().replace("\n", "")),
        False,
    ),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_of_another_is_not_replaced(what: str, tmp_path: Path) -> None:
    change, is_foreign = MANIFESTS[what]
    path = tmp_path / "7"
    ft.save(path, TREE)
    change(path / "functree.json")
    if not is_foreign:
        ft.save(path, TREE, overwrite=True)
        assert len(list(path.glob("arrays-*"))) == 2 and ft.inspect(path).rows
        return
    with raises("functree.json was not written by functree, and is not overwritten"):
        ft.save(path, TREE, overwrite=True)
    if what != "a folder":  # which is no step
        with (
            pytest.warns(ft.FunctreeWarning, match="7 is not removed, since it is not of these"),
            ft.Checkpoints(tmp_path, keep=1) as checkpoints,
        ):
            checkpoints.save(8, TREE)
    assert (path / "functree.json").exists()


def test_a_link_to_the_checkpoint_of_another_run_is_not_followed(tmp_path: Path) -> None:
    ft.save(tmp_path / "other", TREE)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "0").symlink_to(tmp_path / "other")
    with (
        pytest.warns(ft.FunctreeWarning, match="0 is not removed, since it is not of these"),
        ft.Checkpoints(tmp_path / "run", keep=1) as checkpoints,
    ):
        checkpoints.save(1, TREE)
    assert ft.inspect(tmp_path / "other").rows and checkpoints.steps == (0, 1)


def test_values_on_another_disk_are_not_followed(tmp_path: Path) -> None:
    ft.save(tmp_path / "c", TREE)
    values = next((tmp_path / "c").glob("arrays-*[!k]"))
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


GIVEN_UP = """
import sys
from pathlib import Path
import numpy as np
import functree as ft
from functree.io.checkpoints import write

def fail(*_):
    raise OSError("no room")

path, seen = Path(sys.argv[1]), set()
write.is_done = lambda response: seen.update(one.name for one in path.glob("*.lock")) or fail()
if sys.argv[2] == "old":
    path.mkdir()
try:
    ft.save(path, {"w": np.arange(3.0)})
except ft.CheckpointError:
    print("given up")
# A thread of orbax may have done so by now, or do so later.
values = seen.pop().partition(".")[0]
(path / f"{values}.orbax-checkpoint-tmp" / "state").mkdir(parents=True, exist_ok=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["old", "new"])
def test_what_orbax_writes_after_it_was_given_up(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    command = [sys.executable, "-c", GIVEN_UP, str(path), folder]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out == "given up\n"
    assert path.exists() == (folder == "old")
    assert not path.exists() or not list(path.iterdir())


def test_a_checkpoint_without_a_mark_is_replaced_and_removed(tmp_path: Path) -> None:
    """Checkpoints of the first versions have none."""
    for name in ("1", "2"):
        ft.save(tmp_path / name, TREE)
        next((tmp_path / name).glob("*.lock")).unlink()
    ft.save(tmp_path / "2", TREE, overwrite=True)
    assert len(list((tmp_path / "2").iterdir())) == 3
    next((tmp_path / "2").glob("*.lock")).unlink()
    with ft.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, TREE)
    assert [one.name for one in tmp_path.iterdir()] == ["3"]


def test_a_manifest_names_no_folder_elsewhere(tmp_path: Path) -> None:
    from functree.io.checkpoints.manifest import Manifest

    ft.save(tmp_path / "c", TREE)
    manifest = tmp_path / "c" / "functree.json"
    found = Manifest.from_json(manifest.read_text(), manifest)
    for name in ("../other", "/tmp", "arrays-x", ""):
        manifest.write_text(found._replace(arrays=name).to_json())
        with raises("is not the manifest of a checkpoint:", "is not a folder of values"):
            ft.restore(tmp_path / "c", TREE)
