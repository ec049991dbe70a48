"""The folder of a checkpoint: its manifest, and beside it a folder with the values of the arrays.

The manifest is the last file that is written, and it names the folder of the values. So a folder
without one is not a checkpoint, a manifest that replaces another replaces a checkpoint whole, and
what it does not name is not part of it. A writer holds a lock for what it writes, and the file of
the lock stays beside the values: it is the mark that they are functree's. What has this mark, and
nobody has locked and no manifest names, was left by a process that died. Nothing else is ever
removed.
"""

import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax

from functree.errors import CheckpointError, CheckpointFileError
from functree.io.checkpoints.manifest import BEGINNING, Manifest, is_values_name
from functree.io.extras import ForeignErrors

MANIFEST = "functree.json"
_VALUES, _LOCK = "arrays-", ".lock"
# What a writer makes beside the folder of the values: the lock, the text of the manifest before it
# has its name, and the folder of orbax that becomes that of the values at the end.
_BESIDE = (_LOCK, ".json", ".orbax-checkpoint-tmp")


def files(failure: str) -> ForeignErrors:
    """What is raised inside, while files are read or written, becomes a CheckpointFileError."""
    return ForeignErrors(CheckpointFileError, failure)


def local(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a checkpoint.

    Raises:
        CheckpointError: it is the address of a bucket; there is no folder that it begins in.
    """
    text = os.fspath(path)
    if "://" in text:
        raise CheckpointError(
            f"{text} is the address of a bucket, and checkpoints are written to a file system that "
            "all processes share, with locks and links: save there, and copy what is finished to "
            "the bucket"
        )
    # Absolute at once: a program may change its folder while this is written in the background.
    with files(f"{text} cannot be found"):  # no such user, or the current folder was removed
        return Path(text).expanduser().absolute()


def read_manifest(path: Path) -> Manifest:
    """What the checkpoint in a folder says about itself.

    Raises:
        CheckpointError: it is not a checkpoint, or its manifest is not what was written.
    """
    try:
        if _is_no_file(path / MANIFEST):
            raise CheckpointFileError(f"{path / MANIFEST} cannot be read: it is not a file")
        text = (path / MANIFEST).read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        with files(f"{path} cannot be read"):
            why = _no_manifest(path)
        raise CheckpointFileError(f"{path} is not a checkpoint: {why}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointFileError(f"{path / MANIFEST} cannot be read: {error}") from error
    return Manifest.from_json(text, path / MANIFEST)


def _is_no_file(path: Path) -> bool:
    """Whether something else than a file is there, such as a folder."""
    # Opening a pipe would wait for who writes to it, and a device may have no end.
    return path.exists() and not path.is_file()


def _no_manifest(path: Path) -> str:
    """What there is in the place of a checkpoint."""
    if not path.is_dir():
        if path.is_symlink():
            return f"it is a link to {os.readlink(path)}, which is not a folder"
        return "it is a file" if path.exists() else "there is no such folder"
    if any(map(_is_own, path.glob(f"{_VALUES}*"))):
        return f"it has no {MANIFEST}, so it is still written, or its writer was stopped"
    steps = sorted(int(one.name) for one in path.iterdir() if is_step(one))
    if steps:
        latest = path / str(steps[-1])
        return f"it has the checkpoints of several steps: give one of them, such as {latest}"
    return f"it has no {MANIFEST}"


def is_step(path: Path) -> bool:
    """Whether a path is a checkpoint that is named by a step."""
    name = path.name
    # A folder called `007`, or by the digits of another script, would be one step with `7`.
    if not (name.isascii() and name.isdigit() and str(int(name)) == name):
        return False
    return (path / MANIFEST).is_file()


class Draft:
    """The values of a checkpoint that is being written.

    Args:
        path: the folder of the checkpoint. It is created.
        overwrite: whether a checkpoint that is there is replaced.

    Raises:
        CheckpointError: the path has something that is not to be overwritten; it cannot be created.
    """

    def __init__(self, path: Path, overwrite: bool):
        self.path: Path = path
        self.name: str
        self._overwrite, self._lock = overwrite, None
        with files(f"{path} cannot be written"):
            check_free(path, overwrite)
            self._is_new = _is_made(path)
            self.name, self._lock = _locked(path)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest: from here on this is the checkpoint.

        Raises:
            CheckpointError: another writer was first, or the file cannot be written.
        """
        written = self.path / f"{self.name}.json"
        with files(f"{self.path} cannot be written"):
            # Under another name first: a process that is killed while it writes leaves half a file,
            # which under its own name would be a checkpoint that cannot be read.
            try:
                _write(written, manifest.to_json())
                self._name_it(written)
            finally:
                written.unlink(missing_ok=True)
            # In this order: until the manifest names the values, only the held lock keeps another
            # process from deleting them. What is swept is the checkpoint that was replaced.
            self._release()
            sweep(self.path)

    def _name_it(self, written: Path) -> None:
        """Give the manifest its name, in one step."""
        if self._overwrite:
            _mark(self.path)
            os.replace(written, self.path / MANIFEST)
            return
        # A link, which fails if there is one: to look first would leave a moment in which another
        # process may save, and its checkpoint would be replaced without a word.
        try:
            os.link(written, self.path / MANIFEST)
        except FileExistsError:
            raise CheckpointFileError(
                f"{self.path}: another process has saved a checkpoint there meanwhile"
            ) from None

    def discard(self) -> None:
        """Remove what was written."""
        with files(f"{self.path}: what was written cannot be removed"):
            self._release()
            sweep(self.path)
            # A folder that was there before is the user's, also if nothing is in it.
            if self._is_new:
                _remove_empty(self.path)

    def _release(self) -> None:
        """Give the lock back."""
        # It may have been given back already, by a commit that failed after it.
        if self._lock is not None:
            import fcntl

            # To close the file is not enough: a process that was forked meanwhile, such as one that
            # loads data, has it open too, and would hold the lock as long as it runs.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None


def check_free(path: Path, overwrite: bool) -> None:
    """Raise CheckpointError if a path has something that a checkpoint must not replace."""
    if (path / MANIFEST).exists():
        if not overwrite:
            raise CheckpointFileError(
                f"{path} is a checkpoint already: save to another path, or with `overwrite=True`"
            )
        if is_foreign(path):
            raise CheckpointFileError(
                f"{path / MANIFEST} was not written by functree, and is not overwritten: save to "
                "another path"
            )
    elif os.path.lexists(path) and not path.is_dir():
        what = "a link that does not lead to a folder" if path.is_symlink() else "a file"
        raise CheckpointFileError(f"{path} is {what}: save to another path")
    elif path.is_dir():
        # What another writer has left, or still writes, is no obstacle: one of them will be first.
        # It may be gone meanwhile, and its lock with it.
        others = [one.name for one in path.iterdir() if not _is_own(one) and os.path.lexists(one)]
        if others:
            raise CheckpointFileError(
                f"{path} is a folder that is not a checkpoint: it has `{min(others)}`; "
                "save elsewhere"
            )


def is_foreign(path: Path) -> bool:
    """Whether a folder has a manifest that functree has not written."""
    # By its first bytes: one that is damaged further on may be replaced. One that another program
    # has formatted anew begins otherwise, and can still be read.
    if _is_no_file(path / MANIFEST):
        return True
    try:
        with (path / MANIFEST).open("rb") as file:
            if file.read(len(BEGINNING)) == BEGINNING:
                return False
    except FileNotFoundError:
        return False  # another process has removed the checkpoint
    try:
        read_manifest(path)
    except CheckpointError:
        return True
    return False


def _is_own(path: Path) -> bool:
    """Whether a file, or a folder, was made by a writer: by its whole name and its mark."""
    name, dot, _ = path.name.partition(".")
    if not is_values_name(name):
        return False
    if dot and not path.name.startswith(tuple(f"{name}{end}" for end in _BESIDE)):
        return False
    try:
        lock = os.lstat(path.with_name(f"{name}{_LOCK}"))
    except FileNotFoundError:
        return False
    return stat.S_ISREG(lock.st_mode) and lock.st_size == 0


def _mark(path: Path) -> None:
    """Mark the values of the checkpoint in a folder, before its manifest goes."""
    # The first versions removed the lock of a checkpoint that was whole.
    try:
        name = read_manifest(path).arrays
    except CheckpointError:
        return  # nobody knows which values are its
    if name is not None and (path / name).is_dir():
        (path / f"{name}{_LOCK}").touch()


# Seconds after which what one machine has written to a network file system is seen by the others.
_SEEN_AFTER = 5


def check_seen(values: Path) -> None:
    """Raise CheckpointError if this process does not see what the first one writes."""
    until = time.monotonic() + _SEEN_AFTER
    # Before orbax begins: on a folder of its own each process would write a part, and none of them
    # would notice that the others are missing. By a list of the folder: a network file system may
    # remember of a file that it was not there.
    while not (values.parent.is_dir() and f"{values.name}{_LOCK}" in os.listdir(values.parent)):
        if time.monotonic() < until:
            time.sleep(0.05)
            continue
        raise CheckpointFileError(
            f"process {jax.process_index()} does not see the folder {values.parent} that process 0 "
            "writes to: give a path on a file system that all processes share"
        )


def _is_made(path: Path) -> bool:
    """Whether a folder is made here; False if it was there."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _locked(path: Path) -> tuple[str, int]:
    """A new name for values, and its open lock."""
    # Imported here: there is none on Windows, where nothing else of functree needs it.
    import fcntl

    while True:
        path.mkdir(parents=True, exist_ok=True)
        name = f"{_VALUES}{uuid.uuid4().hex[:12]}"
        lock = path / f"{name}{_LOCK}"
        try:
            opened = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        except FileNotFoundError:
            continue  # another process has removed the folder, which was empty
        with ExitStack() as undo:
            undo.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX)
            # Between the last two lines nobody held the lock: another process may have taken it for
            # that of a dead one, and deleted the file. Then it locks nothing.
            if lock.exists():
                undo.pop_all()
                return name, opened


@contextmanager
def _if_dead(lock: Path) -> Iterator[bool]:
    """Whether no process holds a lock. Inside nobody can take it."""
    import fcntl

    with ExitStack() as undo:
        try:
            opened = os.open(lock, os.O_RDWR)
        except FileNotFoundError:
            yield True
            return
        undo.callback(os.close, opened)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def sweep(path: Path) -> bool:
    """Remove what dead processes have left in the folder of a checkpoint; whether there was any."""
    swept = False
    for name in sorted({one.name.partition(".")[0] for one in path.glob(f"{_VALUES}*")}):
        if not _left(path, name):
            continue
        # The lock is looked at before the manifest, since a writer releases it after its manifest
        # is there. The other way round, one that commits in between would lose its values.
        with _if_dead(path / f"{name}{_LOCK}") as dead:
            if not dead:
                continue
            left = _left(path, name)
            for one in left:
                # The lock is the last to go: while it is there, a process that is killed here, or
                # that may not delete all, leaves what the next one finds by it.
                if one.suffix != _LOCK or not any(map(os.path.lexists, left[:-1])):
                    _delete(one)
                    swept = True
    return swept


def _left(path: Path, name: str) -> list[Path]:
    """What is not of the checkpoint, of what the writer of the values of this name has made: the
    lock comes last."""
    found = [one for one in path.glob(f"{name}*") if _is_own(one)]
    if found and _is_named(path, name):
        found = [one for one in found if one.name not in (name, f"{name}{_LOCK}")]
    return sorted(found, key=lambda one: one.suffix == _LOCK)


def _delete(path: Path) -> None:
    """Delete a file, a link, or a folder with all that is in it; another process may do so too."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_empty(path: Path) -> None:
    """Remove a folder if nothing is in it."""
    try:
        path.rmdir()
    except OSError:
        return


def _is_named(path: Path, name: str) -> bool:
    """Whether the values of this name are those of the checkpoint, or may be."""
    try:
        return read_manifest(path).arrays == name
    except CheckpointError:
        # A manifest that cannot be read may name these: nothing is removed.
        return (path / MANIFEST).exists()


def sweep_step(path: Path) -> None:
    """Remove what dead processes have left of the checkpoint of a step, with its folder."""
    if sweep(path):
        _remove_empty(path)


def remove_step(path: Path) -> None:
    """Remove the checkpoint of a step: first its manifest, so that nobody finds half of it."""
    _mark(path)
    (path / MANIFEST).unlink(missing_ok=True)
    sweep(path)
    _remove_empty(path)


def _write(path: Path, text: str) -> None:
    """Write a file that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
