"""Orbax writes arrays by name to files, and reads them back.

Random keys are stored as unsigned integers. Arrays with a dtype that zarr lacks are stored as
bytes. An array and its stored form have the same bits in the same order, and therefore the same
digest.

Before orbax reads arrays, their headers are compared with the manifest, since tensorstore trusts
headers. It allocates chunks of the size in the header, and parses nested JSON recursively. A
damaged header could therefore crash the process, which no `except` can prevent.
"""

import math
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

from functree.devices.meshes import of_rank
from functree.errors import CheckpointError, CheckpointFileError, FunctreeError
from functree.io.checkpoints.folder import is_in_bucket, store_spec
from functree.io.extras import ForeignErrors, import_extra
from functree.report.json_text import key_implementation, parsed, value_text
from functree.tree.arrays import bits, is_key, keys_of, on_device, unsigned, with_sharding

StoredArray = jax.Array | np.ndarray

# `Union`, since `pyright --verifytypes` reports type arguments of `jax.ShapeDtypeStruct` with `|`.
Target = Union[jax.ShapeDtypeStruct, np.ndarray]  # noqa: UP007
"""The target of a read: the shape, dtype and sharding of a JAX array, or a NumPy array."""


class Response(Protocol):
    """A save that runs in the background."""

    def result(self, timeout: float | None = None) -> None:
        """Wait at most `timeout` seconds for the save to end.

        Raise the save's error if the save failed, or a TimeoutError if it is still running.
        """


def is_done(running: Response) -> bool:
    """Wait briefly, and return whether a save has ended. Raise the save's error, if any."""
    # Short waits let the processes report errors to each other. Orbax may wait up to twenty minutes
    # for a failed process or a bucket.
    seconds = 0.25
    start = time.monotonic()
    try:
        running.result(timeout=seconds)
    except TimeoutError:
        # The save itself fails with TimeoutError if orbax has waited too long. In that case,
        # `result` raises the error before `seconds` have passed.
        if time.monotonic() - start < seconds:
            raise
        return False
    return True


def start_saving(folder: Path, arrays: Mapping[str, StoredArray]) -> Response:
    """Start writing arrays to a new folder. The arrays may be donated once the function returns."""
    orbax = import_orbax()
    if not arrays:  # orbax does not write an empty tree
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing
    with _context(orbax):
        response: Response = orbax.save_async(folder, dict(arrays))
    if jax.process_count() > 1:
        # Ended saves are dropped, since they would keep copies of arrays alive.
        _SAVES[:] = filter(_is_running, _SAVES)
        _SAVES.append(response)
        _watch()
    return response


_SAVES: list[Response] = []
# Set once a save has failed. After that, orbax's threads may still wait for other processes.
_FAILED = threading.Event()


def _is_running(save: Response) -> bool:
    try:
        with ForeignErrors(FunctreeError, "a save has failed"):
            save.result(timeout=0)
    except (FunctreeError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error.__cause__, TimeoutError):
            return True
        # The code that waits for the save raises the error.
        _FAILED.set()
    return False


@cache
def _watch() -> ThreadPoolExecutor:
    """Start a thread that waits for the end of the program.

    Returns:
        An executor whose thread ends with the program. The cache keeps it alive until then.
    """
    executor = ThreadPoolExecutor(1)
    # At the end of a program, Python signals the threads of all executors, including orbax's, to
    # end, and waits for them. `atexit` functions run only afterwards. Both threads are started
    # here, since a program that is ending cannot start threads.
    worker = executor.submit(threading.current_thread).result()
    # This thread is not a daemon: Python must wait for it before JAX disconnects from the other
    # processes, since two threads must not disconnect at once.
    threading.Thread(
        target=_end_saves, args=(worker,), name="functree checkpoint", daemon=False
    ).start()
    return executor


