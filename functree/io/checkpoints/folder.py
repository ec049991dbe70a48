"""A path or an address ─► `Folder`: what is in a folder on a disk, or in a bucket.

The manifest is written by tensorstore, whose stores compare and swap: a manifest replaces only the
one that its writer has seen. On a disk tensorstore locks a file for the moment of the swap, and
syncs the file and its folder; a bucket compares generations.
"""

import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from functree.errors import CheckpointError, CheckpointFileError
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
        found = _answer(self._store.read(MANIFEST))
        return Found(found.value if found.state == "value" else None, found.stamp.generation)

    def commit(self, text: str, generation: bytes) -> bool:
        """Make a text the manifest, in one step, if the one that is there has this generation.

        Returns:
            False if another writer was first.
        """
        data = text.encode()
        if _answer(self._store.write(MANIFEST, data, if_equal=generation)).generation:
            return True
        # The answer to a first attempt may have been lost, and not the attempt.
        return self.read().data == data

    def remove_manifest(self) -> None:
        """Remove the manifest, if there is one."""
        _answer(self._store.write(MANIFEST, None))

    def touch(self, name: str) -> None:
        """Write an empty file."""
        _answer(self._store.write(name, b""))

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
        if os.path.isdir(self.path) or not os.path.lexists(self.path):
            return ""
        if self.is_link():
            return f"a link to {os.readlink(self.path)}, which is not a folder"
        return "a file"

    def is_link(self) -> bool:
        """Whether this is only a link to a folder that is elsewhere."""
        return os.path.islink(self.path)

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
        import tensorstore  # it is installed, since the store is its

        # All at once, and without their data.
        listed: list[Any] = []
        for name in names:
            key = f"{name}/{MANIFEST}"
            listed.append(self._store.list(tensorstore.KvStore.KeyRange(key, f"{key}\0")))
        return [name for name, one in zip(names, listed, strict=True) if _answer(one)]

    def make(self) -> bool:
        return False

    def remove(self, name: str) -> None:
        import tensorstore

        below = tensorstore.KvStore.KeyRange(f"{name}/", f"{name}0")  # 0 comes after the slash
        _answer(self._store.delete_range(below), _LONG_DEADLINE)
        _answer(self._store.write(name, None))

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
            raise _silence(DEADLINE) from None


def _answer(future: Any, seconds: float | None = None) -> Any:
    """What a store answers.

    Raises:
        OSError: it does not, or refuses.
    """
    deadline = seconds or DEADLINE
    try:
        return future.result(timeout=deadline)
    except TimeoutError:
        future.cancel()
        raise _silence(deadline) from None
    except (ValueError, NotImplementedError) as error:
        # Tensorstore turns every status into one of these, such as that of no permission.
        raise OSError(str(error).partition("\n")[0]) from error


def _silence(seconds: float) -> OSError:
    return OSError(f"the bucket has not answered for {seconds:g} seconds")


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
    """Whether a path is the address of something in a bucket."""
    return str(path).startswith("gs://")
