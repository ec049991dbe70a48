"""`BucketStore`: a folder in a bucket of Google Cloud Storage, with leases and compare-and-swap."""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from functree.errors import CheckpointError, CheckpointFileError
from functree.io.checkpoints.bucket_objects import Objects
from functree.io.checkpoints.lease import Lease, Term, give_up, is_dead
from functree.io.checkpoints.manifest import new_values_name
from functree.io.checkpoints.store import FAILED, LOCK, MANIFEST, Held, Store
from functree.io.extras import ForeignErrors, import_extra

ASKED_AFTER = 20.0
"""Seconds after which it is asked again whether a bucket answers."""

_ADDRESS = re.compile(r"gs://[^/]+(/[^/]+)*/?")

# Orbax and fsspec look for some of what they have written by patterns, as those of a shell, and
# resolve dots; what has a line end is no address for tensorstore.
_UNUSABLE = re.compile(r"[*?\[\]#\x00-\x1f\x7f]|(?<=/)\.\.?(?=/|$)")


class BucketStore(Store):
    """What is below an address in a bucket. There are no folders: one is there if something is in
    it.

    Args:
        path: the address.
        objects: what is below it.
    """

    def __init__(self, path: Any, objects: Objects):
        self.path: Path = path
        self._objects = objects
        self._reached = time.monotonic()

    @classmethod
    def of_address(cls, address: str) -> Self:
        """What is below an address.

        Raises:
            CheckpointError: it is not that of something in a bucket.
            FunctreeError: the extra is not installed.
        """
        if not _ADDRESS.fullmatch(address):
            raise CheckpointError(
                f"{address} is not the address of a folder in a bucket, such as gs://bucket/run/1"
            )
        if found := _UNUSABLE.search(address):
            raise CheckpointError(
                f"{address!r} has {found.group()!r} in it, which orbax takes for something else "
                "than a name: save to another address"
            )
        path: Any = import_extra("etils.epath", "gcs").Path(address.rstrip("/"))
        with ForeignErrors(CheckpointFileError, f"{address} cannot be opened"):
            return cls(path, Objects.below_path(str(path)))

    def at(self, name: str) -> Self:
        return type(self)(self.path / name, self._objects.below(name))

    def names(self) -> list[str]:
        return self._objects.names()

    def missing(self) -> str:
        return "" if self.names() else "there is nothing at this address"

    def check_reached(self) -> None:
        # Orbax tries for many minutes, in threads of its own.
        if time.monotonic() > self._reached + ASKED_AFTER:
            self.has_manifest()
            self._reached = time.monotonic()

    def check_place(self) -> None:
        """Nothing is in the way: an object of the same name is another one."""

    def is_link(self) -> bool:
        return False

    def is_mark(self, name: str) -> bool:
        return Term.from_json(self._objects.read(name).data) is not None

    def has_manifest(self) -> bool:
        return self._objects.read(MANIFEST).data is not None

    def read(self) -> bytes | None:
        return self._objects.read(MANIFEST).data

    def with_manifest(self, names: Sequence[str]) -> list[str]:
        found = self._objects.existing([f"{name}/{MANIFEST}" for name in names])
        return [one.partition("/")[0] for one in found]

    def make(self) -> bool:
        return False

    def hold(self, overwrite: bool) -> Held:
        return Lease(self._objects, new_values_name(), overwrite)

    def unname(self, old: str | None) -> None:
        if old is not None:
            give_up(self._objects, old)
        self._objects.remove(MANIFEST)

    @contextmanager
    def dead(self, name: str) -> Iterator[bool]:
        yield is_dead(self._objects, name)

    def tell_failure(self, name: str) -> None:
        # Among the values, which go together. Without the lease nothing would be left to go by it.
        if self.is_mark(f"{name}{LOCK}"):
            nothing = self._objects.read(f"{name}/{FAILED}")
            self._objects.write(f"{name}/{FAILED}", b"", nothing.generation)

    def is_told_failure(self, name: str) -> bool:
        return bool(self._objects.existing([f"{name}/{FAILED}"]))

    def remove(self, name: str) -> None:
        self._objects.remove(name)

    def remove_empty(self) -> None:
        """Nothing is left of a folder in which nothing is."""


def is_in_bucket(path: object) -> bool:
    """Whether a path is the address of something in a bucket."""
    return str(path).startswith("gs://")
