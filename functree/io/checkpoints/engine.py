"""Arrays by name ─► files, and back: by orbax, which knows nothing here of trees.

Random keys are stored as words, and dtypes that zarr lacks as bytes. An array and what is stored
for it have the same bits in the same order, so they have the same digest.

Before orbax reads, the heads of the arrays are compared with the manifest, since tensorstore trusts
what files say. It allocates a chunk of any size that a head has, and reads JSON of any depth by one
call inside another. Both end the process, which no handler of errors prevents.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Protocol, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from functree.devices.specs import of_rank
from functree.errors import CheckpointError, CheckpointFileError, FunctreeError
from functree.io.checkpoints.folder import is_in_bucket, store_spec
from functree.io.extras import ForeignErrors, import_extra
from functree.report.json_text import key_implementation, parsed, value_text
from functree.tree.arrays import bits, is_key, keys_of, on_device, unsigned, with_sharding

StoredArray = jax.Array | np.ndarray

# Not with `|`, in which `pyright --verifytypes` finds type arguments of `jax.ShapeDtypeStruct`.
Target = Union[jax.ShapeDtypeStruct, np.ndarray]  # noqa: UP007
"""What is read for an array: one of JAX with this sharding, or one of numpy."""


class Response(Protocol):
    """A save that runs in the background."""

    def result(self, timeout: float | None = None) -> None:
        """Wait until all is written, or at most so many seconds.

        Raises what was raised in the background, and TimeoutError if it is still running.
        """


def is_done(running: Response) -> bool:
    """Return whether a save has ended, after waiting for a moment.

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
    orbax = import_orbax()
    if not arrays:  # orbax does not write an empty tree
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing
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
    orbax = import_orbax()
    if not targets:
        return {}
    _check_heads(folder, targets)
    context = _context(orbax)
    context.memory.read_concurrent_bytes = _most_bytes(targets)
    # Each process reads for itself. If it had to wait for the others, an error in one of them would
    # be a hang here.
    own = orbax.multihost.process_index()
    context.multiprocessing.active_processes = {own}
    context.multiprocessing.primary_host = own
    with context:
        return orbax.load(folder, dict(targets))


def _check_heads(folder: Path, targets: Mapping[str, Target]) -> None:
    """Raise CheckpointFileError if the head of an array is not that of its target, or cannot be
    read, or if something in the folder is not a file."""
    tensorstore: Any = import_extra("tensorstore", "checkpoint")
    for base in _databases(folder):
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        reads = {name: store.read(f"{name}/zarr.json") for name in targets}
        for name, read in reads.items():
            # One that is not there has no value. Orbax says so, in its own words.
            if text := read.result().value:
                _check_head(name, text, targets[name].shape)


def _databases(folder: Path) -> list[dict[str, str]]:
    """How tensorstore opens the files that the arrays are in."""
    # In a bucket all are objects, and orbax makes one database.
    if is_in_bucket(folder):
        return [store_spec(folder / "state")]
    for inside, _, names in os.walk(folder):
        for name in names:
            file = Path(inside, name)
            # Opening a pipe would wait for who writes to it.
            if not file.is_file():
                raise CheckpointFileError(f"{file} cannot be read: it is not a file")
    return [store_spec(database.parent) for database in folder.glob("*/manifest.ocdbt")]


def _check_head(name: str, text: bytes, shape: Sequence[int]) -> None:
    try:
        head = parsed(text)
        found, chunk = head["shape"], head["chunk_grid"]["configuration"]["chunk_shape"]
        # No chunk is larger than the array.
        sizes = list(zip(chunk, shape, strict=True))
        fits = found == list(shape) and all(0 < part <= max(size, 1) for part, size in sizes)
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointFileError(
            f"the head of {name} in the files cannot be read: {error}"
        ) from error
    if not fits:
        raise CheckpointFileError(
            f"the head of {name} in the files has the shape {value_text(found)} in parts of "
            f"{value_text(chunk)}, and the manifest {list(shape)}"
        )


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


def import_orbax() -> Any:
    """Orbax; raises FunctreeError if it is not installed."""
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


# Of the dtypes with less than a byte, zarr has some in some versions. Each element of these is
# stored as a byte, so that what one version writes another one reads.
_AS_BYTES = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3")

NOT_STORED = ("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn")
"""The dtypes that JAX names and XLA cannot convert."""


def stored_form(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and the dtype that an array is stored with."""
    if is_key(dtype):
        # The words of a key are one more dimension; how many there are is the implementation's.
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return words.shape, words.dtype
    if str(dtype) in _AS_BYTES:
        return shape, np.dtype(np.uint8)
    return shape, np.dtype(dtype)


def to_stored(value: jax.Array | np.ndarray | np.generic) -> StoredArray:
    """The array that is stored for an array, with the same sharding."""
    shape, dtype = stored_form(value.shape, value.dtype)
    if not isinstance(value, jax.Array):
        return np.asarray(value).view(dtype)  # numpy has a byte for each element anyway
    if value.dtype == dtype:
        return value
    # Computed where the array is, shard by shard: nothing is moved to be saved.
    return with_sharding(_to_stored, stored_sharding(value.sharding, len(shape)), on_device(value))


def from_stored(stored: StoredArray, dtype: Any, sharding: Sharding | None) -> StoredArray:
    """The array of a dtype that was stored so.

    Args:
        stored: what was stored, with the sharding of what is stored for such an array.
        dtype: the dtype of the array.
        sharding: the sharding of the array; None for what is in the memory of the host.
    """
    if stored.dtype == dtype:
        return stored
    if isinstance(stored, jax.Array) and sharding is not None:
        return with_sharding(_reader(dtype), sharding, on_device(stored))
    # In the memory of the host: a key is an array of JAX in any case, and all else stays numpy's.
    if is_key(dtype):
        return _reader(dtype)(jnp.asarray(stored))
    return np.asarray(stored).view(dtype)


def stored_sharding(sharding: Sharding, ndim: int) -> Sharding:
    """The sharding of what is stored, of `ndim` dimensions, for an array with a sharding: further
    ones are whole."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=of_rank(sharding.spec, ndim))


def _to_stored(value: jax.Array) -> jax.Array:
    if is_key(value.dtype):
        return jax.random.key_data(value)
    return bits(value).astype(jnp.uint8)


# Remembered, since a new function would be compiled again for each array.
@cache
def _reader(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """The function from what is stored to an array of a dtype."""
    if is_key(dtype):
        return keys_of(key_implementation(dtype) or "")
    return lambda stored: jax.lax.bitcast_convert_type(stored.astype(unsigned(dtype)), dtype)
