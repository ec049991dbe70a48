"""The safetensors files of a model ─► shape, dtype and blocks of each tensor, by name."""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from functree.errors import FunctreeError, listed
from functree.io.extras import import_extra
from functree.report.json_text import parsed, value_text

INDEX = "model.safetensors.index.json"


class Tensor(NamedTuple):
    """A tensor in a file, of which slices can be read. Nothing is read whole.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        source: an open slice of safetensors.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    source: Any

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """A block of the tensor."""
        # Of a dimension of size 0, safetensors takes no slice at all.
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)[tuple(index)]
        return np.asarray(self.source[tuple(index)])

    def beginning(self) -> np.ndarray:
        """Some of its first elements, by which it is told from that of another model."""
        # Safetensors takes no slice that ends behind a dimension.
        return self.read([slice(0, min(size, 16)) for size in self.shape])


DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""The dtypes of weights, by their names in safetensors."""

ALL_DTYPES = {
    **DTYPES,
    "C64": "complex64",
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""Those of all that a `state_dict` may have, such as a count of batches."""


def open_tensors(files: Sequence[Path], dtypes: Mapping[str, str] = DTYPES) -> Mapping[str, Tensor]:
    """All tensors in some files, by name.

    What their heads say is bounded by what is there: safetensors compares the shapes with the
    bytes of the file.

    Args:
        files: the files.
        dtypes: the dtypes that they may have, by their names in safetensors.

    Raises:
        FunctreeError: one is not a safetensors file, or not all of it is there; two have a tensor
            of one name; a tensor has another dtype.
    """
    safetensors = import_extra("safetensors", "weights")
    tensors: dict[str, Tensor] = {}
    # Opening a pipe would wait for who writes to it.
    if others := [file for file in files if not os.path.isfile(file)]:
        if not os.path.lexists(others[0]):
            raise FunctreeError(f"there is no file {others[0]}")
        raise FunctreeError(f"{others[0]} is not a safetensors file: it is not a file at all")
    for file in files:
        try:
            handle = safetensors.safe_open(file, framework="np")
        except (safetensors.SafetensorError, OSError) as error:
            raise FunctreeError(
                f"{file} is not a safetensors file, or not all of it is there: {error}"
            ) from None
        for name in handle.keys():
            # Such as files of two models in one folder: which one is meant is not known.
            if name in tensors:
                raise FunctreeError(f"{file}: another file has a tensor {name!r} too")
            # A slice that is not read yet: it knows shape and dtype from the head of the file.
            source = handle.get_slice(name)
            kind = source.get_dtype()
            if kind not in dtypes:
                raise FunctreeError(
                    f"{file}: {name} has the dtype {kind}, and weights are of {', '.join(dtypes)}"
                )
            tensors[name] = Tensor(tuple(source.get_shape()), np.dtype(dtypes[kind]), source)
    return tensors


def files_of(folder: Path) -> list[Path]:
    """The files with tensors in a folder: those that the index names, or all.

    Raises:
        FunctreeError: there is no file, a file that the index names is missing or is elsewhere, or
            the index is not one.
    """
    # With an index the files are those that it names: a download that was stopped, or a copy of the
    # model in the form of another program, may lie beside them.
    index = folder / INDEX
    if not os.path.lexists(index):
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise FunctreeError(f"{folder}: there is no *.safetensors file")
        return found
    if not os.path.isfile(index):
        raise FunctreeError(f"{index} cannot be read: it is not a file")
    names = sorted(_file_names(index))
    # A link in the folder is followed: it was made by who has made the folder, and Hugging Face's
    # cache consists of links. What is written in a file is no reason to read elsewhere.
    if outside := [value_text(name) for name in names if not _is_inside(name)]:
        raise FunctreeError(f"{index} names files outside of its folder: {listed(outside)}")
    if missing := [value_text(name)[1:-1] for name in names if not os.path.isfile(folder / name)]:
        raise FunctreeError(f"{index} names files that are not there: {listed(missing)}")
    return [folder / name for name in names]


def is_folder(path: Path) -> bool:
    """Return whether a path is that of a folder."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except PermissionError:
        raise  # it may be one
    except OSError:
        return False  # such as a name that is too long for the file system


def _is_inside(name: str) -> bool:
    """Return whether a name is one in the folder, or in a folder of it."""
    path = Path(name)
    return not path.anchor and ".." not in path.parts


def _file_names(index: Path) -> set[str]:
    """The names of the files in an index."""
    try:
        named = parsed(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FunctreeError(f"{index} is not JSON: {error}") from None
    files = named.get("weight_map") if isinstance(named, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise FunctreeError(f'{index}: it has to have a "weight_map", from each weight to its file')
    return set(files.values())
