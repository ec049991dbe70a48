"""`open_tensors` opens a model's safetensors files, whose tensors are read in blocks."""

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
    """Tensor in a file, which is read in slices.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        source: the slice object of safetensors, which reads on demand.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    source: Any

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Read a block of the tensor."""
        # Safetensors refuses slices of a dimension of size 0.
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)[tuple(index)]
        return np.asarray(self.source[tuple(index)])

    def beginning(self) -> np.ndarray:
        """Read some of the first elements, to distinguish the tensor from another model's."""
        # Safetensors refuses slices that end beyond a dimension.
        return self.read([slice(0, min(size, 16)) for size in self.shape])


DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""Dtypes of weights, by their names in safetensors."""

ALL_DTYPES = {
    **DTYPES,
    "C64": "complex64",
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""Dtypes that a `state_dict` may contain, for example in a count of batches."""


def open_tensors(files: Sequence[Path], dtypes: Mapping[str, str] = DTYPES) -> Mapping[str, Tensor]:
    """Open all tensors in some files, by name.

    Safetensors checks the shapes against the size of each file, so the shapes can be trusted.

    Args:
        files: the files.
        dtypes: the allowed dtypes, by their names in safetensors.

    Raises:
        FunctreeError: if a file is not a safetensors file, or is incomplete.
        FunctreeError: if two files have a tensor with the same name.
        FunctreeError: if a tensor's dtype is not allowed.
    """
    safetensors = import_extra("safetensors", "weights")
    tensors: dict[str, Tensor] = {}
    # Opening a pipe would wait for a writer.
    if others := [file for file in files if not os.path.isfile(file)]:
        if not os.path.lexists(others[0]):
            raise FunctreeError(f"there is no file {others[0]}")
        raise FunctreeError(f"{others[0]} cannot be read: it is not a regular file")
    for file in files:
        try:
            handle = safetensors.safe_open(file, framework="np")
        except (safetensors.SafetensorError, OSError) as error:
            raise FunctreeError(
                f"{file} is not a safetensors file, or is incomplete: {error}"
            ) from None
        for name in handle.keys():
            # The folder may hold files of two models, for example.
            if name in tensors:
                raise FunctreeError(
                    f"{file}: another file also has a tensor {name!r}: load only one of the files"
                )
            # An unread slice, whose shape and dtype come from the header of the file.
            source = handle.get_slice(name)
            kind = source.get_dtype()
            if kind not in dtypes:
                raise FunctreeError(
                    f"{file}: {name} has the dtype {kind}, but must have one of {', '.join(dtypes)}"
                )
            tensors[name] = Tensor(tuple(source.get_shape()), np.dtype(dtypes[kind]), source)
    return tensors


def files_of(folder: Path) -> list[Path]:
    """Find a folder's files with tensors: the files in the index, or all files without an index.

    Raises:
        FunctreeError: if the folder has no safetensors file.
        FunctreeError: if the index is invalid.
        FunctreeError: if a file in the index is missing.
        FunctreeError: if a file in the index is outside the folder.
    """
    # Only files in the index are read, since the folder may also hold a partial download, or a copy
    # of the model for another program.
    index = folder / INDEX
    if not os.path.lexists(index):
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise FunctreeError(f"{folder} has no *.safetensors file")
        return found
    if not os.path.isfile(index):
        raise FunctreeError(f"{index} cannot be read: it is not a regular file")
    names = sorted(_file_names(index))
    # Links in the folder are followed, since Hugging Face's cache consists of links. A path in
    # the index must not lead elsewhere.
    if outside := [value_text(name) for name in names if not _is_inside(name)]:
        raise FunctreeError(f"{index} names files outside its folder: {listed(outside)}")
    if missing := [value_text(name)[1:-1] for name in names if not os.path.isfile(folder / name)]:
        raise FunctreeError(f"{index} names missing files: {listed(missing)}; download them")
    return [folder / name for name in names]


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except PermissionError:
        raise  # it may be a folder
    except OSError:
        return False  # for example, the name is too long for the file system


def _is_inside(name: str) -> bool:
    """Return whether a name stays inside the folder."""
    path = Path(name)
    return not path.anchor and ".." not in path.parts


def _file_names(index: Path) -> set[str]:
    """Read the names of the files in an index."""
    try:
        named = parsed(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FunctreeError(f"{index} is not JSON: {error}") from None
    files = named.get("weight_map") if isinstance(named, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise FunctreeError(f'{index} must have a "weight_map" that maps each weight to its file')
    return set(files.values())
