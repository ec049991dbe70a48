"""A checkpoint's folder contains a manifest, and a folder with the values of the arrays.

A checkpoint is on a disk or in a bucket. The manifest is written last, and names the folder with
the values. A folder without a manifest is therefore not a checkpoint, and replacing the manifest
replaces the whole checkpoint. Anything that the manifest does not name is not part of the
checkpoint.

A writer replaces the manifest only if no other writer has done so since the writer began. To ensure
this on a disk, tensorstore locks a file, and syncs the file and its folder. A bucket compares the
generations of objects instead.

A writer's folder of values has a name with twelve random hexadecimal digits. Folders that no
manifest names are removed by later saves, once they are 25 hours old. A writer that began more than
24 hours ago may no longer write its manifest. Files that functree did not write are never removed.
"""

import os
import re
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax

from functree.errors import CheckpointError, CheckpointFileError
from functree.io.checkpoints.manifest import BEGINNING, VALUES, Manifest
from functree.io.extras import ForeignErrors, import_extra

MANIFEST = "functree.json"

DEADLINE = 60.0
"""The number of seconds after which a bucket that does not answer is treated as unreachable.

Tensorstore alone would retry for many minutes.
"""

ASKED_AFTER = 20.0
"""The number of seconds between checks that the bucket still answers, while orbax writes."""

# The deadline for deleting everything below a prefix, which may be thousands of objects.
_LONG_DEADLINE = 900.0


class Found(NamedTuple):
    """The bytes and the generation of a manifest, as they were read.

    Attributes:
        data: the bytes; None if there is no manifest.
        generation: an identifier, unique among all manifests ever written in the folder. If there
            is no manifest, the identifier has a fixed value.
    """

    data: bytes | None
    generation: bytes


class Folder:
    """A folder in a file system that all processes share.

    Methods that fail raise an OSError, or a CheckpointFileError with a more specific message.

    Args:
        path: the folder's path, for messages and orbax.
        store: the `tensorstore.KvStore` of the folder's contents.
    """

    # `Any`, since tensorstore's types are unknown where it is not installed.
    def __init__(self, path: Path, store: Any):
        self.path = path
        self._store = store

    def at(self, name: str) -> "Folder":
        """Return the folder with a name inside this folder."""
        return Folder(self.path / name, self._store / f"{name}/")

    def read(self) -> Found:
        """Read the manifest.

        Raises:
            CheckpointFileError: if the manifest is not a regular file.
        """
        manifest = self.path / MANIFEST
        # Opening a pipe would wait for a writer, and reading a device may never end.
        if os.path.lexists(manifest) and not os.path.isfile(manifest):
            raise CheckpointFileError(f"{manifest} cannot be read: it is not a regular file")
        found = self._answer(self._store.read(MANIFEST))
        return Found(found.value if found.state == "value" else None, found.stamp.generation)

    def commit(self, text: str, generation: bytes) -> bool:
        """Write the manifest atomically, if the current manifest still has this generation.

        Returns:
            Whether the manifest was written: False if another writer was first.
        """
        data = text.encode()
        if self._answer(self._store.write(MANIFEST, data, if_equal=generation)).generation:
            return True
        # A first attempt may have succeeded although its answer was lost.
        return self.read().data == data

    def write(self, name: str, data: bytes | None) -> None:
        """Write a file, or remove it if `data` is None."""
        self._answer(self._store.write(name, data))

    def names(self) -> list[str]:
        """List the names in this folder. The list is empty if the folder does not exist."""
        return os.listdir(self.path) if self.path.is_dir() else []

    def age(self, name: str) -> float:
        """Return the seconds since a file or folder inside this folder was last written."""
        try:
            return time.time() - os.lstat(self.path / name).st_mtime
        except FileNotFoundError:
            return 0.0  # another process has removed it

    def with_manifest(self, names: Sequence[str]) -> list[str]:
        """Return the names of those inner folders that contain a manifest."""
        return [name for name in names if (self.path / name / MANIFEST).is_file()]

    def make(self) -> bool:
        """Make the folder, and return whether it is new."""
        is_new = not self.path.is_dir()
        self.path.mkdir(parents=True, exist_ok=True)
        return is_new

    def remove(self, name: str) -> None:
        """Remove a file or folder, which another process may remove at the same time."""
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def remove_empty(self) -> None:
        """Remove this folder if it is empty."""
        with suppress(OSError):
            os.rmdir(self.path)

    def check_reached(self) -> None:
        """Raise an OSError if the folder has become unreachable. Writers call this method often."""
        # On a disk, writing raises the error.

    def _answer(self, future: Any, deadline: float | None = None) -> Any:
        """Wait for the store's answer; raise an OSError if the store refuses or does not answer."""
        try:
            return future.result(timeout=deadline)
        except TimeoutError:
            future.cancel()
            raise OSError(f"the bucket has not answered for {deadline:g} seconds") from None
        except (ValueError, NotImplementedError) as error:
            # Tensorstore raises one of these for every failure, such as a missing permission.
            raise OSError(str(error).partition("\n")[0]) from error


