"""A tree ─► a checkpoint: its arrays by orbax, and a manifest with a digest of each."""

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path as FilePath

import jax
import numpy as np

from functree.argument_checks import FILE, FLAG, check
from functree.errors import CheckpointError, CheckpointFileError, listed
from functree.io.checkpoints.contents import Contents
from functree.io.checkpoints.engine import (
    Response,
    Target,
    check_dtypes,
    check_installed,
    is_done,
    load_arrays,
    start_saving,
)
from functree.io.checkpoints.folder import (
    Draft,
    check_seen,
    files,
    is_given_up,
    remove_at_end,
    store_at,
)
from functree.io.checkpoints.manifest import SavedArray
from functree.io.checkpoints.store import Store
from functree.io.checkpoints.stored_arrays import StoredArray
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
    writer = CheckpointWriter.begin(
        store_at(path), tree, meta=meta, verify=verify, overwrite=overwrite
    )
    with Agreement(f"{path} cannot be written"):
        writer.finish()


class CheckpointWriter:
    """Writes one checkpoint: its values in the background, and then its manifest.

    Args:
        contents: what is saved. Its arrays are not kept: they would take memory until all is
            written.
        draft: the folder with its values; None in processes other than the first.
        store: the folder of the checkpoint.
        name: the name of the values in it.
        verify: whether digests are kept.
        check: whether the values are read back before they count.
    """

    def __init__(
        self,
        contents: Contents,
        draft: Draft | None,
        store: Store,
        name: str,
        verify: bool,
        check: bool,
    ):
        self._manifest, self._draft, self._store = contents.manifest, draft, store
        self._values: FilePath = store.path / name
        # Before orbax begins: afterwards the arrays may be donated. And of the arrays, not of what
        # is on the disk, so that an error of the writing itself is noticed.
        self._digests: dict[str, str] = {}
        if verify:
            self._digests, differ = digests_of(contents.stored)
            if differ:
                raise CheckpointError(self._failure, differ)
        self._targets: dict[str, Target] = {}
        if verify and check:
            self._targets = {name: _target(value) for name, value in contents.stored.items()}
        self._is_empty = not contents.stored
        self._given_up = threading.Event()
        self._looked = time.monotonic()
        with Agreement(self._failure), files(self._failure):
            self._response: Response = start_saving(self._values, contents.stored)

    @classmethod
    def begin(
        cls,
        store: Store,
        tree: Tree,
        *,
        meta: object,
        verify: bool,
        overwrite: bool = False,
        step: int | None = None,
    ) -> "CheckpointWriter":
        """Begin to write a checkpoint. When this returns, the arrays may be donated.

        Raises:
            CheckpointError: as `save`.
        """
        failure = f"{store.path} cannot be written"
        options = [f"verify={verify}, overwrite={overwrite}"]
        # Compared before the folder is made: processes that save other trees leave nothing behind.
        with Agreement(failure) as agreement:
            check_installed()
            contents = Contents.of(tree, meta, step)
            agreement.compare(lambda: {**contents.facts(), "options": options})
        with ExitStack() as undo:
            # By one process, since it makes up a name for the folder. The others are told which.
            with Agreement(failure):
                draft = Draft(store, overwrite) if jax.process_index() == 0 else None
            if draft is not None:
                undo.push(draft.discard)
            name = text_of_first("" if draft is None else draft.name)
            with Agreement(failure), files(failure):
                check_seen(store, name)
            writer = cls(contents, draft, store, name, verify, check=overwrite)
            undo.pop_all()
        return writer

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
            with self._told():
                while not self._is_written():
                    if self._given_up.is_set() or self._is_given_up():
                        why = "another process could not do so"
                        raise CheckpointFileError(f"{self._failure}: {why}")
            self._commit()

    def give_up(self) -> None:
        """End `finish_alone` in its thread: another process has failed."""
        self._given_up.set()

    def _is_given_up(self) -> bool:
        """Whether another process has left word that it could not write."""
        # For who leaves `with Checkpoints` by an error of its own: the processes do not talk then,
        # and orbax would wait for up to twenty minutes.
        if jax.process_count() == 1 or time.monotonic() < self._looked + _LOOKED_AFTER:
            return False
        self._looked = time.monotonic()
        with files(self._failure):
            return is_given_up(self._store, self._values.name)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """An error inside is left word of to the other processes."""
        try:
            yield
        except CheckpointError:
            if jax.process_count() > 1:
                # Nothing can be left where nothing can be written.
                with suppress(CheckpointError), files(self._failure):
                    self._store.tell_failure(self._values.name)
            raise

    def _is_written(self) -> bool:
        with files(self._failure):
            self._store.check_reached()
            return is_done(self._response)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What was written is removed if there is an error inside."""
        with ExitStack() as undo:
            if self._draft is None:
                undo.callback(remove_at_end, self._store, self._values.name, is_new=False)
            else:
                undo.push(self._draft.discard)
            yield
            undo.pop_all()

    def _commit(self) -> None:
        """Write the manifest, in the first process."""
        # Last: it names the folder of the values, and from then on they are the checkpoint. Written
        # first it would name what is still missing if this process is killed.
        if self._draft is None:
            return
        rows: list[SavedArray] = []
        for row in self._manifest.rows:
            rows.append(row._replace(digest=self._digests.get(str(row.same_as or row.path))))
        name = None if self._is_empty else self._values.name
        self._draft.commit(self._manifest._replace(rows=tuple(rows), arrays=name))

    @property
    def _failure(self) -> str:
        return f"{self._values.parent} cannot be written"

    def _read_back(self) -> None:
        """Raise if the disk has other values than were saved."""
        # Some arrays at a time: all of them would take the memory of a second model.
        for names in _groups(self._targets):
            targets = {name: self._targets[name] for name in names}
            with Agreement(self._failure), files(f"{self._values} cannot be read"):
                stored = load_arrays(self._values, targets)
            check_dtypes(stored, targets)
            # Each process reads for itself, so that copies may differ: `torn`.
            found, torn = digests_of(stored)
            if differ := [name for name in names if torn or found[name] != self._digests[name]]:
                raise CheckpointFileError(
                    f"{self._failure}: other values are read from the disk for {listed(differ)}"
                )


# Seconds after which it is looked again for what another process has left word of.
_LOOKED_AFTER = 2.0


def _target(value: StoredArray) -> Target:
    """What is read back of an array."""
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
    return np.empty(value.shape, value.dtype)


def _groups(targets: Mapping[str, Target]) -> Iterator[list[str]]:
    """The names of the arrays, in groups of about a gibibyte."""
    group: list[str] = []
    size = 0
    for name, target in targets.items():
        group.append(name)
        size += math.prod(target.shape) * target.dtype.itemsize
        if size >= 2**30:
            yield group
            group, size = [], 0
    if group:
        yield group