def _end_saves(worker: threading.Thread) -> None:
    """Stop saves that still wait for other processes at the end of the program.

    Otherwise, the saves' threads would wait for minutes for a process that could not write, and
    Python would wait for these threads. Meanwhile, the other processes would reach their ends, and
    JAX would end all processes with an error.
    """
    worker.join()
    if any(map(_is_running, _SAVES)) or _FAILED.is_set():
        # Closing the connection ends the saves' wait. The saves could not finish anyway, since
        # orbax would need new threads.
        jax.distributed.shutdown()


def load_arrays(folder: Path, targets: Mapping[str, Target]) -> dict[str, StoredArray]:
    """Read some of the arrays in a folder.

    Args:
        folder: the folder with the values.
        targets: for each array, a `jax.ShapeDtypeStruct` with a sharding, or a NumPy array.

    Returns:
        The arrays by name: JAX arrays with the targets' shardings, and NumPy arrays.

    Raises:
        CheckpointError: if an array's header cannot be read.
        CheckpointError: if the shape in an array's header differs from its target's shape.
        CheckpointError: if the chunk shape in an array's header does not fit its target's shape.
        CheckpointError: if an array's dtype differs from its target's dtype, because orbax's
            threads have a different JAX configuration.
    """
    orbax = import_orbax()
    if not targets:
        return {}
    _check_heads(folder, targets)
    context = _context(orbax)
    context.memory.read_concurrent_bytes = _most_bytes(targets)
    # Each process reads without waiting for the others, so that an error in one process does not
    # block the others.
    own = orbax.multihost.process_index()
    context.multiprocessing.active_processes = {own}
    context.multiprocessing.primary_host = own
    with context:
        arrays: dict[str, StoredArray] = orbax.load(folder, dict(targets))
    # Orbax casts silently. The digest would only report that the data have changed.
    for name, array in arrays.items():
        if array.dtype != targets[name].dtype:
            raise CheckpointError(
                f"`{name}` was read as {array.dtype} instead of {targets[name].dtype}, since "
                "`jax.enable_x64` does not apply to orbax's threads: set `jax_enable_x64` for the "
                "whole process"
            )
    return arrays


def _check_heads(folder: Path, targets: Mapping[str, Target]) -> None:
    """Compare the headers of stored arrays with their targets.

    Raises:
        CheckpointFileError: for the reasons that `load_arrays` lists.
    """
    tensorstore: Any = import_extra("tensorstore", "checkpoint")
    for base in _databases(folder):
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        reads = {name: store.read(f"{name}/zarr.json") for name in targets}
        for name, read in reads.items():
            # A missing array has no header, and orbax reports that it is missing.
            if text := read.result().value:
                _check_head(name, text, targets[name].shape)


def _databases(folder: Path) -> list[dict[str, str]]:
    """Return the tensorstore specs of the databases that contain the arrays."""
    # A bucket contains only objects. In a bucket, orbax creates a single database.
    if is_in_bucket(folder):
        return [store_spec(folder / "state")]
    return [store_spec(database.parent) for database in folder.glob("*/manifest.ocdbt")]


def _check_head(name: str, text: bytes, shape: Sequence[int]) -> None:
    try:
        head = parsed(text)
        found, chunk = head["shape"], head["chunk_grid"]["configuration"]["chunk_shape"]
        # A chunk cannot be larger than the array.
        sizes = list(zip(chunk, shape, strict=True))
        fits = found == list(shape) and all(0 < part <= max(size, 1) for part, size in sizes)
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointFileError(
            f"the stored header of `{name}` cannot be read: {error}"
        ) from error
    if not fits:
        raise CheckpointFileError(
            f"the stored header of `{name}` has shape {value_text(found)} and chunk shape "
            f"{value_text(chunk)}, which do not fit the array's shape {list(shape)} in the manifest"
        )


def import_orbax() -> Any:
    """Import orbax, or raise a FunctreeError if it is not installed."""
    # `Any`, since orbax's types are unknown where orbax is not installed.
    return import_extra("orbax.checkpoint", "checkpoint").v1


