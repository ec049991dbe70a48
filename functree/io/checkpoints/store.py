"""`Store`: where a checkpoint is kept, as its protocol (`folder.py`) sees it.

The protocol is one; how it is known that a writer lives, and how a manifest takes its place in one
step, is another matter on a disk than in a bucket.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

MANIFEST = "functree.json"
LOCK = ".lock"
FAILED = "functree.failed"
UNFINISHED = ".orbax-checkpoint-tmp"


class Held(Protocol):
    """What a writer holds as long as it writes: nobody removes the values of this name.

    Attributes:
        name: the name of the values.
        overwrite: whether its manifest may replace one.
    """

    name: str
    overwrite: bool

    def put(self, text: str, old: str | None) -> bool:
        """Make a text the manifest, in one step.

        Args:
            text: the text.
            old: the name of the values of the one that it replaces, if it is known.

        Returns:
            False if another writer was first.
        """
        ...

    def release(self) -> None:
        """Let go of it; nothing, if that was done before."""


class Store(ABC):
    """What is in one folder: that of a checkpoint, or that of the steps of a run.

    Its operations raise OSError, or CheckpointFileError where they know more.

    Attributes:
        path: the folder, as in messages and for orbax.
    """

    path: Path

    @abstractmethod
    def at(self, name: str) -> Self:
        """What is in a folder of this one."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names in this folder; none if there is no folder."""

    @abstractmethod
    def missing(self) -> str:
        """Why there is no folder; no text if there is one."""

    @abstractmethod
    def check_reached(self) -> None:
        """Raise OSError if what is here cannot be reached any more. Called often."""

    @abstractmethod
    def check_place(self) -> None:
        """Raise CheckpointFileError if something else than a folder is in the place of this one."""

    @abstractmethod
    def is_link(self) -> bool:
        """Whether this is only a link to a folder that is elsewhere."""

    @abstractmethod
    def is_mark(self, name: str) -> bool:
        """Whether a name is that of what a writer has held, or holds."""

    @abstractmethod
    def has_manifest(self) -> bool:
        """Whether something has the name of the manifest."""

    @abstractmethod
    def read(self) -> bytes | None:
        """The manifest; None if there is none.

        Raises:
            CheckpointFileError: there is something that is not a file.
        """

    @abstractmethod
    def with_manifest(self, names: Sequence[str]) -> list[str]:
        """Those of these folders in this one that have a manifest."""

    @abstractmethod
    def make(self) -> bool:
        """Make the folder; whether it was not there."""

    @abstractmethod
    def hold(self, overwrite: bool) -> Held:
        """A new name for values, which is held.

        Args:
            overwrite: whether its manifest may replace one.
        """

    @abstractmethod
    def unname(self, old: str | None) -> None:
        """Remove the manifest, which names the values `old`, if that is known."""

    @abstractmethod
    def dead(self, name: str) -> AbstractContextManager[bool]:
        """Whether nobody holds a name any more. Inside nobody can take it."""

    @abstractmethod
    def tell_failure(self, name: str) -> None:
        """Leave word to other processes that this one cannot write its part of the values of a
        name."""

    @abstractmethod
    def is_told_failure(self, name: str) -> bool:
        """Whether a process has left word that it cannot write its part of the values of a name."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; another process may do so too."""

    @abstractmethod
    def remove_empty(self) -> None:
        """Remove this folder if nothing is in it."""
