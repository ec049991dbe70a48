"""`Checkpoints` writes a run's checkpoints in the background, and keeps the newest ones."""

import atexit
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path as FilePath
from types import TracebackType
from typing import Annotated, Self, TypeVar

import jax

from functree.argument_checks import EXTENT, FLAG, FOLDER, Size, check, checked
from functree.devices.meshes import MeshLike
from functree.errors import CheckpointError, CheckpointFileError, FunctreeError, warn
from functree.io.checkpoints.engine import is_done
from functree.io.checkpoints.folder import (
    files,
    folder_at,
    is_foreign,
    named_steps,
    remove_step,
    steps_with_manifest,
    sweep,
)
from functree.io.checkpoints.read import restore
from functree.io.checkpoints.write import CheckpointWriter
from functree.labels.filters import FilterLike
from functree.layout.layout import LayoutTree
from functree.processes.agreement import Agreement, wait_in_all
from functree.processes.exchange import text_of_first
from functree.tree.arrays import Tree

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of a run. The checkpoint of step `n` is in `folder/n`.

    Each checkpoint is written in the background while the next steps run. Use `Checkpoints` in a
    `with` statement, which waits for the last checkpoint. Readers never see a half-written
    checkpoint. If a process is killed while it writes, a `save` more than 25 hours later removes
    the leftovers.

    Args:
        folder: a folder that all processes share, or its address in a bucket: `gs://bucket/run`.
        keep: how many of the newest checkpoints are kept; None keeps all.
        every: only steps that are multiples of this number are saved; None saves every step.

    Attributes:
        folder: the folder's absolute path, or its address.

    Raises:
        CheckpointError: if `folder` cannot be used, such as an `s3://` address.
        CheckpointError: if a checkpoint could not be written in the background. The next `save`,
            `wait` or `restore`, or the end of the `with` statement, raises the error.

    Examples:
        >>> with ft.Checkpoints(folder / "run", keep=2, every=10) as checkpoints:
        ...     for step in range(1, 41):
        ...         saved = checkpoints.save(step, {"w": jnp.full((4,), step)})
        >>> checkpoints.steps, saved
        ((30, 40), True)
        >>> checkpoints.restore({"w": jnp.zeros(4, int)})["w"][0].item()
        40
    """

    @checked("Checkpoints: invalid arguments")
    def __init__(
        self,
        folder: Annotated[str | os.PathLike[str], FOLDER],
        keep: Size | None = 3,
        every: Size | None = None,
    ):
        self._folder = folder_at(folder)
        self.folder: FilePath = self._folder.path
        self._keep, self._every = keep, every
        # The steps that may have leftovers of a killed process; None for all.
        self._unswept: list[int] | None = None
        # The steps that this run saved. They are treated as newer than all other steps.
        self._saved: set[int] = set()
        self._is_open = False  # whether the program is inside the `with` statement
        # The background writer, and its thread's future; None if nothing is being written.
        self._running: tuple[CheckpointWriter, Future[None]] | None = None

    def __enter__(self) -> Self:
        facts = {"folder": self.folder, "keep": self._keep, "every": self._every}
        with Agreement(f"{self.folder} cannot be opened") as agreement:
            agreement.compare(lambda: {name: [str(value)] for name, value in facts.items()})
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_open = False
        try:
            if error is None:
                self.wait()
            elif self._running is not None:
                # Wait without the other processes, which may be in the middle of a step that this
                # process never reaches.
                _, ended = self._running
                _NOT_ASKED.pop(ended, None)
                ended.result()
        except FunctreeError as failed:
            if error is None:
                raise
            # The failure is added as a note, since the block's error may have caused it.
            error.add_note(f"the last checkpoint was not saved: {failed}")

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a checkpoint, in ascending order.

        Raises:
            CheckpointError: if the folder cannot be read.
        """
        found: list[int] = []
        with files(f"{self.folder} cannot be read"):
            for _ in range(_LOOKS):
                listed = named_steps(self._folder)
                # While the listed steps are checked, another process may remove them all because of
                # `keep`. In that case, newer steps exist.
                found = steps_with_manifest(self._folder, listed)
                if found or not listed:
                    break
        return tuple(found)

    @property
    def latest(self) -> int | None:
        """The newest step that has a checkpoint, or None if no step has one."""
        return max(self.steps, default=None)

    def save(self, step: int, tree: Tree, meta: object = None, force: bool = False) -> bool:
        """Save a tree as the checkpoint of a step. You may donate the tree once `save` returns.

        Args:
            step: the step, at least 0.
            tree: the tree, as in `ft.save`.
            meta: JSON values, as in `ft.save`.
            force: whether the step is saved even if `every` skips it.

        Returns:
            Whether the step is saved: False only if `every` skips it.

        Raises:
            CheckpointError: for the reasons that `ft.save` lists.
            CheckpointError: if the step already has a checkpoint.
            CheckpointError: if the previous checkpoint could not be written.
            FunctreeError: if `save` is called outside the `with` statement.
        """
        check("Checkpoints.save: invalid arguments", step=(step, EXTENT), force=(force, FLAG))
        if not self._is_open:
            raise FunctreeError(
                "Checkpoints.save was called outside a `with` statement, which waits for the last "
                "checkpoint: write `with ft.Checkpoints(folder) as checkpoints:` around the loop"
            )
        if not force and self._every is not None and step % self._every != 0:
            return False
        # Only one write runs at a time, since two would slow each other down. `save` waits for the
        # previous write instead of skipping a step.
        self.wait()
        with Agreement(f"{self.folder} cannot be written") as agreement:
            self._check_new(int(step))
            agreement.compare(lambda: {"step": [str(step)]})
        writer = CheckpointWriter(
            self._folder.at(str(step)), tree, meta, verify=True, step=int(step)
        )
        # Each call creates an executor, whose future raises the thread's error in `wait`.
        thread = ThreadPoolExecutor(1, "functree checkpoint")
        ended = thread.submit(self._finish, writer, int(step))
        thread.shutdown(wait=False)
        self._running = writer, ended
        _NOT_ASKED[ended] = self.folder / str(step)
        return True

    def wait(self) -> None:
        """Wait until the background checkpoint is complete.

        Raises:
            CheckpointError: if the checkpoint could not be written.
        """
        # `_running` is cleared first, so that an error in the background is raised only once.
        running, self._running = self._running, None
        if running is not None:
            _NOT_ASKED.pop(running[1], None)
        # Processes must not communicate in the background, between the collectives of their steps.
        try:
            wait_in_all(
                "a checkpoint could not be written",
                lambda: running is None or is_done(running[1]),
            )
        except FunctreeError:
            # The write may still run in this process, since orbax waits for the failed process.
            if running is not None:
                writer, ended = running
                writer.give_up()
                ended.exception()  # waits; the thread's error only follows from the raised error
            raise

    def restore(
        self,
        like: T,
        step: int | None = None,
        layout: LayoutTree = None,
        mesh: MeshLike = None,
        *,
        only: FilterLike | None = None,
        cast: bool = False,
        verify: bool = True,
    ) -> T:
        """Restore the tree of a step with `ft.restore`.

        Args:
            like: a tree like the saved one, as in `ft.restore`.
            step: the step; by default the latest step that has a checkpoint.
            layout: the layout of the tree, as in `ft.restore`.
            mesh: the mesh, as in `ft.restore`.
            only: a filter for the arrays, as in `ft.restore`.
            cast: whether arrays may be cast, as in `ft.restore`.
            verify: whether digests are checked, as in `ft.restore`.

        Raises:
            CheckpointError: for the reasons that `ft.restore` lists.
            CheckpointError: if the previous checkpoint could not be written.
            CheckpointError: if there is no checkpoint.
            CheckpointError: if there is no checkpoint for this step.
        """
        check("Checkpoints.restore: invalid arguments", step=(step, EXTENT.or_none()))
        self.wait()
        while True:
            found = self._found(step)
            path = self.folder / str(found)
            try:
                return restore(path, like, layout, mesh, only=only, cast=cast, verify=verify)
            except CheckpointError:
                # Another process may have removed the latest checkpoint because of `keep`. In that
                # case, a newer checkpoint exists.
                if step is not None or self._found(None) == found:
                    raise

    def _found(self, step: int | None) -> int:
        """Check that a step has a checkpoint, or find the latest step.

        Raises:
            CheckpointError: if there is no checkpoint.
            CheckpointError: if there is no checkpoint for this step.
        """
        with Agreement(f"{self.folder} cannot be restored") as agreement:
            agreement.compare(lambda: {"step": [str(step)]})
            text = " ".join(map(str, self.steps))
        # All processes use the first process's list. On a network file system, the others may not
        # see the latest step yet, and would restore a different step.
        steps = list(map(int, text_of_first(text).split()))
        if steps and step is None:
            return steps[-1]
        if step is not None and step in steps:
            return int(step)
        what = "no checkpoint" if step is None else f"no checkpoint for step {step}"
        raise CheckpointFileError(
            f"{self.folder} has {what} (saved steps: {', '.join(map(str, steps)) or 'none'})"
        )

    def _check_new(self, step: int) -> None:
        """Raise a CheckpointError if a step has a checkpoint; warn if a later step has one."""
        with files(f"{self.folder} cannot be written"):
            # Leftovers are removed here, not when the folder is opened, so that readers remove
            # nothing.
            if jax.process_index() == 0:
                if self._unswept is None:
                    self._unswept = named_steps(self._folder)
                # Later saves look again at steps with leftovers that are too recent to remove.
                self._unswept = [one for one in self._unswept if sweep(self._folder.at(str(one)))]
            steps = self.steps
        if step in steps:
            raise CheckpointFileError(
                f"{self.folder} already has a checkpoint for step {step}: to replace it, remove "
                f"{self.folder / str(step)}"
            )
        if steps and step < steps[-1]:
            warn(
                f"step {step} is saved, but a restart would resume from step {steps[-1]} of "
                f"{self.folder}: remove the later steps to resume from this step"
            )

    def __repr__(self) -> str:
        return f"<Checkpoints at {self.folder}>"

    def _finish(self, writer: CheckpointWriter, step: int) -> None:
        """Write a checkpoint in the background, then remove the oldest ones."""
        # Old checkpoints are removed once the new one is complete. In the other order, a process
        # that is killed in between would leave too few checkpoints, and none with `keep=1`.
        writer.finish_alone()
        self._saved.add(step)
        if self._keep is None or jax.process_index() != 0:
            return
        with files(f"old checkpoints in {self.folder} cannot be removed"):
            # A run that resumes from an earlier step saves steps with lower numbers than existing
            # steps. If steps were sorted by number alone, the run's own checkpoints would be
            # removed first.
            steps = sorted(self.steps, key=lambda one: (one == step, one in self._saved, one))
            for one in steps[: -self._keep]:
                old = self._folder.at(str(one))
                # A link points to another run's checkpoint.
                if os.path.islink(old.path) or is_foreign(old.read()):
                    warn(f"{old.path} was not removed, since `ft.Checkpoints` did not write it")
                else:
                    remove_step(old)


# Paths of checkpoints that the program has not waited for, by future.
_NOT_ASKED: dict[Future[None], FilePath] = {}


@atexit.register  # called once Python has waited for the threads that write
def _report() -> None:
    """Warn about checkpoints that were not saved because the program ended inside `with`."""
    for ended, path in _NOT_ASKED.items():
        if ended.done() and (error := ended.exception()) is not None:
            warn(
                f"{path} was not saved, since the program ended inside `with Checkpoints`: leave "
                f"the block first, or call `wait()` ({error})"
            )


# The maximum number of times that the steps are listed, if all are removed before they are checked.
_LOOKS = 3
