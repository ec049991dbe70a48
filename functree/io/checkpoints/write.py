"""A tree ─► a checkpoint: its arrays by orbax, and a manifest with a digest of each."""

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path as FilePath

import jax
import numpy as np

from functree.argument_checks import FILE, FLAG, check
from functree.errors import CheckpointError, CheckpointFileError, listed
from functree.io.checkpoints.contents import Contents
from functree.io.checkpoints.engine import (
    Response,
    StoredArray,
    Target,
    check_dtypes,
    import_orbax,
    is_done,
    load_arrays,
    start_saving,
)
from functree.io.checkpoints.folder import BEGUN, FAILED, Draft, Folder, files, folder_at
from functree.io.checkpoints.manifest import Manifest
from functree.processes.agreement import Agreement, wait_in_all
from functree.processes.digest import digests_of
from functree.processes.exchange import text_of_first
from functree.tree.arrays import Tree


def save(
    path: str | os.PathLike[str],
    tree: Tree,
    *,
    verify: bool = True,
    overwrite: bool = False,
    meta: object = None,
) -> None:
    """Save the arrays of a tree, each under its path. When this returns, the checkpoint is whole.

    Args:
        path: a folder, which is created. With several processes, one that all of them see. Or the
            address of one in a bucket, as text: `gs://bucket/run/1`.
        tree: concrete arrays, in modules and containers. Other leaves are static: they are not
            saved, and `ft.restore` warns of one that differs in `like`.
        verify: whether a digest of each array's values is kept, by which `ft.restore` notices that
            data have changed.
        overwrite: whether a checkpoint at this path is replaced: once the new one is whole and,
            with `verify=True`, was read back.
        meta: kept with the arrays and returned by `ft.inspect`: JSON values.

    Raises:
        CheckpointError: the path has something already; an array is traced, abstract, or not of all
            processes, has a mask or a dtype that JAX lacks; there is a mutable reference; `meta` is
            not JSON; the files cannot be written. What was at the path before is still there.
        FunctreeError: the processes do not save the same.

    Examples:
        >>> model = ft.nn.Linear(8, 16, key=jax.random.key(0))
        >>> ft.save(folder / "model", model, meta={"tokens": 1000})
        >>> print(ft.inspect(folder / "model").meta)
        {'tokens': 1000}
    """
    check("nothing is saved", path=(path, FILE), verify=(verify, FLAG), overwrite=(overwrite, FLAG))
    writer = CheckpointWriter(folder_at(path), tree, meta, verify=verify, overwrite=overwrite)
    with Agreement(f"{path} cannot be written"):
        writer.finish()


