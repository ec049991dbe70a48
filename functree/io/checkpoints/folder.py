"""The folder of a checkpoint or of a run, on a disk or in a bucket: its manifest, and beside it a
folder with the values of the arrays.

The manifest is the last file that is written, and it names the folder of the values. So a folder
without one is not a checkpoint, a manifest that replaces another replaces a checkpoint whole, and
what it does not name is not part of it. Tensorstore writes it if nobody else has written one since
this writer began: on a disk it locks a file for that moment, and syncs the file and its folder; a
bucket compares generations.

What a writer makes has a name with twelve random digits. What has such a name, and no manifest
names, is removed after a day. Nothing else is ever removed.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax

from functree.errors import CheckpointError, CheckpointFileError
from functree.io.checkpoints.manifest import BEGINNING, VALUES, Manifest, new_values_name
from functree.io.extras import ForeignErrors, import_extra

MANIFEST = "functree.json"

DEADLINE = 60.0
"""Seconds after which a bucket that has not answered counts as unreachable. Tensorstore by itself
would try for many minutes."""

ASKED_AFTER = 20.0
"""Seconds after which a bucket is asked again whether it answers, while orbax writes."""

# For a deletion of all that is below a prefix, which may be many thousands of objects.
_LONG_DEADLINE = 900.0


class Found(NamedTuple):
    """A manifest as it was read.

    Attributes:
        data: its bytes; None if there is no manifest.
        generation: differs from the generation of each other manifest that was or will be there; it
            is always the same where there is none.
    """

    data: bytes | None
    generation: bytes


class Folder:
    """A folder of a file system that all processes share.

    Its operations raise OSError, or CheckpointFileError where they know more.

    Args:
        path: the folder, as in messages and for orbax.
        store: the `tensorstore.KvStore` of what is in it.
    """

    # `Any`: the types of tensorstore are not known where it is not installed.
    def __init__(self, path: Path, store: Any):
        self.path = path
        self._store = store

    def at(self, name: str) -> "Folder":
        """A folder in this one."""
        return Folder(self.path / name, self._store / f"{name}/")

    def read(self) -> Found:
        """The manifest.

        Raises:
            CheckpointFileError: there is something that is not a file.
        """
        manifest = self.path / MANIFEST
        # Opening a pipe would wait for who writes to it, and a device may have no end.
        if os.path.lexists(manifest) and not os.path.isfile(manifest):
            raise CheckpointFileError(f"{manifest} cannot be read: it is not a file")
        found = self._answer(self._store.read(MANIFEST))
        return Found(found.value if found.state == "value" else None, found.stamp.generation)

    def commit(self, text: str, generation: bytes) -> bool:
        """Make a text the manifest, in one step, if the one that is there has this generation.

        Returns:
            False if another writer was first.
        """
        data = text.encode()
        if self._answer(self._store.write(MANIFEST, data, if_equal=generation)).generation:
            return True
        # The answer to a first attempt may have been lost, and not the attempt.
        return self.read().data == data

    def write(self, name: str, data: bytes | None) -> None:
        """Write a file, or remove it."""
        self._answer(self._store.write(name, data))

    def names(self) -> list[str]:
        """The names in this folder; none if there is no folder."""
        return os.listdir(self.path) if self.path.is_dir() else []

    def age(self, name: str) -> float:
        """For how many seconds something in this folder was not written."""
        try:
            return time.time() - os.lstat(self.path / name).st_mtime
        except FileNotFoundError:
            return 0.0  # another process has removed it

    def with_manifest(self, names: Sequence[str]) -> list[str]:
        """Those of these folders in this one that have a manifest."""
        return [name for name in names if (self.path / name / MANIFEST).is_file()]

    def obstacle(self) -> str:
        """What is in the place of this folder, and is no folder; empty if nothing is."""
        # Asked once: another process may make the folder, or remove it, between two questions.
        try:
            is_folder = stat.S_ISDIR(os.stat(self.path).st_mode)
        except OSError:
            is_folder = not os.path.islink(self.path)  # there is nothing, or a link to nothing
        if is_folder:
            return ""
        if os.path.islink(self.path):
            return f"a link to {os.readlink(self.path)}, which is not a folder"
        return "a file"

    def make(self) -> bool:
        """Make the folder; whether it was not there."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; another process may do so too."""
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def remove_empty(self) -> None:
        """Remove this folder if nothing is in it."""
        with suppress(OSError):
            os.rmdir(self.path)

    def check_reached(self) -> None:
        """Raise OSError if what is here cannot be reached any more. Called often."""
        # Of a disk, the operating system says so to who writes.

    def _answer(self, future: Any, deadline: float | None = None) -> Any:
        """What the store answers; OSError if it does not, or refuses."""
        try:
            return future.result(timeout=deadline)
        except TimeoutError:
            future.cancel()
            raise OSError(f"the bucket has not answered for {deadline:g} seconds") from None
        except (ValueError, NotImplementedError) as error:
            # Tensorstore turns every status into one of these, such as that of no permission.
            raise OSError(str(error).partition("\n")[0]) from error


