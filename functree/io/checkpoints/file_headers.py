"""The folder of the values ─► whether tensorstore can be let near: it believes what files say.

It allocates a chunk of any size that the head of an array has, and reads JSON of any depth by one
call inside another. Both end the process, which no handler of errors prevents.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from functree.errors import CheckpointFileError
from functree.io.checkpoints.bucket_objects import key_value_store
from functree.io.checkpoints.bucket_store import is_in_bucket
from functree.io.extras import import_extra
from functree.report.json_text import parsed, value_text


def check_heads(folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Compare the heads of some arrays with what the manifest says of them.

    Args:
        folder: the folder of the values.
        shapes: the shapes of the arrays that are stored, by name.

    Raises:
        CheckpointFileError: one is another, or cannot be read; something there is not a file.
    """
    tensorstore: Any = import_extra("tensorstore", "checkpoint")
    for base in _databases(folder):
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        reads = {name: store.read(f"{name}/zarr.json") for name in shapes}
        for name, read in reads.items():
            # One that is not there has no value. Orbax says so, in its own words.
            if text := read.result().value:
                _check_head(name, text, shapes[name])


def _databases(folder: Path) -> list[dict[str, str]]:
    """How tensorstore opens the files that the arrays are in."""
    # In a bucket all are objects, and orbax makes one database.
    if is_in_bucket(folder):
        return [key_value_store(folder / "state")]
    for file in _files(folder):
        # Opening a pipe would wait for who writes to it.
        if not file.is_file():
            raise CheckpointFileError(f"{file} cannot be read: it is not a file")
    found = folder.glob("*/manifest.ocdbt")
    return [{"driver": "file", "path": f"{database.parent}/"} for database in found]


def _files(folder: Path) -> Iterator[Path]:
    for inside, _, names in os.walk(folder):
        for name in names:
            yield Path(inside, name)


def _check_head(name: str, text: bytes, shape: Sequence[int]) -> None:
    try:
        head = parsed(text)
        found, chunk = head["shape"], head["chunk_grid"]["configuration"]["chunk_shape"]
        fits = found == list(shape) and _is_part(chunk, shape)
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointFileError(
            f"the head of {name} in the files cannot be read: {error}"
        ) from error
    if not fits:
        raise CheckpointFileError(
            f"the head of {name} in the files has the shape {value_text(found)} in parts of "
            f"{value_text(chunk)}, and the manifest {list(shape)}"
        )


def _is_part(chunk: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a chunk is not larger than the array."""
    sizes = zip(chunk, shape, strict=True)
    return all(0 < part <= max(size, 1) for part, size in sizes)
