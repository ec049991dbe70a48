"""`save` writes a checkpoint: the arrays with orbax, and a manifest with their digests."""

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path as FilePath
from typing import Annotated

import jax
import numpy as np

from functree.argument_checks import FILE, Flag, checked
from functree.errors import CheckpointError, CheckpointFileError, listed
from functree.io.checkpoints.contents import Contents
from functree.io.checkpoints.engine import (
    Response,
    StoredArray,
    Target,
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


@checked("save: invalid arguments")
def save(
    path: Annotated[str | os.PathLike[str], FILE],
    tree: Tree,
    *,
    verify: Flag = True,
    overwrite: Flag = False,
    meta: object = None,
) -> None:
    """Save the arrays of a tree by path. When `save` returns, the checkpoint is complete.

    If `save` raises an error, an earlier checkpoint at the path is kept, unless the new checkpoint
    is already complete.

    Args:
        path: a new folder that all processes share, or its address in a bucket:
            `gs://bucket/run/1`.
        tree: modules and containers with concrete arrays. Other leaves are static. They are not
            restored, but `ft.restore` warns if they differ in `like`.
        verify: whether digests of the values are saved. `ft.restore` uses them to detect changed
            data.
        overwrite: whether a checkpoint at this path is replaced. The old checkpoint is replaced
            once the new one is complete. With `verify=True`, the new values are first read back.
        meta: JSON values that are saved with the arrays. `ft.inspect` returns them.

    Raises:
        CheckpointError: if the path cannot be used, such as an `s3://` address.
        CheckpointError: if the path contains a checkpoint, and `overwrite` is False.
        CheckpointError: if the path is a file.
        CheckpointError: if the path contains anything except a checkpoint that functree wrote.
        CheckpointError: if an array is traced.
        CheckpointError: if an array is abstract.
        CheckpointError: if an array was donated or deleted.
        CheckpointError: if an array is not on devices of all processes.
        CheckpointError: if an array's path cannot be parsed from a string.
        CheckpointError: if two arrays have the same path.
        CheckpointError: if copies of an array have different values, and `verify` is True.
        CheckpointError: if a leaf is a mutable reference.
        CheckpointError: if a leaf is a masked array.
        CheckpointError: if JAX lacks an array's dtype.
        CheckpointError: if XLA cannot convert an array's dtype to bytes.
        CheckpointError: if `meta` is not JSON.
        CheckpointError: if the files cannot be written.
        CheckpointError: if the values that are read back differ from the values in memory.
        CheckpointError: if another process is the first to save a checkpoint to the path.
        CheckpointError: if the save takes more than 24 hours.
        FunctreeError: if the processes save different trees.

    Examples:
        >>> model = ft.nn.Linear(8, 16, key=jax.random.key(0))
        >>> ft.save(folder / "model", model, meta={"tokens": 1000})
        >>> print(ft.inspect(folder / "model").meta)
        {'tokens': 1000}
    """
    writer = CheckpointWriter(folder_at(path), tree, meta, verify=verify, overwrite=overwrite)
    with Agreement(f"{path} cannot be written"):
        writer.finish()


class CheckpointWriter:
    """A writer of one checkpoint. It writes the values in the background, then the manifest.

    Once the writer is constructed, the arrays may be donated.

    Args:
        folder: the folder of the checkpoint.
        tree: the tree to save.
        meta: the user's JSON values.
        verify: whether digests are saved.
        overwrite: whether an existing checkpoint is replaced. If `verify` is True, the values are
            first read back.
        step: the checkpoint's step in `ft.Checkpoints`; None for `ft.save`.

    Raises:
        CheckpointError: for the reasons that `save` lists.
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
        self._another = f"{self._failure}: another process failed to write it"
        options = [f"verify={verify}, overwrite={overwrite}"]
        # The trees are compared before the folder is made, so that different trees leave no files.
        with Agreement(self._failure) as agreement:
            import_orbax()
            contents = Contents.of(tree, meta, step)
            agreement.compare(lambda: {**contents.facts(), "options": options})
        # Only the first process creates a draft. It sends the name of the folder with the values to
        # the others.
        self._draft: Draft | None = None
        with Agreement(self._failure):
            if jax.process_index() == 0:
                self._draft = Draft(folder, overwrite)
        self._digests: dict[str, str] = {}
        self._targets: dict[str, Target] = {}  # the arrays to read back
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
        """Start writing the values.

        The writer keeps no references to the arrays, which would otherwise stay in memory until
        everything is written.

        Returns:
            The manifest, and the save that must end before the manifest is written.

        Raises:
            CheckpointError: if copies of an array have different values.
            CheckpointError: if orbax cannot start to write.
        """
        # Digests are computed before orbax begins, since the arrays may be donated afterwards. The
        # digests describe the arrays in memory, not the files, so that write errors are detected.
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
        """Wait until the values are written, then write the manifest. All processes must call this.

        Raises:
            CheckpointError: for the reasons that `save` lists.
        """
        with self._undone():
            # With orbax alone, the other processes would wait for minutes for a process that cannot
            # write.
            wait_in_all(self._failure, self._is_written)
            # The values are read back before the manifest replaces the earlier checkpoint, which
            # must be kept if the disk holds wrong values.
            self._read_back()
            self._commit()

    def finish_alone(self) -> None:
        """Finish the checkpoint in the background, without collectives.

        A collective here could run between the collectives of a step. Values are not read back.

        Raises:
            CheckpointError: for the reasons that `save` lists.
        """
        with self._undone():
            # Orbax waits for all processes through JAX's coordination service, without collectives.
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
        """Make `finish_alone` raise an error in its thread, since another process has failed."""
        self._given_up.set()

    def _check_others(self) -> None:
        """Raise a CheckpointError if another process has noted that it could not write."""
        # A process that leaves `with Checkpoints` with an error does not communicate, and orbax
        # would wait for it for up to twenty minutes.
        with files(self._failure):
            if jax.process_count() > 1 and self._word in self._folder.names():
                raise CheckpointFileError(self._another)

    def _tell_others(self) -> None:
        """Write a note for the other processes that this process could not write.

        Raises:
            CheckpointError: if another process has already written such a note.
        """
        # If another process failed first, it may have removed files that this process needs. In
        # that case, the other process's failure is the cause.
        self._check_others()
        if jax.process_count() > 1:
            # Writing the note may fail, too.
            with suppress(CheckpointError), files(self._failure):
                self._folder.write(self._word, b"")

    def _is_written(self) -> bool:
        with files(self._failure):
            self._folder.check_reached()
            return is_done(self._response)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Remove the written files if the block raises an error."""
        with ExitStack() as undo:
            if self._draft is not None:
                undo.callback(self._draft.discard)
            yield
            undo.pop_all()

    def _commit(self) -> None:
        """Write the manifest, in the first process."""
        # The manifest is written last, since it completes the checkpoint. If the manifest were
        # written first and this process were then killed, the manifest would name missing values.
        if self._draft is not None:
            self._draft.commit(self._manifest)

    def _read_back(self) -> None:
        """Raise a CheckpointError if the values on the disk differ from the values in memory."""
        # Arrays are read in groups. Reading all of them at once would need the memory of a second
        # model.
        while self._targets:
            group = self._next_targets()
            with Agreement(self._failure), files(f"{self._values} cannot be read"):
                stored = load_arrays(self._values, group)
            # Each process reads separately, so copies may differ (`torn`).
            found, torn = digests_of(stored)
            if differ := [name for name in group if torn or found[name] != self._digests[name]]:
                raise CheckpointFileError(
                    f"{self._failure}: the values of {listed(differ)} on the disk differ from the "
                    "values in memory; check the disk"
                )

    def _next_targets(self) -> dict[str, Target]:
        """Remove and return the next targets, which need about 1 GiB in total."""
        group: dict[str, Target] = {}
        size = 0
        while self._targets and size < 2**30:
            name, target = self._targets.popitem()
            group[name] = target
            size += math.prod(target.shape) * target.dtype.itemsize
        return group


# Seconds between searches for notes of other processes.
_LOOKED_AFTER = 2.0

# Seconds within which all machines see a file that one machine wrote to a network file system.
_SEEN_AFTER = 5


def _check_seen(folder: Folder, name: str) -> None:
    """Raise a CheckpointError if this process does not see the first process's files."""
    until = time.monotonic() + _SEEN_AFTER
    # This check runs before orbax begins. Otherwise, processes with separate folders would each
    # write a part, without noticing that the other parts are missing. The code lists the folder,
    # since a network file system may cache that a file is missing.
    while jax.process_count() > 1 and f"{name}{BEGUN}" not in folder.names():
        if time.monotonic() > until:
            raise CheckpointFileError(
                f"process {jax.process_index()} does not see the folder {folder.path} that process "
                "0 writes to: pass a path on a file system that all processes share"
            )
        time.sleep(0.05)


def _target(value: StoredArray) -> Target:
    """Return the target for reading an array back."""
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
    return np.empty(value.shape, value.dtype)