class BucketFolder(Folder):
    """A folder at an address in a bucket. The folder exists if it contains an object.

    The inherited methods that call the operating system find nothing at such an address.

    Args:
        path: the address.
        store: the `tensorstore.KvStore` of the folder's contents.
        files: an fsspec file system. Unlike tensorstore, it can list a single folder.
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
        # If the folder does not exist, gcsfs lists an object with the folder's name.
        inside = [path for path in paths if path.startswith(f"{self._root}/")]
        return [path.rstrip("/").rpartition("/")[2] for path in inside]

    def age(self, name: str) -> float:
        objects = self._listed(self._files.find, f"{self._root}/{name}", detail=True)
        written = [datetime.fromisoformat(one["updated"]).timestamp() for one in objects.values()]
        now = time.time()
        return now - max(written, default=now)

    def with_manifest(self, names: Sequence[str]) -> list[str]:
        # All requests run at once, and read no data.
        listed: list[Any] = []
        for name in names:
            key = f"{name}/{MANIFEST}"
            listed.append(self._store.list(self._store.KeyRange(key, f"{key}\0")))
        return [name for name, one in zip(names, listed, strict=True) if self._answer(one)]

    def make(self) -> bool:
        return False

    def remove(self, name: str) -> None:
        below = self._store.KeyRange(f"{name}/", f"{name}0")  # in ASCII, 0 comes after the slash
        self._answer(self._store.delete_range(below), _LONG_DEADLINE)
        self.write(name, None)

    def check_reached(self) -> None:
        # Orbax alone would retry for many minutes, in its own threads.
        if time.monotonic() > self._reached + ASKED_AFTER:
            self.read()
            self._reached = time.monotonic()

    def _listed(self, ask: Any, path: str, **options: Any) -> Any:
        # Without a timeout, gcsfs tries each request six times, and may wait forever for each
        # attempt.
        try:
            return ask(path, **options, timeout=DEADLINE)
        except TimeoutError:
            raise OSError(f"the bucket has not answered for {DEADLINE:g} seconds") from None

    def _answer(self, future: Any, deadline: float | None = None) -> Any:
        return super()._answer(future, deadline or DEADLINE)


def files(failure: str) -> ForeignErrors:
    """Return a context manager that converts errors of its block into CheckpointFileError."""
    return ForeignErrors(CheckpointFileError, failure)


# A scheme has at least two letters. A single letter is a Windows drive.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# `Path` removes a slash from an address. A local path may look like the result, but is unlikely to
# begin with one of these schemes.
_BROKEN_ADDRESS = re.compile(r"(gs|gcs|s3|s3a|az|abfss?|hdfs|https?|file):/")
# Orbax and fsspec expand shell patterns and resolve dots, and tensorstore refuses line breaks.
_IN_BUCKET = re.compile(r"gs://[^/]+(/(?!\.\.?(/|$))[^/*?\[\]#\x00-\x1f\x7f]+)*/?")


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """Return the folder of a checkpoint, or of a run's checkpoints.

    Raises:
        CheckpointError: if an address has a scheme other than `gs://`.
        CheckpointError: if an address lacks a slash after its scheme.
        CheckpointError: if a `gs://` address does not name a folder in a bucket, or contains
            characters that orbax does not accept.
        CheckpointError: if the bucket cannot be opened.
        CheckpointError: if a local path cannot be made absolute.
        FunctreeError: if the extra `checkpoint` is not installed.
        FunctreeError: if the path is in a bucket, and the extra `gcs` is not installed.
    """
    text = os.fspath(path)
    if match := _ADDRESS.match(text):
        if match.group(1) == "gs":
            return _in_bucket(text)
        raise CheckpointError(
            f"{text} cannot be used, since orbax can access only `gs://` buckets: use a `gs://` "
            "address, or save to a shared file system and copy the checkpoints"
        )
    if match := _BROKEN_ADDRESS.match(text):
        raise CheckpointError(
            f"{text} lacks a slash, since `Path('{match.group(1)}://bucket')` removes one: pass "
            "the bucket's address as a string"
        )
    tensorstore: Any = import_extra("tensorstore", "checkpoint")
    # The path cannot be found if `~user` is unknown, or if the working directory was removed.
    with files(f"{text} cannot be found"):
        # The path is made absolute now, since the program may change its working directory during
        # a background write.
        found = Path(text).expanduser().absolute()
        return Folder(found, tensorstore.KvStore.open(store_spec(found)).result())


def _in_bucket(address: str) -> BucketFolder:
    """Return the folder at an address in a bucket."""
    if not _IN_BUCKET.fullmatch(address):
        raise CheckpointError(
            f"{address!r} is not the address of a folder in a bucket: pass an address such as "
            "gs://bucket/run/1, whose names are not `.` or `..` and contain none of `*?[]#`"
        )
    # Orbax needs gcsfs to reach a bucket, but does not report that gcsfs is missing.
    import_extra("gcsfs", "gcs")
    tensorstore: Any = import_extra("tensorstore", "gcs")
    fsspec: Any = import_extra("fsspec", "gcs")
    path: Any = import_extra("etils.epath", "gcs").Path(address.rstrip("/"))
    with files(f"{address} cannot be opened"):
        store = tensorstore.KvStore.open(store_spec(path)).result()
        # Listings are not cached, since other processes' writes must be visible at once.
        return BucketFolder(path, store, fsspec.filesystem("gs", use_listings_cache=False))


def store_spec(path: object) -> dict[str, str]:
    """Return tensorstore's spec for a folder, or for an address in a bucket."""
    if not is_in_bucket(path):
        return {"driver": "file", "path": f"{path}/"}
    bucket, _, below = str(path).removeprefix("gs://").partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": f"{below}/"}