class CheckpointWriter:
    """Writes one checkpoint: its values in the background, and then its manifest.

    Once it is made, the arrays may be donated.

    Args:
        folder: the folder of the checkpoint.
        tree: what is saved.
        meta: what is kept with it.
        verify: whether digests are kept.
        overwrite: whether a checkpoint that is there is replaced, after the values were read back.
        step: the step of `ft.Checkpoints`.

    Raises:
        CheckpointError: as `save`.
    """

    def __init__(
        self,
        folder: Folder,
        tree: Tree,
        meta: object,
        *,
        verify: bool,
        overwrite: bool = False,
        step: int | None = None,
    ):
        self._folder, self._failure = folder, f"{folder.path} cannot be written"
        self._another = f"{self._failure}: another process could not do so"
        options = [f"verify={verify}, overwrite={overwrite}"]
        # Compared before the folder is made: processes that save other trees leave nothing behind.
        with Agreement(self._failure) as agreement:
            import_orbax()
            contents = Contents.of(tree, meta, step)
            agreement.compare(lambda: {**contents.facts(), "options": options})
        # By one process, since it makes up a name for the values. The others are told which.
        self._draft: Draft | None = None
        with Agreement(self._failure):
            if jax.process_index() == 0:
                self._draft = Draft(folder, overwrite)
        self._digests: dict[str, str] = {}
        self._targets: dict[str, Target] = {}  # what is read back
        self._given_up = threading.Event()
        self._looked = time.monotonic()
        with self._undone():
            name = text_of_first("" if self._draft is None else self._draft.name)
            self._values: FilePath = folder.path / name
            self._word = f"{name}{FAILED}"
            with Agreement(self._failure), files(self._failure):
                _check_seen(folder, name)
            self._manifest, self._response = self._started(contents, verify, check=overwrite)

    def _started(self, contents: Contents, verify: bool, check: bool) -> tuple[Manifest, Response]:
        """Start to write the values. The arrays are not kept: they would take memory until all is
        written.

        Returns:
            The manifest to write once the response is there.
        """
        # Digests before orbax begins: afterwards the arrays may be donated. And of the arrays, not
        # of what is on the disk, so that an error of the writing itself is noticed.
        if verify:
            self._digests, differ = digests_of(contents.stored)
            if differ:
                raise CheckpointError(self._failure, differ)
        if verify and check:
            self._targets = {name: _target(value) for name, value in contents.stored.items()}
        name = self._values.name if contents.stored else None
        with Agreement(self._failure), files(self._failure):
            response = start_saving(self._values, contents.stored)
        return contents.manifest.of_values(name, self._digests), response

    def finish(self) -> None:
        """Wait until the values are written, and write the manifest. All processes call this.

        Raises:
            CheckpointError: as `save`.
        """
        with self._undone():
            # Orbax would let the others wait for minutes for one that cannot write.
            wait_in_all(self._failure, self._is_written)
            # Before the manifest, which replaces the checkpoint that is there: if the disk has
            # other values than were saved, that one stays.
            self._read_back()
            self._commit()

    def finish_alone(self) -> None:
        """As `finish`, without a word between the processes: in the background.

        There, what one of them sends could come between the collectives of a step.

        Raises:
            CheckpointError: as `save`.
        """
        with self._undone():
            # Orbax waits until all processes have written, by JAX's coordination service and not
            # by collectives.
            try:
                while not self._is_written():
                    if self._given_up.is_set():
                        raise CheckpointFileError(self._another)
                    if time.monotonic() > self._looked + _LOOKED_AFTER:
                        self._looked = time.monotonic()
                        self._check_others()
            except CheckpointError:
                if not self._given_up.is_set():
                    self._tell_others()
                raise
            self._commit()

    def give_up(self) -> None:
        """End `finish_alone` in its thread: another process has failed."""
        self._given_up.set()

    def _check_others(self) -> None:
        """Raise CheckpointError if another process has left word that it could not write."""
        # For who leaves `with Checkpoints` by an error of its own: the processes do not talk then,
        # and orbax would wait for up to twenty minutes.
        with files(self._failure):
            if jax.process_count() > 1 and self._word in self._folder.names():
                raise CheckpointFileError(self._another)

    def _tell_others(self) -> None:
        """Leave word that this process could not write."""
        # If another one has done so, this one may miss what that has removed: it is the cause.
        self._check_others()
        if jax.process_count() > 1:
            # Nothing can be left where nothing can be written.
            with suppress(CheckpointError), files(self._failure):
                self._folder.write(self._word, b"")

    def _is_written(self) -> bool:
        with files(self._failure):
            self._folder.check_reached()
            return is_done(self._response)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What was written is removed if there is an error inside."""
        with ExitStack() as undo:
            if self._draft is not None:
                undo.callback(self._draft.discard)
            yield
            undo.pop_all()

    def _commit(self) -> None:
        """Write the manifest, in the first process."""
        # Last: it names the folder of the values, and from then on they are the checkpoint. Written
        # first it would name what is still missing if this process is killed.
        if self._draft is not None:
            self._draft.commit(self._manifest)

    def _read_back(self) -> None:
        """Raise if the disk has other values than were saved."""
        # Some arrays at a time: all of them would take the memory of a second model.
        while self._targets:
            group = self._next_targets()
            with Agreement(self._failure), files(f"{self._values} cannot be read"):
                stored = load_arrays(self._values, group)
            check_dtypes(stored, group)
            # Each process reads for itself, so that copies may differ: `torn`.
            found, torn = digests_of(stored)
            if differ := [name for name in group if torn or found[name] != self._digests[name]]:
                raise CheckpointFileError(
                    f"{self._failure}: other values are read from the disk for {listed(differ)}"
                )

    def _next_targets(self) -> dict[str, Target]:
        """Take the next targets, of about a gibibyte."""
        group: dict[str, Target] = {}
        size = 0
        while self._targets and size < 2**30:
            name, target = self._targets.popitem()
            group[name] = target
            size += math.prod(target.shape) * target.dtype.itemsize
        return group


# Seconds after which it is looked again for what another process has left word of.
_LOOKED_AFTER = 2.0

# Seconds after which what one machine has written to a network file system is seen by the others.
_SEEN_AFTER = 5


def _check_seen(folder: Folder, name: str) -> None:
    """Raise CheckpointError if this process does not see what the first one writes."""
    until = time.monotonic() + _SEEN_AFTER
    # Before orbax begins: on a folder of its own each process would write a part, and none of them
    # would notice that the others are missing. By a list of the folder: a network file system may
    # remember of a file that it was not there.
    while jax.process_count() > 1 and f"{name}{BEGUN}" not in folder.names():
        if time.monotonic() > until:
            raise CheckpointFileError(
                f"process {jax.process_index()} does not see the folder {folder.path} that process "
                "0 writes to: give a path on a file system that all processes share"
            )
        time.sleep(0.05)


def _target(value: StoredArray) -> Target:
    """What is read back of an array."""
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
    return np.empty(value.shape, value.dtype)
