"""`Lease`: what a lock is on a disk, in a bucket: an object that its writer renews while it lives.

Others tell by the clock of the bucket for how long it was not renewed; no two clocks are compared.
It changes by compare-and-swap alone. So of a writer that commits, and another that takes it for
dead, one is first, and the other one sees it: what is being committed is never deleted, and a
writer that was asleep for so long does not commit.
"""

import json
import threading
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from functree.errors import CheckpointFileError
from functree.io.checkpoints.bucket_objects import Objects
from functree.io.checkpoints.manifest import new_values_name
from functree.io.checkpoints.store import LOCK, MANIFEST

RENEWED_AFTER = 20.0
"""Seconds between two renewals."""

DEAD_AFTER = timedelta(minutes=2)
"""Without a renewal for so long, a writer is dead."""

# A writer that has announced its manifest needs no more than a moment to write it. It cannot be
# stopped any more; so what it has written stays for so long, if nothing shows that it failed.
_COMMITTED_FOR = timedelta(hours=24)

_WRITING, _COMMITTED, _DEAD = "writing", "committed", "dead"


class Term(NamedTuple):
    """What a lease says.

    Attributes:
        state: whether its writer writes, has announced its manifest, or is taken for dead.
        replaces: the generation of the manifest in whose place its own one comes: that of none, if
            there was none.
        renewals: how often it was renewed.
    """

    state: str
    replaces: str
    renewals: int

    def to_json(self) -> bytes:
        """The object."""
        return json.dumps({"functree": "lease", **self._asdict()}).encode()

    @classmethod
    def from_json(cls, data: bytes | None) -> "Term | None":
        """What an object says; None if it is no lease."""
        try:
            found = json.loads(data or b"")
            if found.pop("functree") == "lease":
                return cls(**found)
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
        return None


class Lease:
    """A name for values that is held as long as its writer lives.

    Args:
        objects: those of the folder.
        name: the name. It is new.
        overwrite: whether its manifest may replace one.

    Attributes:
        name: the name.
        overwrite: as given.
    """

    def __init__(self, objects: Objects, name: str, overwrite: bool):
        self.name: str = name
        self.overwrite: bool = overwrite
        self._objects, self._key = objects, f"{name}{LOCK}"
        # Of no object, of whatever name: what is written with it is new.
        self._generation = self._replaced = objects.read(self._key).generation
        if overwrite:
            self._replaced = objects.read(MANIFEST).generation
        self._term = Term(_WRITING, self._replaced.hex(), 0)
        self._swapping = threading.Lock()
        self._ended = threading.Event()
        self._swap(_WRITING)
        # A daemon: a program that ends while it writes must not wait for it.
        threading.Thread(target=self._renew, name="functree lease", daemon=True).start()

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_AFTER):
            # If the bucket does not answer, it is tried again: at the end the writer sees whether
            # it was taken for dead meanwhile.
            with suppress(OSError, CheckpointFileError):
                self._swap(_WRITING)

    def put(self, text: str, old: str | None) -> bool:
        """Make a text the manifest, if nobody has taken this writer for dead.

        Returns:
            False if another writer was first.

        Raises:
            CheckpointFileError: somebody has taken it for dead.
        """
        self._ended.set()
        # Announced first: from here on what it has written is not removed.
        self._swap(_COMMITTED)
        data = text.encode()
        generation = self._objects.write(MANIFEST, data, self._replaced)
        if generation is None:
            # The answer to a first attempt may have been lost, and not the attempt.
            found = self._objects.read(MANIFEST)
            if found.data != data:
                self._give_up()
                return False
            generation = found.generation
        # Another writer may have been first, and its checkpoint been removed meanwhile. Then the
        # manifest was written as if nobody had been there, and the values are gone.
        term = Term.from_json(self._objects.read(self._key).data)
        if term is None or term.state == _DEAD:
            self._objects.write(MANIFEST, None, generation)
            return False
        return True

    def _give_up(self) -> None:
        """Declare this writer dead: its manifest will not come."""
        self._ended.set()
        # Who has taken it for dead before removes what it has written.
        with suppress(CheckpointFileError):
            self._swap(_DEAD)

    def release(self) -> None:
        """No longer renew it. What was not committed is given up."""
        # If it was, the manifest is there, or may still come.
        if self._term.state == _WRITING:
            self._give_up()

    def _swap(self, state: str) -> None:
        """Write the lease, if it is still that of a living writer."""
        with self._swapping:
            if state == _WRITING and self._ended.is_set():
                return  # a renewal that has waited while another state was written
            term = self._term._replace(state=state, renewals=self._term.renewals + 1)
            written = self._objects.write(self._key, term.to_json(), self._generation)
            if written is None:
                # The answer to an earlier attempt may have been lost, and not the attempt.
                found = self._objects.read(self._key)
                now = Term.from_json(found.data)
                if now is not None and now.state != _DEAD:
                    written = self._objects.write(self._key, term.to_json(), found.generation)
            if written is None:
                raise CheckpointFileError(
                    f"this process has not renewed its lease for {_minutes(DEAD_AFTER)} and was "
                    "taken for dead by another one, which has removed what was written: save again"
                )
            self._term, self._generation = term, written


def is_dead(objects: Objects, name: str) -> bool:
    """Whether nobody holds a name any more. Then nobody can take it again."""
    key = f"{name}{LOCK}"
    found = objects.read(key)
    term = Term.from_json(found.data)
    if term is None or term.state == _DEAD:
        return True
    limit = DEAD_AFTER
    if term.state == _COMMITTED:
        limit = _COMMITTED_FOR
        manifest = objects.read(MANIFEST)
        if manifest.generation.hex() != term.replaces:
            # If the one that is there is not its own, that will be rejected if it still comes.
            if name.encode() in (manifest.data or b""):
                return False
            limit = timedelta()
    if limit and _age(objects, key) < limit:
        return False
    dead = term._replace(state=_DEAD)
    return objects.write(key, dead.to_json(), found.generation) is not None


def give_up(objects: Objects, name: str) -> None:
    """Take the writer of what a manifest names for dead, before this manifest is removed."""
    # Else its lease would be that of one whose manifest is still to come.
    found = objects.read(f"{name}{LOCK}")
    if (term := Term.from_json(found.data)) is not None:
        objects.write(f"{name}{LOCK}", term._replace(state=_DEAD).to_json(), found.generation)


def _age(objects: Objects, key: str) -> timedelta:
    """For how long an object was not written, by the clock of the bucket."""
    try:
        written = objects.written(key)
    except FileNotFoundError:
        return timedelta()  # another process has removed it: it is not known of what age it was
    # What time it is there is said by an object that is written now. It is a lease too, so that the
    # next writer removes it if this one is killed here.
    probe = f"{new_values_name()}{LOCK}"
    data = Term(_DEAD, "", 0).to_json()
    objects.write(probe, data, objects.read(probe).generation)
    try:
        return objects.written(probe) - written
    except FileNotFoundError:
        return timedelta()  # another process has removed it here too
    finally:
        objects.remove(probe)


def _minutes(time: timedelta) -> str:
    return f"{time.total_seconds() / 60:g} minutes"
