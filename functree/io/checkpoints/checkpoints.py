"""`Checkpoints`: the checkpoints of a run, by step; written in the background, the newest kept."""

import atexit
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path as FilePath
from types import TracebackType
from typing import Self, TypeVar

import jax

from functree.argument_checks import EXTENT, FLAG, FOLDER, SIZE, check
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
    """The checkpoints of a run: step `n` is the checkpoint `folder/n`.

    Each is written in the background while the next steps run. What a process that was killed has
    left half-written is never seen, and a `save` more than a day later removes it. Use it in a
    `with` statement, which waits at its end.

    Args:
        folder: the folder. With several processes, one that all of them see. Or its address in a
            bucket, as text: `gs://bucket/run`.
        keep: how many are kept, the newest; None for all.
        every: only steps that this number divides are saved; None for each step that is given.

    Attributes:
        folder: the folder.

    Raises:
        CheckpointError: what could not be written in the background: at the next `save`, `wait` or
            `restore`, and at the end of the `with` statement.

    Examples:
        >>> with ft.Checkpoints(folder / "run", keep=2, every=10) as checkpoints:
        ...     for step in range(1, 41):
        ...         saved = checkpoints.save(step, {"w": jnp.full((4,), step)})
        >>> checkpoints.steps, saved
        ((30, 40), True)
        >>> checkpoints.restore({"w": jnp.zeros(4, int)})["w"][0].item()
        40
    """

    def __init__(
        self, folder: str | os.PathLike[str], keep: int | None = 3, every: int | None = None
    ):
        check(
            "there are no such checkpoints",
            folder=(folder, FOLDER),
            keep=(keep, SIZE.or_none()),
            every=(every, SIZE.or_none()),
        )
        self._folder = folder_at(folder)
        self.folder: FilePath = self._folder.path
        self._keep, self._every = keep, every
        # The steps in which something may be left of a dead process; None for all.
        self._unswept: list[int] | None = None
        # The steps of this run: they are newer than those that it found, whatever their numbers.
        self._saved: set[int] = set()
        self._is_open = False  # whether this is inside of the `with` statement
        # What is written in the background, and the future of its end.
        self._running: tuple[CheckpointWriter, Future[None]] | None = None

    def __enter__(self) -> Self:
        facts = {"folder": self.folder, "keep": self._keep, "every": self._every}
        with Agreement(f"{self.folder} is not opened") as agreement:
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
                # Alone: the other processes may be in the middle of a step, where this one will not
                # come.
                _, ended = self._running
                _NOT_ASKED.pop(ended, None)
                ended.result()
        except FunctreeError as failed:
            if error is None:
                raise
            # Not in the place of the first error, which may be the cause of this one.
            error.add_note(f"and the last checkpoint was not saved: {failed}")

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a checkpoint, in their order.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        found: list[int] = []
        with files(f"{self.folder} cannot be read"):
            for _ in range(_LOOKS):
                listed = named_steps(self._folder)
                # Each is looked at after all were listed. Meanwhile another process may have
                # removed it, to keep only so many: then a newer one is there, which the list does
                # not have.
                found = steps_with_manifest(self._folder, listed)
                if found or not listed:
                    break
        return tuple(found)

    @property
    def latest(self) -> int | None:
        """The newest step that has a checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def save(self, step: int, tree: Tree, meta: object = None, force: bool = False) -> bool:
        """Save a tree as the checkpoint of a step. When this returns, the tree may be donated.

        Args:
            step: the step, at least 0.
            tree: as in `ft.save`.
            meta: as in `ft.save`.
            force: whether a step is saved that `every` leaves out.

        Returns:
            Whether it is saved: False only for a step that `every` leaves out.

        Raises:
            CheckpointError: as `ft.save`; the step has a checkpoint already; the one before could
                not be written.
            FunctreeError: this is outside of the `with` statement.
        """
        check("nothing is saved", step=(step, EXTENT), force=(force, FLAG))
        if not self._is_open:
            raise FunctreeError(
                "`save` writes in the background, and waits at the end of a `with` statement: "
                "write `with ft.Checkpoints(folder) as checkpoints:` around the loop"
            )
        if not force and self._every is not None and step % self._every != 0:
            return False
        # One at a time: a step that is due is never skipped, and two would write side by side.
        self.wait()
        with Agreement("nothing is saved") as agreement:
            self._check_new(int(step))
            agreement.compare(lambda: {"step": [str(step)]})
        writer = CheckpointWriter(
            self._folder.at(str(step)), tree, meta, verify=True, step=int(step)
        )
        # An executor for one call: its future raises in `wait` what was raised in the thread.
        thread = ThreadPoolExecutor(1, "functree checkpoint")
        ended = thread.submit(self._finish, writer, int(step))
        thread.shutdown(wait=False)
        self._running = writer, ended
        _NOT_ASKED[ended] = self.folder / str(step)
        return True

    def wait(self) -> None:
        """Wait until what is being written is whole.

        Raises:
            CheckpointError: it could not be written.
        """
        # Forgotten first: an error in the background is raised once.
        running, self._running = self._running, None
        if running is not None:
            _NOT_ASKED.pop(running[1], None)
        # Only here may the processes talk to each other: not in the background, between their
        # steps.
        try:
            wait_in_all(
                "a checkpoint could not be written",
                lambda: running is None or is_done(running[1]),
            )
        except FunctreeError:
            # Here it may still run: orbax waits for the process that has failed.
            if running is not None:
                writer, ended = running
                writer.give_up()
                ended.exception()  # waits; its own error follows from the one that is raised
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
        """The tree of a step, as by `ft.restore`.

        Args:
            like: as in `ft.restore`.
            step: the step; by default the latest.
            layout: as in `ft.restore`.
            mesh: as in `ft.restore`.
            only: as in `ft.restore`.
            cast: as in `ft.restore`.
            verify: as in `ft.restore`.

        Raises:
            CheckpointError: as `ft.restore`; there is no checkpoint, or none of this step.
        """
        check("nothing is restored", step=(step, EXTENT.or_none()))
        self.wait()
        while True:
            found = self._found(step)
            path = self.folder / str(found)
            try:
                return restore(path, like, layout, mesh, only=only, cast=cast, verify=verify)
            except CheckpointError:
                # The latest may have been removed meanwhile, to keep only so many: then a newer one
                # is there.
                if step is not None or self._found(None) == found:
                    raise

    def _found(self, step: int | None) -> int:
        """A step, or the latest.

        Raises:
            CheckpointError: there is no checkpoint, or none of this step.
        """
        with Agreement("nothing is restored") as agreement:
            agreement.compare(lambda: {"step": [str(step)]})
            text = " ".join(map(str, self.steps))
        # Those that the first process sees: on a network file system the others may see the latest
        # later, and would restore another one.
        steps = list(map(int, text_of_first(text).split()))
        if steps and step is None:
            return steps[-1]
        if step is not None and step in steps:
            return int(step)
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointFileError(
            f"{self.folder} has {what}: its steps are {', '.join(map(str, steps)) or 'none'}"
        )

    def _check_new(self, step: int) -> None:
        """Raise CheckpointError for a step that exists; warn of one that is not the latest."""
        with files(f"{self.folder} cannot be written"):
            # Here, and not when the folder is opened: who only reads removes nothing.
            if jax.process_index() == 0:
                if self._unswept is None:
                    self._unswept = named_steps(self._folder)
                # Again those in which something is too young to be removed.
                self._unswept = [one for one in self._unswept if sweep(self._folder.at(str(one)))]
            steps = self.steps
        if step in steps:
            raise CheckpointFileError(
                f"{self.folder} has step {step} already: remove {self.folder / str(step)} to "
                "replace it"
            )
        if steps and step < steps[-1]:
            warn(
                f"step {step} is saved, and {self.folder} has step {steps[-1]}, from which a "
                "restart would go on"
            )

    def __repr__(self) -> str:
        return f"<Checkpoints at {self.folder}: {len(self.steps)} steps, latest {self.latest}>"

    def _finish(self, writer: CheckpointWriter, step: int) -> None:
        """Write a checkpoint in the background, and remove all but the newest."""
        # Old ones are removed after the new one is whole. The other way round, a process that is
        # killed in between would leave one too few, and with `keep=1` none.
        writer.finish_alone()
        self._saved.add(step)
        if self._keep is None or jax.process_index() != 0:
            return
        with files(f"old checkpoints in {self.folder} cannot be removed"):
            # A run that goes on from an earlier step saves lower ones than are there. By number
            # alone its own would be removed, and the one that was just saved first of all.
            steps = sorted(self.steps, key=lambda one: (one == step, one in self._saved, one))
            for one in steps[: -self._keep]:
                old = self._folder.at(str(one))
                # A link leads to what another run has saved.
                if os.path.islink(old.path) or is_foreign(old):
                    warn(f"{old.path} is not removed, since it is not of these checkpoints")
                else:
                    remove_step(old)


# The checkpoints whose errors nobody has asked for, by what the background has raised.
_NOT_ASKED: dict[Future[None], FilePath] = {}


@atexit.register  # which comes after Python has waited for the threads that write
def _report() -> None:
    """Warn of what was not saved since the program has ended inside of a `with` statement."""
    for ended, path in _NOT_ASKED.items():
        if ended.done() and (error := ended.exception()) is not None:
            warn(
                f"{path} was not saved, since the program has ended inside of `with Checkpoints`: "
                f"leave it before, or call `wait()` ({error})"
            )


# How often the steps are listed, if all of them were removed before they were looked at.
_LOOKS = 3
