"""The folder of a checkpoint: its manifest, and beside it a folder with the values of the arrays.

The manifest is the last file that is written, and it names the folder of the values. So a folder
without one is not a checkpoint, a manifest that replaces another replaces a checkpoint whole, and
what it does not name is not part of it. A writer holds a lock for what it writes, and the file of
the lock stays beside the values: it is the mark that they are functree's. What has this mark, and
nobody has locked and no manifest names, was left by a process that died. Nothing else is ever
removed.

All of this is said here once; what a `Store` is made of does the single steps.
"""

import atexit
import os
import re
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import jax

from functree.errors import CheckpointError, CheckpointFileError
from functree.io.checkpoints.bucket_store import BucketStore
from functree.io.checkpoints.local_store import LocalStore
from functree.io.checkpoints.manifest import BEGINNING, VALUES, Manifest, is_values_name
from functree.io.checkpoints.store import LOCK, MANIFEST, UNFINISHED, Held, Store
from functree.io.extras import ForeignErrors

# What a writer makes beside the folder of the values: the lock, the text of the manifest before it
# has its name, and the folder of orbax that becomes that of the values at the end.
_BESIDE = (LOCK, ".json", UNFINISHED)


def files(failure: str) -> ForeignErrors:
    """What is raised inside, while files are read or written, becomes a CheckpointFileError."""
    return ForeignErrors(CheckpointFileError, failure)


# A scheme has two letters at least: a drive of Windows has one.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# What `Path` makes of an address. A folder may have such a name too, but not of these schemes.
_BROKEN_ADDRESS = re.compile(r"(gs|gcs|s3|s3a|az|abfss?|hdfs|https?|file):/")


def store_at(path: str | os.PathLike[str]) -> Store:
    """What is at the path of a checkpoint.

    Raises:
        CheckpointError: it is an address that orbax has no way to; there is no folder that it
            begins in.
    """
    text = os.fspath(path)
    if match := _ADDRESS.match(text):
        if match.group(1) == "gs":
            return BucketStore.of_address(text)
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
    # Absolute at once: a program may change its folder while this is written in the background.
    with files(f"{text} cannot be found"):  # no such user, or the current folder was removed
        return LocalStore(Path(text).expanduser().absolute())


