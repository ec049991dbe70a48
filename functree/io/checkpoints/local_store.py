"""`LocalStore`: a folder of a file system that all processes share, with locks and links."""

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from functree.errors import CheckpointFileError
from functree.io.checkpoints.manifest import new_values_name
from functree.io.checkpoints.store import FAILED, LOCK, MANIFEST, UNFINISHED, Held, Store


class _Lock:
    """A file that is locked as long as a process writes."""

    def __init__(self, folder: Path, name: str, overwrite: bool, opened: int):
        self.name, self.overwrite = name, overwrite
        self._folder = folder
        self._opened: int | None = opened

    def put(self, text: str, old: str | None) -> bool:
        written = self._folder / f"{self.name}.json"
        # Under another name first: a process that is killed while it writes leaves half a file,
        # which under its own name would be a checkpoint that cannot be read.
        try:
            _write(written, text)
            if self.overwrite:
                _mark(self._folder, old)
                os.replace(written, self._folder / MANIFEST)
                return True
            # A link, which fails if there is one: to look first would leave a moment in which
            # another process may save, and its checkpoint would be replaced without a word.
            os.link(written, self._folder / MANIFEST)
        except FileExistsError:
            return False
        finally:
            written.unlink(missing_ok=True)
        return True

    def release(self) -> None:
        """Give the lock back."""
        # It may have been given back already, by a commit that failed after it.
        if self._opened is not None:
            import fcntl

            # To close the file is not enough: a process that was forked meanwhile, such as one that
            # loads data, has it open too, and would hold the lock as long as it runs.
            fcntl.flock(self._opened, fcntl.LOCK_UN)
            os.close(self._opened)
            self._opened = None


class LocalStore(Store):
    """A folder of a file system. A manifest takes its place by a link or a rename."""

    def __init__(self, path: Path):
        self.path = path

    def at(self, name: str) -> Self:
        return type(self)(self.path / name)

    def names(self) -> list[str]:
        return os.listdir(self.path) if self.path.is_dir() else []

    def missing(self) -> str:
        if self.path.is_dir():
            return ""
        if self.path.is_symlink():
            return f"it is a link to {os.readlink(self.path)}, which is not a folder"
        return "it is a file" if self.path.exists() else "there is no such folder"

    def check_reached(self) -> None:
        """Nothing: the operating system says so to who writes."""

    def check_place(self) -> None:
        if os.path.lexists(self.path) and not self.path.is_dir():
            is_link = self.path.is_symlink()
            what = "a link that does not lead to a folder" if is_link else "a file"
            raise CheckpointFileError(f"{self.path} is {what}: save to another path")

    def is_link(self) -> bool:
        return self.path.is_symlink()

    def is_mark(self, name: str) -> bool:
        try:
            lock = os.lstat(self.path / name)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(lock.st_mode) and lock.st_size == 0

    def has_manifest(self) -> bool:
        return (self.path / MANIFEST).exists()

    def read(self) -> bytes | None:
        manifest = self.path / MANIFEST
        # Opening a pipe would wait for who writes to it, and a device may have no end.
        if manifest.exists() and not manifest.is_file():
            raise CheckpointFileError(f"{manifest} cannot be read: it is not a file")
        try:
            return manifest.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def with_manifest(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if (self.path / name / MANIFEST).is_file()]

    def make(self) -> bool:
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            return False
        return True

    def hold(self, overwrite: bool) -> Held:
        # Imported here: there is none on Windows, where nothing else of functree needs it.
        import fcntl

        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            name = new_values_name()
            lock = self.path / f"{name}{LOCK}"
            try:
                opened = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR)
            except FileNotFoundError:
                continue  # another process has removed the folder, which was empty
            with ExitStack() as undo:
                undo.callback(os.close, opened)
                fcntl.flock(opened, fcntl.LOCK_EX)
                # Between the last two lines nobody held the lock: another process may have taken it
                # for that of a dead one, and deleted the file. Then it locks nothing.
                if lock.exists():
                    undo.pop_all()
                    return _Lock(self.path, name, overwrite, opened)

    def unname(self, old: str | None) -> None:
        _mark(self.path, old)
        (self.path / MANIFEST).unlink(missing_ok=True)

    @contextmanager
    def dead(self, name: str) -> Iterator[bool]:
        import fcntl

        with ExitStack() as undo:
            try:
                opened = os.open(self.path / f"{name}{LOCK}", os.O_RDWR)
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

    def tell_failure(self, name: str) -> None:
        # In the folder of orbax, which goes as a whole. Where that is gone already, the first
        # process has given up by itself.
        (self.path / f"{name}{UNFINISHED}" / FAILED).touch()

    def is_told_failure(self, name: str) -> bool:
        return os.path.lexists(self.path / f"{name}{UNFINISHED}" / FAILED)

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def remove_empty(self) -> None:
        try:
            self.path.rmdir()
        except OSError:
            return


def _mark(folder: Path, name: str | None) -> None:
    """Mark the values of a manifest, before it goes."""
    # The first versions removed the lock of a checkpoint that was whole.
    if name is not None and (folder / name).is_dir():
        (folder / f"{name}{LOCK}").touch()


def _write(path: Path, text: str) -> None:
    """Write a file that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
