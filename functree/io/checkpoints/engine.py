"""Arrays by name ─► files, and back: by orbax, which knows nothing here of trees."""

import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Union

import jax
import numpy as np

from functree.errors import CheckpointError, FunctreeError
from functree.io.checkpoints.file_headers import check_heads
from functree.io.checkpoints.stored_arrays import StoredArray
from functree.io.extras import ForeignErrors, import_extra

# Not with `|`, in which `pyright --verifytypes` finds type arguments of `jax.ShapeDtypeStruct`.
Target = Union[jax.ShapeDtypeStruct, np.ndarray]  # noqa: UP007
"""What is read for an array: one of JAX with this sharding, or one of numpy."""


class Response(Protocol):
    """A save that runs in the background."""

    def result(self, timeout: float | None = None) -> None:
        """Wait until all is written, or at most so many seconds.

        Raises what was raised in the background, and TimeoutError if it is still running.
        """


class _NothingToSave:
    def result(self, timeout: float | None = None) -> None:
        """It has ended."""


def is_done(running: Response) -> bool:
    """Whether a save has ended, after waiting for a moment.

    What was raised there is raised here.
    """
    # Short, so that the processes can tell each other of an error: one that waits in orbax for
    # another that has failed, or for a bucket, waits for up to twenty minutes.
    seconds = 0.25
    start = time.monotonic()
    try:
        running.result(timeout=seconds)
    except TimeoutError:
        # Orbax raises a TimeoutError too, in the background, if it has waited too long itself.
        # Then less time has passed here than was allowed.
        if time.monotonic() - start < seconds:
            raise
        return False
    return True


def start_saving(folder: Path, arrays: Mapping[str, StoredArray]) -> Response:
    """Start to write arrays to a new folder. The arrays may be donated when this returns."""
    orbax = _orbax()
    if not arrays:
        return _NothingToSave()  # orbax does not write an empty tree
    with _context(orbax):
        response: Response = orbax.save_async(folder, dict(arrays))
    if jax.process_count() > 1:
        # Those that have ended would hold copies of arrays for nothing.
        _SAVES[:] = [one for one in _SAVES if _is_running(one)]
        _SAVES.append(response)
        _watch()
    return response


_SAVES: list[Response] = []
# Whether one has failed. Threads of orbax may still wait for other processes then, as if it ran.
_FAILED = threading.Event()


def _is_running(save: Response) -> bool:
    try:
        with ForeignErrors(FunctreeError, "a save has failed"):
            save.result(timeout=0)
    except (FunctreeError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error.__cause__, TimeoutError):
            return True
        # What it is, is raised by whoever waits for the save.
        _FAILED.set()
    return False


@cache
def _watch() -> ThreadPoolExecutor:
    """Wait in the background for the end of the program.

    Returns:
        An executor whose thread ends with the program, as long as the cache holds it.
    """
    executor = ThreadPoolExecutor(1)
    # When a program ends, Python first tells the threads of all executors to end, and then waits
    # for each of them, those of orbax too. What is registered by `atexit` is called only later.
    # Made here: if the program ends at once, the background would be too late to make one.
    worker = executor.submit(threading.current_thread).result()
    # Not a daemon: Python waits for it before JAX leaves the other processes by itself, which two
    # threads must not do at the same time.
    threading.Thread(
        target=_end_saves, args=(worker,), name="functree checkpoint", daemon=False
    ).start()
    return executor


def _end_saves(worker: threading.Thread) -> None:
    """At the end of the program, end what still waits for other processes to save.

    It waits for a process that could not write, for minutes and in threads that Python waits for.
    Meanwhile the others are at their end already, and JAX would end them all.
    """
    worker.join()
    if any(map(_is_running, _SAVES)) or _FAILED.is_set():
        # With the connection their waiting ends. None of them could be finished any more: orbax
        # needs new threads for that.
        jax.distributed.shutdown()


def load_arrays(folder: Path, targets: Mapping[str, Target]) -> dict[str, StoredArray]:
    """Read some of the arrays in a folder.

    Args:
        folder: the folder.
        targets: for each array, a `jax.ShapeDtypeStruct` with a sharding, or an array of numpy.

    Returns:
        Arrays of JAX with these shardings, and arrays of numpy.

    Raises:
        CheckpointError: the files have arrays of other shapes.
    """
    orbax = _orbax()
    if not targets:
        return {}
    check_heads(folder, {name: target.shape for name, target in targets.items()})
    context = _context(orbax)
    context.memory.read_concurrent_bytes = _most_bytes(targets)
    # Each process reads for itself. If it had to wait for the others, an error in one of them would
    # be a hang here.
    own = orbax.multihost.process_index()
    context.multiprocessing.active_processes = {own}
    context.multiprocessing.primary_host = own
    with context:
        return orbax.load(folder, dict(targets))


def check_dtypes(arrays: Mapping[str, StoredArray], targets: Mapping[str, Target]) -> None:
    """Look at the dtypes of arrays that were read.

    Raises:
        CheckpointError: JAX has no such dtype, as it is configured in other threads than this one.
    """
    # Orbax casts in silence to what it has: a digest of float32 would only say that data changed.
    for name, array in arrays.items():
        if array.dtype != targets[name].dtype:
            raise CheckpointError(
                f"{name} was read as {array.dtype}, and not as {targets[name].dtype}: orbax reads "
                "in threads of its own, in which `jax.enable_x64` does not hold: set "
                "`jax_enable_x64` for the whole process"
            )


def check_installed() -> None:
    """Raise FunctreeError if orbax is not installed."""
    _orbax()


def _orbax() -> Any:
    # `Any`: its types are not known where it is not installed.
    return import_extra("orbax.checkpoint", "checkpoint").v1


def _context(orbax: Any) -> Any:
    """How orbax writes and reads."""
    context = orbax.Context()
    # Trained weights hardly get smaller, and take 2.4 times as long.
    context.array.saving.use_compression = False
    # Where arrays are placed is said by the layout, never by the file.
    context.array.saving.enable_write_sharding_file = False
    # If a program ends while orbax still creates its folders, other threads of it wait for them,
    # for minutes. With several processes all would wait for one that cannot create them, and
    # could not be told; there `_end_saves` ends the waiting.
    context.asynchronous.create_directories_asynchronously = jax.process_count() > 1
    # Of the stored arrays only those that are asked for are read: orbax refuses fewer otherwise.
    context.pytree.loading.partial_load = True
    return context


def _most_bytes(targets: Mapping[str, Target]) -> int:
    """How many bytes may be on their way at once: a fifth of all, and more than the largest array.

    What is read is in memory twice until it is on its device. With no limit half of all is. With a
    lower one orbax takes longer: it wakes all reads that wait whenever one has ended.
    """
    sizes = [math.prod(target.shape) * target.dtype.itemsize for target in targets.values()]
    return max(sum(sizes) // (5 * jax.process_count()), max(sizes) + 2**20)
