"""`Checkpoints`: the checkpoints of a run, by step; written in the background, the newest kept."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path as FilePath
from types import TracebackType
from typing import Any, Self, TypeVar

import jax

from functree.errors import CheckpointError, FunctreeError, warn
from functree.io.checkpoints.engine import is_done
from functree.io.checkpoints.folder import files, is_step, local, remove, sweep
from functree.io.checkpoints.read import restore
from functree.io.checkpoints.write import Writing
from functree.layout.layout import LayoutTree
from functree.layout.meshes import MeshLike
from functree.parameters import EXTENT, FLAG, FOLDER, SIZE, check
from functree.processes.agreement import agreed, chosen, wait_in_all
from functree.tree.filters.filter import FilterLike

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of a run: step `n` is the checkpoint `folder/n`.

    Each is written in the background while the next steps run. What a process that was killed has left half-written
    is never seen, and the next `save` removes it. Use it in a `with` statement, which waits at its end.

    Args:
        folder: the folder. With several processes, one that all of them see.
        keep: how many are kept, the newest; None for all.
        every: only steps that this number divides are saved; None for each step that is given.

    Attributes:
        folder: the folder.

    Raises:
        CheckpointError: what could not be written in the background: at the next `save`, `wait` or `restore`, and at
            the end of the `with` statement.

    Examples:
        >>> with ft.Checkpoints(folder / "run", keep=2, every=10) as checkpoints:
        ...     for step in range(1, 41):
        ...         saved = checkpoints.save(step, {"w": jnp.full((4,), step)})
        >>> checkpoints.steps, saved
        ((30, 40), True)
        >>> checkpoints.restore({"w": jnp.zeros(4, int)})["w"][0].item()
        40
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = 3, every: int | None = None):
        check(
            "there are no such checkpoints",
            folder=(folder, FOLDER),
            keep=(keep, SIZE.or_none()),
            every=(every, SIZE.or_none()),
        )
        self.folder: FilePath = local(folder)
        self._keep, self._every = keep, every
        self._swept = False
        self._saved: set[int] = set()  # the steps of this run
        self._is_open = False  # whether this is inside of the `with` statement
        self._running: Future[None] | None = None

    def __enter__(self) -> Self:
        facts = {"folder": [str(self.folder)], "keep": [str(self._keep)], "every": [str(self._every)]}
        agreed(f"{self.folder} is not opened", lambda: (None, lambda: facts))
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        try:
            if error is None:
                self.wait()
            elif self._running is not None:
                # Alone: the other processes may be in the middle of a step, where this one will not come.
                self._running.result()
        except FunctreeError as failed:
            if error is None:
                raise
            error.add_note(f"and the last checkpoint was not saved: {failed}")  # not in the place of the first error

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that have a checkpoint, in their order."""
        for _ in range(_LOOKS):
            names = [one for one in self.folder.iterdir() if one.name.isdigit()] if self.folder.is_dir() else []
            found = tuple(sorted(int(one.name) for one in names if is_step(one)))
            if found or not names:
                return found
        return ()

    @property
    def latest(self) -> int | None:
        """The newest step that has a checkpoint; None if there is none."""
        return max(self.steps, default=None)

    def save(self, step: int, tree: Any, meta: Any = None, force: bool = False) -> bool:
        """Save a tree as the checkpoint of a step. When this returns, the tree may be donated.

        Args:
            step: the step, at least 0.
            tree: as in `ft.save`.
            meta: as in `ft.save`.
            force: whether a step is saved that `every` leaves out.

        Returns:
            Whether it is saved: False only for a step that `every` leaves out.

        Raises:
            CheckpointError: as `ft.save`; the step has a checkpoint already; the one before could not be written.
            FunctreeError: this is outside of the `with` statement.
        """
        check("nothing is saved", step=(step, EXTENT), force=(force, FLAG))
        if not self._is_open:
            raise FunctreeError(
                "`save` writes in the background, and waits at the end of a `with` statement: write "
                "`with ft.Checkpoints(folder) as checkpoints:` around the loop"
            )
        if not force and self._every is not None and step % self._every != 0:
            return False
        self.wait()
        agreed("nothing is saved", lambda: (self._check_new(int(step)), lambda: {"step": [str(step)]}))
        writing = Writing.begin(self.folder / str(step), tree, meta=meta, verify=True, step=int(step))
        thread = ThreadPoolExecutor(1, "functree checkpoint")
        self._running = thread.submit(self._finish, writing, int(step))
        thread.shutdown(wait=False)  # it ends after this
        return True

    def wait(self) -> None:
        """Wait until what is being written is whole.

        Raises:
            CheckpointError: it could not be written.
        """
        running, self._running = self._running, None
        # Only here may the processes talk to each other: not in the background, between their steps.
        wait_in_all("a checkpoint could not be written", lambda: running is None or is_done(running))

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
        asked = {"step": [str(step)]}
        while True:
            found = str(self._latest_in_all() if step is None else step)
            agreed("nothing is restored", lambda found=found: (self._check_has(step, found), lambda: asked))
            try:
                return restore(self.folder / found, like, layout, mesh, only=only, cast=cast, verify=verify)
            except CheckpointError:
                # One that was removed meanwhile, to keep only so many: a newer one is there.
                removed = chosen(str(not is_step(self.folder / found))) == "True"
                if step is not None or not removed or str(self._latest_in_all()) == found:
                    raise

    def _latest_in_all(self) -> int | None:
        """The latest step that the first process sees."""
        found = chosen(str(agreed("nothing is restored", lambda: (self.latest, dict))))
        return None if found == "None" else int(found)

    def _check_new(self, step: int) -> None:
        """Raise CheckpointError for a step that exists; warn of one that is not the latest."""
        with files(f"{self.folder} cannot be written"):
            if jax.process_index() == 0:
                self._sweep()
            steps = self.steps
        if step in steps:
            raise CheckpointError(
                f"{self.folder} has step {step} already: remove {self.folder / str(step)} to replace it"
            )
        if steps and step < steps[-1]:
            warn(f"step {step} is saved, and {self.folder} has step {steps[-1]}, from which a restart would go on")

    def _check_has(self, step: int | None, found: str) -> None:
        """Raise CheckpointError if there is no checkpoint, or none of a step."""
        steps = self.steps
        if found == "None" or (step is not None and int(found) not in steps):
            what = "no checkpoint" if step is None else f"no checkpoint of step {found}"
            raise CheckpointError(f"{self.folder} has {what}: its steps are {', '.join(map(str, steps)) or 'none'}")

    def __repr__(self) -> str:
        return f"<Checkpoints at {self.folder}: {len(self.steps)} steps, latest {self.latest}>"

    def _sweep(self) -> None:
        """Remove what processes that were killed have left half-written."""
        if self._swept or not self.folder.is_dir():
            return
        self._swept = True
        for one in self.folder.iterdir():
            if one.name.isdigit() and one.is_dir():
                sweep(one)

    def _finish(self, writing: Writing, step: int) -> None:
        """The part that runs in the background."""
        writing.finish_alone()
        self._retain(step)

    def _retain(self, saved: int) -> None:
        """Remove all but the newest checkpoints: those of this run are newer than others, whatever their steps."""
        self._saved.add(saved)
        if self._keep is None or jax.process_index() != 0:
            return
        with files(f"old checkpoints in {self.folder} cannot be removed"):
            steps = sorted(self.steps, key=lambda step: (step == saved, step in self._saved, step))
            for step in steps[: -self._keep]:
                remove(self.folder / str(step))


# A run that keeps only a few may have replaced all that were listed before they were looked at.
_LOOKS = 3
