"""A tree ─► a checkpoint: its arrays by orbax, and a manifest with a digest of each."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np

from functree.errors import CheckpointError, listed
from functree.io.checkpoints.contents import Contents
from functree.io.checkpoints.engine import Response, check_dtypes, check_installed, is_done, load_arrays, start_saving
from functree.io.checkpoints.folder import Draft, check_seen, files, local
from functree.parameters import FILE, FLAG, check
from functree.processes.agreement import agreed, chosen, wait_in_all
from functree.processes.same_copies import digests_of


def save(
    path: str | os.PathLike[str], tree: Any, *, verify: bool = True, overwrite: bool = False, meta: Any = None
) -> None:
    """Save the arrays of a tree, each under its path. When this returns, the checkpoint is whole.

    Args:
        path: a folder, which is created. With several processes, one that all of them see.
        tree: concrete arrays, in modules and containers. What is not an array is not saved.
        verify: whether a digest of each array's values is kept, by which `ft.restore` notices that data have changed.
        overwrite: whether a checkpoint at this path is replaced: once the new one is whole and, with `verify=True`, was
            read back.
        meta: kept with the arrays and returned by `ft.inspect`: JSON values.

    Raises:
        CheckpointError: the path has something already; an array is traced, abstract, or not of all processes;
            `meta` is not JSON; the files cannot be written. What was at the path before is still there.
        FunctreeError: the processes do not save the same.

    Examples:
        >>> model = ft.nn.Linear(8, 16, key=jax.random.key(0))
        >>> ft.save(folder / "model", model, meta={"tokens": 1000})
        >>> print(ft.inspect(folder / "model").meta)
        {'tokens': 1000}
    """
    check("nothing is saved", path=(path, FILE), verify=(verify, FLAG), overwrite=(overwrite, FLAG))
    writing = Writing.begin(local(path), tree, meta=meta, verify=verify, overwrite=overwrite)
    agreed(f"{path} cannot be written", lambda: (writing.finish(), dict))


class Writing:
    """A checkpoint that is being written: its values in the background, and then its manifest.

    Args:
        contents: what is saved. Its arrays are not kept: they would take memory until all is written.
        draft: the folder with its values; None in processes other than the first.
        values: the path of this folder.
        verify: whether digests are kept.
        check: whether the values are read back before they count.
    """

    def __init__(self, contents: Contents, draft: Draft | None, values: FilePath, verify: bool, check: bool):
        self._manifest, self._draft, self._values = contents.manifest, draft, values
        self._digests: dict[str, str] = {}
        if verify:
            self._digests, differ = digests_of(contents.stored)
            if differ:
                raise CheckpointError(self._failure, differ)
        self._targets = {name: _target(value) for name, value in contents.stored.items()} if verify and check else {}
        self._is_empty = not contents.stored
        self._response = agreed(self._failure, lambda: (self._started(contents), dict))

    def _started(self, contents: Contents) -> Response:
        with files(self._failure):
            return start_saving(self._values, contents.stored)

    @classmethod
    def begin(
        cls, path: FilePath, tree: Any, *, meta: Any, verify: bool, overwrite: bool = False, step: int | None = None
    ) -> "Writing":
        """Begin to write a checkpoint. When this returns, the arrays may be donated.

        Raises:
            CheckpointError: as `save`.
        """
        failure = f"{path} cannot be written"

        def prepare() -> tuple[Contents, Any]:
            check_installed()
            contents = Contents.of(tree, meta, step)
            return contents, lambda: {**contents.facts(), "options": [f"verify={verify}, overwrite={overwrite}"]}

        contents = agreed(failure, prepare)
        with ExitStack() as undo:
            draft = agreed(failure, lambda: (Draft(path, overwrite) if jax.process_index() == 0 else None, dict))
            if draft is not None:
                undo.callback(draft.discard)
            values = path / chosen("" if draft is None else draft.name)
            agreed(failure, lambda: (check_seen(values), dict))
            writing = cls(contents, draft, values, verify, check=overwrite)
            undo.pop_all()
        return writing

    def finish(self) -> None:
        """Wait until the values are written in all processes, which all call this, and write the manifest.

        Raises:
            CheckpointError: as `save`.
        """
        with self._undone():
            # Orbax would let the others wait for minutes for one that cannot write.
            wait_in_all(self._failure, self._is_written)
            self._read_back()
            self._commit()

    def finish_alone(self) -> None:
        """As `finish`, and no process talks to another one: in the background that would disturb their steps.

        Raises:
            CheckpointError: as `save`.
        """
        with self._undone():
            with files(self._failure):
                self._response.result()
            self._commit()

    def _is_written(self) -> bool:
        with files(self._failure):
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
        if self._draft is not None:
            digests = self._digests
            rows = [row._replace(digest=digests.get(str(row.same_as or row.path))) for row in self._manifest.rows]
            name = None if self._is_empty else self._values.name
            self._draft.commit(self._manifest._replace(rows=tuple(rows), arrays=name))

    @property
    def _failure(self) -> str:
        return f"{self._values.parent} cannot be written"

    def _read_back(self) -> None:
        """Raise if what was written is not what was to be written; some arrays at a time, to need little memory."""
        for names in _groups(self._targets):
            stored = agreed(self._failure, lambda names=names: (self._loaded(names), dict))
            check_dtypes(stored, self._targets)
            found, torn = digests_of(stored)
            if differ := [name for name in names if torn or found[name] != self._digests[name]]:
                raise CheckpointError(f"{self._failure}: other values are read from the disk for {listed(differ)}")

    def _loaded(self, names: Sequence[str]) -> dict[str, Any]:
        with files(f"{self._values} cannot be read"):
            return load_arrays(self._values, {name: self._targets[name] for name in names})


def _target(value: Any) -> Any:
    """What is read back of an array."""
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
    return np.empty(value.shape, value.dtype)


def _groups(targets: Mapping[str, Any]) -> Iterator[list[str]]:
    """The names of the arrays, in groups of about a gibibyte."""
    group, size = list[str](), 0
    for name, target in targets.items():
        group.append(name)
        size += math.prod(target.shape) * target.dtype.itemsize
        if size >= 2**30:
            yield group
            group, size = [], 0
    if group:
        yield group