def read_manifest(store: Store) -> Manifest:
    """What the checkpoint in a folder says about itself.

    Raises:
        CheckpointError: it is not a checkpoint, or its manifest is not what was written.
    """
    path = store.path / MANIFEST
    try:
        found = store.read()
        if found is not None:
            return Manifest.from_json(found.decode(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointFileError(f"{path} cannot be read: {error}") from error
    with files(f"{store.path} cannot be read"):
        why = store.missing() or _no_manifest(store)
    raise CheckpointFileError(f"{store.path} is not a checkpoint: {why}")


def _no_manifest(store: Store) -> str:
    """What there is in the place of a checkpoint, if it is a folder."""
    if any(_is_own(store, name) for name in store.names()):
        return f"it has no {MANIFEST}, so it is still written, or its writer was stopped"
    if steps := steps_with_manifest(store, named_steps(store)):
        latest = store.path / str(steps[-1])
        return f"it has the checkpoints of several steps: give one of them, such as {latest}"
    return f"it has no {MANIFEST}"


def named_steps(store: Store) -> list[int]:
    """The steps that have a folder, whether or not there is a checkpoint in it."""
    found: list[int] = []
    for name in store.names():
        # A folder called `007`, or by the digits of another script, would be one step with `7`.
        if name.isascii() and name.isdigit() and str(int(name)) == name:
            found.append(int(name))
    return sorted(found)


def steps_with_manifest(store: Store, steps: list[int]) -> list[int]:
    """Those of some steps that have a checkpoint, in their order."""
    return sorted(map(int, store.with_manifest(list(map(str, steps)))))


class Draft:
    """The values of a checkpoint that is being written.

    Args:
        store: the folder of the checkpoint. It is created.
        overwrite: whether a checkpoint that is there is replaced.

    Raises:
        CheckpointError: the path has something that is not to be overwritten; it cannot be created.
    """

    def __init__(self, store: Store, overwrite: bool):
        self._store = store
        with files(f"{store.path} cannot be written"):
            check_free(store, overwrite)
            self._is_new = store.make()
            self._held: Held = store.hold(overwrite)
        self.name: str = self._held.name

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest: from here on this is the checkpoint.

        Raises:
            CheckpointError: another writer was first, or the file cannot be written.
        """
        store = self._store
        with files(f"{store.path} cannot be written"):
            old = _named(store) if self._held.overwrite else None
            if not self._held.put(manifest.to_json(), old):
                raise CheckpointFileError(
                    f"{store.path}: another process has saved a checkpoint there meanwhile"
                )
            # In this order: until the manifest names the values, only what is held keeps another
            # process from deleting them. What is swept is the checkpoint that was replaced.
            self._held.release()
            sweep(store)

    def discard(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Remove what was written. It can be pushed onto an ExitStack, for the errors inside."""
        try:
            with files(f"{self._store.path}: what was written cannot be removed"):
                self._held.release()
                sweep(self._store)
                # A folder that was there before is the user's, also if nothing is in it.
                if self._is_new:
                    self._store.remove_empty()
                remove_at_end(self._store, self.name, self._is_new)
        except CheckpointError as failed:
            if error is None:
                raise
            # Not in the place of the first error: what cannot be written cannot be removed either.
            error.add_note(f"and {failed}")


def check_free(store: Store, overwrite: bool) -> None:
    """Raise CheckpointError if a path has something that a checkpoint must not replace."""
    path = store.path
    if store.has_manifest():
        if not overwrite:
            raise CheckpointFileError(
                f"{path} is a checkpoint already: save to another path, or with `overwrite=True`"
            )
        if is_foreign(store):
            raise CheckpointFileError(
                f"{path / MANIFEST} was not written by functree, and is not overwritten: save to "
                "another path"
            )
        return
    store.check_place()
    # What another writer has left, or still writes, is no obstacle: one of them will be first. It
    # may be gone meanwhile, and its lock with it.
    others = [name for name in store.names() if not _is_own(store, name)]
    others = [name for name in others if name in store.names()]
    if others:
        raise CheckpointFileError(
            f"{path} is a folder that is not a checkpoint: it has `{min(others)}`; save elsewhere"
        )


def is_foreign(store: Store) -> bool:
    """Whether a folder has a manifest that functree has not written."""
    # By its first bytes: one that is damaged further on may be replaced. One that another program
    # has formatted anew begins otherwise, and can still be read.
    try:
        found = store.read()
        if found is None or found.startswith(BEGINNING):
            return False  # also if another process has removed the checkpoint
        read_manifest(store)
    except CheckpointError:
        return True
    return False


def _is_own(store: Store, name: str) -> bool:
    """Whether a file, or a folder, was made by a writer: by its whole name and its mark."""
    values, dot, end = name.partition(".")
    if not is_values_name(values):
        return False
    # The whole ending: `.json.bak` is a copy that the user has made.
    if dot and f".{end}" not in _BESIDE:
        return False
    return store.is_mark(f"{values}{LOCK}")


# Seconds after which what one machine has written to a network file system is seen by the others.
_SEEN_AFTER = 5


def check_seen(store: Store, name: str) -> None:
    """Raise CheckpointError if this process does not see what the first one writes."""
    until = time.monotonic() + _SEEN_AFTER
    # Before orbax begins: on a folder of its own each process would write a part, and none of them
    # would notice that the others are missing. By a list of the folder: a network file system may
    # remember of a file that it was not there.
    while f"{name}{LOCK}" not in store.names():
        if time.monotonic() < until:
            time.sleep(0.05)
            continue
        raise CheckpointFileError(
            f"process {jax.process_index()} does not see the folder {store.path} that process 0 "
            "writes to: give a path on a file system that all processes share"
        )


def is_given_up(store: Store, name: str) -> bool:
    """Whether another process has given up the values of this name, which this one writes too."""
    # The first process removes them, with their lock, and the others leave word.
    return f"{name}{LOCK}" not in store.names() or store.is_told_failure(name)


def remove_at_end(store: Store, name: str, is_new: bool) -> None:
    """At the end of the program, remove what is there of values that were given up.

    Orbax goes on to write them in other threads and processes, and makes the folder anew that was
    removed. Without its lock nobody would know later whose it is.

    Args:
        store: the folder of the checkpoint.
        name: the name of the values.
        is_new: whether the folder was made for them.
    """
    _watch_end()
    _GIVEN_UP.append((store, name, is_new))


_GIVEN_UP: list[tuple[Store, str, bool]] = []


@cache
def _watch_end() -> None:
    # By `atexit`, which comes after Python has waited for the threads of orbax.
    atexit.register(_remove_given_up)


def _remove_given_up() -> None:
    for store, name, is_new in _GIVEN_UP:
        with suppress(CheckpointError), files("what was given up cannot be removed"):
            sweep(store)
            names = store.names()
            # Where its lock is left, the first process has not given it up yet.
            if f"{name}{LOCK}" in names or _is_named(store, name):
                continue
            for one in {name, *(f"{name}{ending}" for ending in _BESIDE)}.intersection(names):
                store.remove(one)
            if is_new:
                store.remove_empty()


class Swept(NamedTuple):
    """What was left beside a checkpoint.

    Attributes:
        removed: whether something of a dead process was, and is removed.
        living: whether there is something of a process that lives, or is not known to be dead yet.
    """

    removed: bool
    living: bool


def sweep(store: Store) -> Swept:
    """Remove what dead processes have left in the folder of a checkpoint."""
    removed = living = False
    began = {name.partition(".")[0] for name in store.names() if name.startswith(VALUES)}
    for name in sorted(began):
        if not _left(store, name):
            continue
        # What is held is looked at before the manifest, since a writer lets go after its manifest
        # is there. The other way round, one that commits in between would lose its values.
        with store.dead(name) as dead:
            if not dead:
                living = True
                continue
            left = _left(store, name)
            for one in left:
                # The lock is the last to go: while it is there, a process that is killed here, or
                # that may not delete all, leaves what the next one finds by it.
                if not one.endswith(LOCK) or not set(left[:-1]) & set(store.names()):
                    store.remove(one)
                    removed = True
    return Swept(removed, living)


def _left(store: Store, name: str) -> list[str]:
    """What is not of the checkpoint, of what the writer of the values of this name has made: the
    lock comes last."""
    found = [one for one in store.names() if one.startswith(name) and _is_own(store, one)]
    if found and _is_named(store, name):
        found = [one for one in found if one not in (name, f"{name}{LOCK}")]
    return sorted(found, key=lambda one: one.endswith(LOCK))


def _is_named(store: Store, name: str) -> bool:
    """Whether the values of this name are those of the checkpoint, or may be."""
    try:
        return read_manifest(store).arrays == name
    except CheckpointError:
        # A manifest that cannot be read may name these: nothing is removed.
        return store.has_manifest()


def _named(store: Store) -> str | None:
    """The name of the values of the checkpoint in a folder; None if nobody knows it."""
    try:
        return read_manifest(store).arrays
    except CheckpointError:
        return None


def sweep_step(store: Store) -> Swept:
    """Remove what dead processes have left of the checkpoint of a step, with its folder."""
    swept = sweep(store)
    if swept.removed:
        store.remove_empty()
    return swept


def remove_step(store: Store) -> None:
    """Remove the checkpoint of a step: first its manifest, so that nobody finds half of it."""
    store.unname(_named(store))
    sweep(store)
    store.remove_empty()
