"""What is written in a `Folder`, in which order, and what may be removed of it.

The manifest is the last file that is written, and it names the folder of the values. So a folder
without one is not a checkpoint, a manifest that replaces another replaces a checkpoint whole, and
what it does not name is not part of it. What a writer makes has a name with twelve random digits.
What has such a name, and no manifest names, is removed after a day. Nothing else is ever removed.
"""

import os
import re
import time
from contextlib import suppress

import jax

from functree.errors import CheckpointError, CheckpointFileError
from functree.io.checkpoints.folder import MANIFEST, Folder, Found, files, is_in_bucket
from functree.io.checkpoints.manifest import BEGINNING, VALUES, Manifest, new_values_name

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
    rf"{VALUES}(\.orbax-checkpoint-tmp|\.begun|\.failed|\.lock|\.json)?"
    rf"|{re.escape(MANIFEST)}\.__lock"
)


def read_manifest(folder: Folder) -> Manifest:
    """What the checkpoint in a folder says about itself.

    Raises:
        CheckpointError: it is not a checkpoint, or its manifest is not what was written.
    """
    path = folder.path / MANIFEST
    try:
        found = folder.read().data
        if found is not None:
            return Manifest.from_json(found.decode(), path)
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointFileError(f"{path} cannot be read: {error}") from error
    with files(f"{folder.path} cannot be read"):
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
    return "there is nothing at this address" if is_in_bucket(folder.path) else "there is no such folder"


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
            self._replaced = _replaceable(folder, overwrite)
            self._old: str | None = _named(folder)
            self._is_new = folder.make()
            self._may_be_named = False  # by a manifest
            if jax.process_count() > 1:
                folder.touch(f"{self.name}{BEGUN}")

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
            # If there is no answer, the manifest may be there or may still come.
            self._may_be_named = True
            if not folder.commit(manifest.to_json(), self._replaced.generation):
                self._may_be_named = False
                raise CheckpointFileError(
                    f"{folder.path}: another process has saved a checkpoint there meanwhile"
                )
            folder.remove(f"{self.name}{BEGUN}")
            if self._old is not None:
                _remove_values(folder, self._old)
            sweep(folder)

    def discard(self) -> None:
        """Remove what was written, if that is possible."""
        # The rest goes after a day, as does what threads of orbax and other processes write later.
        if not self._may_be_named:
            with suppress(CheckpointError), files("what was written cannot be removed"):
                _remove_values(self._folder, self.name)
                # A folder that was there before is the user's, also if nothing is in it.
                if self._is_new:
                    self._folder.remove_empty()


def _replaceable(folder: Folder, overwrite: bool) -> Found:
    """The manifest that a new one may replace, or that there is none.

    Raises:
        CheckpointError: the path has something that a checkpoint must not replace.
    """
    path = folder.path
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
    if obstacle := folder.obstacle():
        raise CheckpointFileError(f"{path} is {obstacle}: save to another path")
    # What another writer has left, or still writes, is no obstacle, nor is the manifest that it has
    # written in this moment: one of them will be first.
    others = [name for name in folder.names() if name != MANIFEST and not _OWN.fullmatch(name)]
    if others:
        raise CheckpointFileError(
            f"{path} is a folder that is not a checkpoint: it has `{min(others)}`; save elsewhere"
        )
    return found


def is_foreign(folder: Folder) -> bool:
    """Whether a folder has a manifest that functree has not written."""
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
    """The name of the values of the checkpoint in a folder; None if nobody knows it."""
    try:
        return read_manifest(folder).arrays
    except CheckpointError:
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
    names = folder.names()
    own = [name for name in names if _OWN.fullmatch(name)]
    old = [name for name in own if folder.age(name) > _REMOVED_AFTER]
    # The manifest is read after the ages: one that comes later names nothing that is old.
    kept = None
    try:
        kept = read_manifest(folder).arrays
    except CheckpointError:
        if MANIFEST in names:
            return False  # it cannot be read, and may name these
    left = [name for name in own if kept is None or not name.startswith(kept)]
    removed = [name for name in left if name in old]
    for name in removed:
        folder.remove(name)
    if removed:
        folder.remove_empty()
    return len(removed) < len(left)


def remove_step(folder: Folder) -> None:
    """Remove the checkpoint of a step: first its manifest, so that nobody finds half of it."""
    old = _named(folder)
    folder.remove_manifest()
    if old is not None:
        _remove_values(folder, old)
    sweep(folder)
    folder.remove_empty()