def is_in_bucket(path: object) -> bool:
    """Return whether a path is an address in a bucket."""
    return str(path).startswith("gs://")


DAY = 24 * 3600.0
"""The number of seconds after which a writer may no longer write its manifest."""

# Leftovers are removed an hour later than that. In this hour, a writer that has just checked its
# clock can write the manifest. The hour also covers differences between clocks.
_REMOVED_AFTER = DAY + 3600.0

BEGUN, FAILED = ".begun", ".failed"
"""The suffixes of the files with which processes notify each other.

The files are next to the folder with the values. `BEGUN` means that the first process has begun to
write. `FAILED` means that a process could not write.
"""

# Names of folders with values, orbax's temporary folders, and processes' notes. If a process is
# killed while it writes a manifest, tensorstore leaves `functree.json.__lock`.
_OWN = re.compile(rf"{VALUES}(\.orbax-checkpoint-tmp|\{BEGUN}|\{FAILED})?|functree\.json\.__lock")


def read_manifest(folder: Folder) -> Manifest:
    """Read the manifest of the checkpoint in a folder.

    Raises:
        CheckpointError: if the folder is not a checkpoint.
        CheckpointError: if the manifest cannot be read.
        CheckpointError: if the manifest is invalid, or has a newer format.
        CheckpointError: if the manifest has changed since it was written.
    """
    path = folder.path / MANIFEST
    with files(f"{path} cannot be read"):
        found = folder.read().data
        if found is not None:
            return Manifest.from_json(found.decode(), path)
        why = _no_checkpoint(folder)
    raise CheckpointFileError(f"{folder.path} is not a checkpoint: {why}")


def _no_checkpoint(folder: Folder) -> str:
    """Explain why a folder is not a checkpoint."""
    names = folder.names()
    if steps := steps_with_manifest(folder, named_steps(folder)):
        latest = folder.path / str(steps[-1])
        return (
            f"it contains the checkpoints of a run: pass the folder of one step, such as {latest}"
        )
    if names or folder.path.exists():
        return f"it contains no {MANIFEST}"
    return "it does not exist"


def named_steps(folder: Folder) -> list[int]:
    """Return the steps that have a folder, with or without a checkpoint, in ascending order."""
    steps: list[int] = []
    for name in folder.names():
        # `007`, or a 7 in another script's digits, would be the same step as `7`.
        if name.isascii() and name.isdigit() and str(int(name)) == name:
            steps.append(int(name))
    return sorted(steps)


def steps_with_manifest(folder: Folder, steps: list[int]) -> list[int]:
    """Return those steps that have a checkpoint, in ascending order."""
    return sorted(map(int, folder.with_manifest(list(map(str, steps)))))