def _context(orbax: Any) -> Any:
    """Return the options for reading and writing with orbax."""
    context = orbax.Context()
    # Compression barely shrinks trained weights, and takes 2.4 times as long.
    context.array.saving.use_compression = False
    # The layout determines where arrays are placed; the file never does.
    context.array.saving.enable_write_sharding_file = False
    # If a program ends while orbax creates folders in the background, orbax's other threads wait
    # for minutes. With several processes, `_end_saves` ends that wait. If orbax created folders in
    # the foreground, all processes would wait for a process that cannot create its folders.
    context.asynchronous.create_directories_asynchronously = jax.process_count() > 1
    # Without this option, orbax refuses to read only some of the arrays.
    context.pytree.loading.partial_load = True
    return context


def _most_bytes(targets: Mapping[str, Target]) -> int:
    """Return how many bytes to read at once.

    The limit is a fifth of a process's share of all bytes, but at least 1 MiB more than the largest
    array.

    Until an array is on its device, it is in memory twice. Without a limit, half of all bytes would
    be in memory twice. With a lower limit, reading is slower, since orbax wakes all waiting reads
    whenever a read ends.
    """
    sizes = [math.prod(target.shape) * target.dtype.itemsize for target in targets.values()]
    return max(sum(sizes) // (5 * jax.process_count()), max(sizes) + 2**20)


# Versions of zarr differ in the dtypes that they support. Every version can read these dtypes if
# they are stored as one byte per element.
_AS_BYTES = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3")

NOT_STORED = ("int1", "uint1", "float6_e2m3fn", "float6_e3m2fn")
"""The dtypes that JAX supports, but that XLA cannot convert to bytes."""


def stored_form(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Return an array's stored shape and dtype."""
    if is_key(dtype):
        # A key's integers form an additional dimension. Its size depends on the key's
        # implementation.
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return words.shape, words.dtype
    if str(dtype) in _AS_BYTES:
        return shape, np.dtype(np.uint8)
    return shape, np.dtype(dtype)


def to_stored(value: jax.Array | np.ndarray | np.generic) -> StoredArray:
    """Convert an array to its stored form, with the same sharding."""
    shape, dtype = stored_form(value.shape, value.dtype)
    if not isinstance(value, jax.Array):
        return np.asarray(value).view(dtype)  # NumPy uses one byte per element anyway
    if value.dtype == dtype:
        return value
    # Each device converts its own shard, so that no data are moved.
    return with_sharding(_to_stored, stored_sharding(value.sharding, len(shape)), on_device(value))


def from_stored(stored: StoredArray, dtype: Any, sharding: Sharding | None) -> StoredArray:
    """Convert a stored array back to its original dtype.

    Args:
        stored: the stored array, with the sharding from `stored_sharding`.
        dtype: the dtype of the original array.
        sharding: the sharding of the original array; None for an array in host memory.
    """
    if stored.dtype == dtype:
        return stored
    if isinstance(stored, jax.Array) and sharding is not None:
        return with_sharding(_reader(dtype), sharding, on_device(stored))
    # In host memory, a key becomes a JAX array, and everything else stays a NumPy array.
    if is_key(dtype):
        return _reader(dtype)(jnp.asarray(stored))
    return np.asarray(stored).view(dtype)


def stored_sharding(sharding: Sharding, ndim: int) -> Sharding:
    """Return the sharding of an array's stored form. Additional dimensions are unsharded."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return sharding.update(spec=of_rank(sharding.spec, ndim))


def _to_stored(value: jax.Array) -> jax.Array:
    if is_key(value.dtype):
        return jax.random.key_data(value)
    return bits(value).astype(jnp.uint8)


# The returned function is cached, since JAX compiles each new function again.
@cache
def _reader(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    """Return a function that converts stored arrays to a dtype."""
    if is_key(dtype):
        return keys_of(key_implementation(dtype) or "")
    return lambda stored: jax.lax.bitcast_convert_type(stored.astype(unsigned(dtype)), dtype)
