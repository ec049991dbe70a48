"""The folder of a checkpoint: its manifest, and beside it a folder with the values of the arrays.

The manifest is the last file that is written, and it names the folder of the values. So a folder
without one is not a checkpoint, a manifest that replaces another replaces a checkpoint whole, and
what it does not name is not part of it. A writer holds a lock for what it writes. What nobody has
locked and no manifest names was left by a process that died.
"""

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax

from functree.errors import CheckpointError, CheckpointFileError
from functree.io.checkpoints.manifest import Manifest
from functree.io.extras import ForeignErrors

MANIFEST = "functree.json"
_VALUES, _LOCK = "arrays-", ".lock"


def files(failure: str) -> ForeignErrors:
    """What is raised inside, while files are read or written, becomes a CheckpointFileError."""
    return ForeignErrors(CheckpointFileError, failure)


def local(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a checkpoint.

    Raises:
        CheckpointError: it is the address of a bucket.
    """
    text = os.fspath(path)
    if "://" in text:
        raise CheckpointError(
            f"{text} is the address of a bucket, and checkpoints are written to a file system that "
            "all processes share, with locks and links: save there, and copy what is finished to "
            "the bucket"
        )
    # Absolute at once: a program may change its folder while this is written in the background.
    return Path(text).expanduser().absolute()


def read_manifest(path: Path) -> Manifest:
    """What the checkpoint in a folder says about itself.

    Raises:
        CheckpointError: it is not a checkpoint, or its manifest is not what was written.
    """
    try:
        text = (path / MANIFEST).read_bytes().decode()
    except FileNotFoundError:
        raise CheckpointFileError(f"{path} is not a checkpoint: {_no_manifest(path)}") from None
    except NotADirectoryError:
        raise CheckpointFileError(f"{path} is not a checkpoint: it is a file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointFileError(f"{path / MANIFEST} cannot be read: {error}") from error
    return Manifest.from_json(text, path / MANIFEST)


def _no_manifest(path: Path) -> str:
    """What there is in the place of a checkpoint."""
    if not path.is_dir():
        return "there is no such folder"
    if any(path.glob(f"{_VALUES}*")):
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
            # In this order: until the manifest names the values, the lock alone keeps another
            # process from deleting them. What is swept is the checkpoint that was replaced.
            self._release()
            sweep(self.path)

    def _name_it(self, written: Path) -> None:
        """Give the manifest its name, in one step."""
        if self._overwrite:
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
        self._release()
        sweep(self.path)

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
    elif path.exists() and not path.is_dir():
        raise CheckpointFileError(f"{path} is a file: save to another path")
    elif path.is_dir():
        # What another writer has left, or still writes, is no obstacle: one of them will be first.
        others = [one.name for one in path.iterdir() if not one.name.startswith(_VALUES)]
        if others:
            raise CheckpointFileError(
                f"{path} is a folder that is not a checkpoint: it has `{min(others)}`; "
                "save elsewhere"
            )


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


def sweep(path: Path) -> None:
    """Remove what dead processes have left in the folder of a checkpoint, and the folder if it is
    empty then."""
    for name in sorted({one.name.partition(".")[0] for one in path.glob(f"{_VALUES}*")}):
        # The lock is looked at before the manifest, since a writer releases it after its manifest
        # is there. The other way round, one that commits in between would lose its values.
        with _if_dead(path / f"{name}{_LOCK}") as dead:
            if not dead:
                continue
            is_kept = _is_named(path, name)
            # orbax writes into a folder of its own beside the one that it is to become, and renames
            # it at the end. The lock is the last to go: while it is there, a process that is killed
            # here leaves what the next one finds by it.
            for one in sorted(path.glob(f"{name}*"), key=lambda one: one.suffix == _LOCK):
                if not (is_kept and one.name == name):
                    _delete(one)
    try:
        path.rmdir()
    except OSError:
        return  # it is not empty


def _delete(path: Path) -> None:
    """Delete a file, or a folder with all that is in it; another process may do so too."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_named(path: Path, name: str) -> bool:
    """Whether the values of this name are those of the checkpoint, or may be."""
    try:
        return read_manifest(path).arrays == name
    except CheckpointError:
        # A manifest that cannot be read may name these: nothing is removed.
        return (path / MANIFEST).exists()


def remove(path: Path) -> None:
    """Remove a checkpoint: first its manifest, so that nobody finds half of it."""
    (path / MANIFEST).unlink(missing_ok=True)
    sweep(path)


def _write(path: Path, text: str) -> None:
    """Write a file that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