class Draft:
    """A checkpoint that is being written.

    Args:
        folder: the checkpoint's folder, which is created.
        overwrite: whether an existing checkpoint is replaced.

    Attributes:
        name: the name of the new folder with the values.

    Raises:
        CheckpointError: if the path contains anything that must not be replaced.
        CheckpointError: if the folder cannot be created.
    """

    def __init__(self, folder: Folder, overwrite: bool):
        self._folder, self._began = folder, time.time()
        self.name: str = f"arrays-{uuid.uuid4().hex[:12]}"
        with files(f"{folder.path} cannot be written"):
            self._generation: bytes = _replaceable(folder, overwrite).generation
            self._old = _named(folder)
            self._is_new = folder.make()
            self._is_committed = False
            if jax.process_count() > 1:
                folder.write(f"{self.name}{BEGUN}", b"")

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, which completes the checkpoint.

        Raises:
            CheckpointError: if the save began more than 24 hours ago.
            CheckpointError: if another writer was the first to write a manifest.
            CheckpointError: if the manifest cannot be written.
        """
        folder = self._folder
        with files(f"{folder.path} cannot be written"):
            if time.time() - self._began > DAY:
                raise CheckpointFileError(
                    f"the save to {folder.path} began more than 24 hours ago, so another process "
                    "may have removed its files: save again"
                )
            self._is_committed = True
            if not folder.commit(manifest.to_json(), self._generation):
                self._is_committed = False
                raise CheckpointFileError(
                    f"another process was the first to save a checkpoint to {folder.path}: save to "
                    "another path"
                )
            folder.remove(f"{self.name}{BEGUN}")
            if self._old:
                _remove_values(folder, self._old)
            sweep(folder)

    def discard(self) -> None:
        """Remove the written files, if possible."""
        folder = self._folder
        # Later saves remove any files that remain, including files that orbax's threads and other
        # processes write afterwards.
        with suppress(CheckpointError), files("the written files cannot be removed"):
            if self._is_committed:
                # Despite the error, the manifest may exist. In a bucket, it may still appear.
                if is_in_bucket(folder.path) or _named(folder) in (self.name, None):
                    return
            _remove_values(folder, self.name)
            # A folder that existed before belongs to the user, even if it is empty.
            if self._is_new:
                folder.remove_empty()


def _replaceable(folder: Folder, overwrite: bool) -> Found:
    """Read the manifest that a new manifest may replace, if there is one.

    Raises:
        CheckpointError: if the folder is a checkpoint, and `overwrite` is False.
        CheckpointError: if functree did not write the folder's manifest.
        CheckpointError: if the folder contains other files, and no checkpoint.
    """
    path, found = folder.path, folder.read()
    if found.data is not None and not overwrite:
        raise CheckpointFileError(
            f"{path} is already a checkpoint: save to another path, or pass `overwrite=True`"
        )
    if is_foreign(found):
        raise CheckpointFileError(
            f"{path / MANIFEST} was not written by functree, so it is not overwritten: save to "
            "another path"
        )
    if found.data is not None:
        return found
    # Other writers' files cause no error here, not even a manifest written just now. The first
    # writer to commit wins.
    others = [name for name in folder.names() if name != MANIFEST and not _OWN.fullmatch(name)]
    if others:
        raise CheckpointFileError(
            f"{path} is not a checkpoint, but contains `{min(others)}`: save to another path"
        )
    return found


def is_foreign(found: Found) -> bool:
    """Return whether there is a manifest that functree did not write."""
    # Only the first bytes are compared, since a manifest that is damaged elsewhere may be replaced.
    return found.data is not None and not found.data.startswith(BEGINNING)


def _named(folder: Folder) -> str | None:
    """Read the name of the folder with the values from the manifest.

    The name is empty if there is no manifest, and None if the manifest is unreadable or names no
    folder.
    """
    try:
        found = folder.read().data
        if found is None:
            return ""
        return Manifest.from_json(found.decode(), folder.path / MANIFEST).arrays
    except (CheckpointError, UnicodeDecodeError):
        return None


def _remove_values(folder: Folder, values: str) -> None:
    """Remove a folder with values, and the notes and locks next to it."""
    for name in folder.names():
        # A failed process's note stays, since other processes may look for it later.
        if name.startswith(values) and _OWN.fullmatch(name) and not name.endswith(FAILED):
            folder.remove(name)


def sweep(folder: Folder) -> bool:
    """Remove writers' leftovers after 25 hours, and remove the folder if it becomes empty.

    Returns:
        Whether there may be leftovers that are too recent to remove.
    """
    ages = {name: folder.age(name) for name in folder.names() if _OWN.fullmatch(name)}
    # The manifest is read after the ages, since a manifest that is written meanwhile names only
    # recent files.
    kept = _named(folder) if ages else None
    if kept is None:
        return False  # there are no leftovers, or an unreadable manifest may name them
    left = [name for name in ages if not kept or not name.startswith(kept)]
    old = [name for name in left if ages[name] > _REMOVED_AFTER]
    for name in old:
        folder.remove(name)
    if old:
        folder.remove_empty()
    return len(old) < len(left)


def remove_step(folder: Folder) -> None:
    """Remove a step's checkpoint, manifest first, so that no process reads a partial checkpoint."""
    old = _named(folder)
    folder.write(MANIFEST, None)
    if old:
        _remove_values(folder, old)
    sweep(folder)
    folder.remove_empty()