class BucketFolder(Folder):
    """What is below an address in a bucket. There are no folders: one is there if something is in
    it. Where a `Folder` asks the operating system, it finds nothing at such an address.

    Args:
        path: the address.
        store: the `tensorstore.KvStore` of what is below it.
        files: a file system of fsspec, which lists by folder; tensorstore has no such list.
    """

    def __init__(self, path: Any, store: Any, files: Any):
        super().__init__(path, store)
        self._files, self._root = files, str(path).removeprefix("gs://")
        self._reached = time.monotonic()

    def at(self, name: str) -> "BucketFolder":
        return BucketFolder(self.path / name, self._store / f"{name}/", self._files)

    def names(self) -> list[str]:
        try:
            paths = self._listed(self._files.ls, self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        # Where there is no such folder, gcsfs lists an object of its name.
        inside = [path for path in paths if path.startswith(f"{self._root}/")]
        return [path.rstrip("/").rpartition("/")[2] for path in inside]

    def age(self, name: str) -> float:
        objects = self._listed(self._files.find, f"{self._root}/{name}", detail=True)
        written = [datetime.fromisoformat(one["updated"]).timestamp() for one in objects.values()]
        now = time.time()
        return now - max(written, default=now)

    def with_manifest(self, names: Sequence[str]) -> list[str]:
        # All at once, and without their data.
        listed: list[Any] = []
        for name in names:
            key = f"{name}/{MANIFEST}"
            listed.append(self._store.list(self._store.KeyRange(key, f"{key}\0")))
        return [name for name, one in zip(names, listed, strict=True) if self._answer(one)]

    def make(self) -> bool:
        return False

    def remove(self, name: str) -> None:
        below = self._store.KeyRange(f"{name}/", f"{name}0")  # 0 comes after the slash
        self._answer(self._store.delete_range(below), _LONG_DEADLINE)
        self.write(name, None)

    def check_reached(self) -> None:
        # Orbax tries for many minutes, in threads of its own.
        if time.monotonic() > self._reached + ASKED_AFTER:
            self.read()
            self._reached = time.monotonic()

    def _listed(self, ask: Any, path: str, **options: Any) -> Any:
        # By itself it tries each request six times, and waits without end for each.
        try:
            return ask(path, **options, timeout=DEADLINE)
        except TimeoutError:
            raise OSError(f"the bucket has not answered for {DEADLINE:g} seconds") from None

    def _answer(self, future: Any, deadline: float | None = None) -> Any:
        return super()._answer(future, deadline or DEADLINE)


def files(failure: str) -> ForeignErrors:
    """What is raised inside, while files are read or written, becomes a CheckpointFileError."""
    return ForeignErrors(CheckpointFileError, failure)


# A scheme has two letters at least: a drive of Windows has one.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# What `Path` makes of an address. A folder may have such a name too, but not of these schemes.
_BROKEN_ADDRESS = re.compile(r"(gs|gcs|s3|s3a|az|abfss?|hdfs|https?|file):/")
_IN_BUCKET = re.compile(r"gs://[^/]+(/[^/]+)*/?")
# Orbax and fsspec look for some of what they have written by patterns, as those of a shell, and
# resolve dots; what has a line end is no address for tensorstore.
_UNUSABLE = re.compile(r"[*?\[\]#\x00-\x1f\x7f]|(?<=/)\.\.?(?=/|$)")


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """The folder at the path of a checkpoint, or of the checkpoints of a run.

    Raises:
        CheckpointError: it is an address that orbax has no way to; there is no folder that it
            begins in.
        FunctreeError: the extra is not installed.
    """
    text = os.fspath(path)
    if match := _ADDRESS.match(text):
        if match.group(1) == "gs":
            return _in_bucket(text)
        raise CheckpointError(
            f"{text} cannot be used: of all buckets orbax, which writes the arrays, reaches "
            "`gs://` alone: save to one of these, or to a file system that all processes share, "
            "and copy what is finished"
        )
    if match := _BROKEN_ADDRESS.match(text):
        raise CheckpointError(
            f"{text} has lost a slash, as in `Path('{match.group(1)}://bucket')`: give the address "
            "of a bucket as text"
        )
    tensorstore: Any = import_extra("tensorstore", "checkpoint")
    with files(f"{text} cannot be found"):  # no such user, or the current folder was removed
        # Absolute at once: a program may change its folder while this is written in the background.
        found = Path(text).expanduser().absolute()
        return Folder(found, tensorstore.KvStore.open(store_spec(found)).result())


def _in_bucket(address: str) -> BucketFolder:
    """The folder at an address in a bucket."""
    if not _IN_BUCKET.fullmatch(address):
        raise CheckpointError(
            f"{address} is not the address of a folder in a bucket, such as gs://bucket/run/1"
        )
    if found := _UNUSABLE.search(address):
        raise CheckpointError(
            f"{address!r} has {found.group()!r} in it, which orbax takes for something else "
            "than a name: save to another address"
        )
    # Orbax reaches a bucket by it, and says nothing of what is missing.
    import_extra("gcsfs", "gcs")
    tensorstore: Any = import_extra("tensorstore", "gcs")
    fsspec: Any = import_extra("fsspec", "gcs")
    path: Any = import_extra("etils.epath", "gcs").Path(address.rstrip("/"))
    with files(f"{address} cannot be opened"):
        store = tensorstore.KvStore.open(store_spec(path)).result()
        # What other processes write is to be seen at once.
        return BucketFolder(path, store, fsspec.filesystem("gs", use_listings_cache=False))


def store_spec(path: object) -> dict[str, str]:
    """How tensorstore opens what is in a folder, or below an address in a bucket."""
    if not is_in_bucket(path):
        return {"driver": "file", "path": f"{path}/"}
    bucket, _, below = str(path).removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": f"{below}/"}


def is_in_bucket(path: object) -> bool:
    """Return whether a path is the address of something in a bucket."""
    return str(path).startswith("gs://")


DAY = 24 * 3600.0
"""Seconds after which a writer that has not written its manifest may not do so any more."""

# An hour later what it has written is removed: a writer that has looked at its clock just before
# has this long to write the manifest, and clocks may differ by so much.
_REMOVED_AFTER = DAY + 3600.0

BEGUN, FAILED = ".begun", ".failed"
"""What several processes leave for each other beside the values: the first one has begun to write
here; one of them could not write its part."""

# The values; what orbax makes of them first; what processes leave for each other; and the locks of
# earlier versions. And what tensorstore leaves of a manifest if the process is killed just then.
_OWN = re.compile(
    rf"{VALUES}(\.orbax-checkpoint-tmp|\.begun|\.failed|\.lock|\.json)?|functree\.json\.__lock"
)


def read_manifest(folder: Folder) -> Manifest:
    """What the checkpoint in a folder says about itself.

    Raises:
        CheckpointError: it is not a checkpoint, or its manifest is not what was written.
    """
    path = folder.path / MANIFEST
    with files(f"{path} cannot be read"):
        found = folder.read().data
        if found is not None:
            return Manifest.from_json(found.decode(), path)
        why = _no_checkpoint(folder)
    raise CheckpointFileError(f"{folder.path} is not a checkpoint: {why}")


def _no_checkpoint(folder: Folder) -> str:
    """What there is in the place of a checkpoint."""
    if obstacle := folder.obstacle():
        return f"it is {obstacle}"
    names = folder.names()
    if any(map(_OWN.fullmatch, names)):
        return f"it has no {MANIFEST}, so it is still written, or its writer was stopped"
    if steps := steps_with_manifest(folder, named_steps(folder)):
        latest = folder.path / str(steps[-1])
        return f"it has the checkpoints of several steps: give one of them, such as {latest}"
    if names or os.path.isdir(folder.path):
        return f"it has no {MANIFEST}"
    return "there is no such folder"


def named_steps(folder: Folder) -> list[int]:
    """The steps that have a folder, whether or not there is a checkpoint in it."""
    found: list[int] = []
    for name in folder.names():
        # A folder called `007`, or by the digits of another script, would be one step with `7`.
        if name.isascii() and name.isdigit() and str(int(name)) == name:
            found.append(int(name))
    return sorted(found)


def steps_with_manifest(folder: Folder, steps: list[int]) -> list[int]:
    """Those of some steps that have a checkpoint, in their order."""
    return sorted(map(int, folder.with_manifest(list(map(str, steps)))))


class Draft:
    """The values of a checkpoint that is being written.

    Args:
        folder: the folder of the checkpoint. It is created.
        overwrite: whether a checkpoint that is there is replaced.

    Attributes:
        name: the name of the values. It is new.

    Raises:
        CheckpointError: the path has something that is not to be overwritten; it cannot be created.
    """

    def __init__(self, folder: Folder, overwrite: bool):
        self._folder, self._began = folder, time.time()
        self.name: str = new_values_name()
        with files(f"{folder.path} cannot be written"):
            self._generation: bytes = _replaceable(folder, overwrite).generation
            self._old = _named(folder)
            self._is_new = folder.make()
            self._is_committed = False
            if jax.process_count() > 1:
                folder.write(f"{self.name}{BEGUN}", b"")

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest: from here on this is the checkpoint.

        Raises:
            CheckpointError: another writer was first, or the file cannot be written.
        """
        folder = self._folder
        with files(f"{folder.path} cannot be written"):
            if time.time() - self._began > DAY:
                raise CheckpointFileError(
                    f"{folder.path}: this began more than a day ago, so another process may have "
                    "removed what was written: save again"
                )
            self._is_committed = True
            if not folder.commit(manifest.to_json(), self._generation):
                self._is_committed = False
                raise CheckpointFileError(
                    f"{folder.path}: another process has saved a checkpoint there meanwhile"
                )
            folder.remove(f"{self.name}{BEGUN}")
            if self._old:
                _remove_values(folder, self._old)
            sweep(folder)

    def discard(self) -> None:
        """Remove what was written, if that is possible."""
        folder = self._folder
        # The rest goes after a day, as does what threads of orbax and other processes write later.
        with suppress(CheckpointError), files("what was written cannot be removed"):
            if self._is_committed:
                # There was an error, and the manifest may be there; in a bucket it may still come.
                if is_in_bucket(folder.path) or _named(folder) in (self.name, None):
                    return
            _remove_values(folder, self.name)
            # A folder that was there before is the user's, also if nothing is in it.
            if self._is_new:
                folder.remove_empty()


def _replaceable(folder: Folder, overwrite: bool) -> Found:
    """The manifest that a new one may replace, or that there is none.

    Raises:
        CheckpointError: the path has something that a checkpoint must not replace.
    """
    path = folder.path
    if obstacle := folder.obstacle():
        raise CheckpointFileError(f"{path} is {obstacle}: save to another path")
    if overwrite and is_foreign(folder):
        raise CheckpointFileError(
            f"{path / MANIFEST} was not written by functree, and is not overwritten: save to "
            "another path"
        )
    found = folder.read()
    if found.data is not None:
        if overwrite:
            return found
        raise CheckpointFileError(
            f"{path} is a checkpoint already: save to another path, or with `overwrite=True`"
        )
    # What another writer has left, or still writes, is no obstacle, nor is the manifest that it has
    # written in this moment: one of them will be first.
    others = [name for name in folder.names() if name != MANIFEST and not _OWN.fullmatch(name)]
    if others:
        raise CheckpointFileError(
            f"{path} is a folder that is not a checkpoint: it has `{min(others)}`; save elsewhere"
        )
    return found


def is_foreign(folder: Folder) -> bool:
    """Return whether a folder has a manifest that functree has not written."""
    # By its first bytes: one that is damaged further on may be replaced. One that another program
    # has formatted anew begins otherwise, and can still be read.
    try:
        found = folder.read().data
        if found is None or found.startswith(BEGINNING):
            return False  # also if another process has removed the checkpoint
        read_manifest(folder)
    except CheckpointError:
        return True
    return False


def _named(folder: Folder) -> str | None:
    """The name of the values that the manifest in a folder names. It is empty if there is no
    manifest, and None if the manifest cannot be read, or names none."""
    try:
        found = folder.read().data
        if found is None:
            return ""
        return Manifest.from_json(found.decode(), folder.path / MANIFEST).arrays
    except (CheckpointError, UnicodeDecodeError):
        return None


def _remove_values(folder: Folder, values: str) -> None:
    """Remove the values of a name, with what was made beside them."""
    for name in folder.names():
        # The word of a process that failed stays for the others, which may look for it later.
        if name.startswith(values) and _OWN.fullmatch(name) and not name.endswith(FAILED):
            folder.remove(name)


def sweep(folder: Folder) -> bool:
    """Remove what writers have left in the folder of a checkpoint more than a day ago, and the
    folder if nothing else is in it.

    Returns:
        Whether there is something that may be left, and is too young to be removed.
    """
    ages = {name: folder.age(name) for name in folder.names() if _OWN.fullmatch(name)}
    # The manifest is read after the ages: one that comes later names nothing that is old.
    kept = _named(folder) if ages else None
    if kept is None:
        return False  # there is nothing, or a manifest that may name these
    left = [name for name in ages if not kept or not name.startswith(kept)]
    old = [name for name in left if ages[name] > _REMOVED_AFTER]
    for name in old:
        folder.remove(name)
    if old:
        folder.remove_empty()
    return len(old) < len(left)


def remove_step(folder: Folder) -> None:
    """Remove the checkpoint of a step: first its manifest, so that nobody finds half of it."""
    old = _named(folder)
    folder.write(MANIFEST, None)
    if old:
        _remove_values(folder, old)
    sweep(folder)
    folder.remove_empty()
