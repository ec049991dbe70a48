"""`open_tensors` opens a model's safetensors files, whose tensors are read in blocks."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from functree.errors import FunctreeError, listed
from functree.io.extras import import_extra
from functree.report.json_text import parsed, value_text

INDEX = "model.safetensors.index.json"


class Tensor(NamedTuple):
    """A tensor in a file, from which blocks can be read.

    Attributes:
        shape: the tensor's shape.
        dtype: the tensor's dtype.
        source: safetensors' slice object, which reads values on demand.
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
        """Read the first elements, to distinguish the tensor from a different model's tensor."""
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
"""The dtypes of weights, by their names in safetensors."""

ALL_DTYPES = {
    **DTYPES,
    "C64": "complex64",
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""The dtypes that a `state_dict` may contain, by their names in safetensors.

For example, a count of batches is an integer.
"""


def open_tensors(files: Sequence[Path], dtypes: Mapping[str, str] = DTYPES) -> Mapping[str, Tensor]:
    """Open files, and return all their tensors by name, without reading values.

    Safetensors checks the shapes against the size of each file, so the shapes can be trusted.

    Args:
        files: the files.
        dtypes: the allowed dtypes, by their names in safetensors.

    Raises:
        FunctreeError: if `safetensors` is not installed.
        FunctreeError: if a file does not exist.
        FunctreeError: if a path is not a regular file, such as a folder or a pipe.
        FunctreeError: if a file is not a safetensors file.
        FunctreeError: if a file is incomplete.
        FunctreeError: if two files contain a tensor with the same name.
        FunctreeError: if a tensor's dtype is not allowed.
    """
    safetensors = import_extra("safetensors", "weights")
    tensors: dict[str, Tensor] = {}
    for file in files:
        # Opening a pipe would wait for a writer.
        if not file.is_file():
            raise FunctreeError(f"{file} cannot be read: it is missing, or is not a regular file")
        try:
            handle = safetensors.safe_open(file, framework="np")
        except (safetensors.SafetensorError, OSError) as error:
            raise FunctreeError(
                f"{file} is not a safetensors file, or is incomplete: {error}"
            ) from None
        for name in handle.keys():
            # For example, a folder may contain files of two models.
            if name in tensors:
                raise FunctreeError(
                    f"{file}: another file also contains a tensor named {name!r}: load only one of "
                    "the two files"
                )
            # No values are read: the shape and dtype come from the file's header.
            source = handle.get_slice(name)
            kind = source.get_dtype()
            if kind not in dtypes:
                raise FunctreeError(
                    f"{file}: the dtype of {name} is {kind}, but must be one of {', '.join(dtypes)}"
                )
            tensors[name] = Tensor(tuple(source.get_shape()), np.dtype(dtypes[kind]), source)
    return tensors


def files_of(folder: Path) -> list[Path]:
    """List a folder's safetensors files: those named in its index, or all if it has no index.

    Raises:
        FunctreeError: if the folder contains neither an index nor a safetensors file.
        FunctreeError: if the index is not a regular file.
        FunctreeError: if the index is not JSON that maps tensors to files.
        FunctreeError: if the index names a file outside the folder.
    """
    # Only files in the index are read, since the folder may also contain a partial download, or a
    # copy of the model for a different program.
    index = folder / INDEX
    if not os.path.lexists(index):
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise FunctreeError(f"{folder} contains no *.safetensors file")
        return found
    if not os.path.isfile(index):
        raise FunctreeError(f"{index} cannot be read: it is not a regular file")
    names = sorted(_file_names(index))
    # Links in the folder are followed, since Hugging Face's cache consists of links. A path in
    # the index must not lead outside the folder.
    outside = [name for name in names if Path(name).anchor or ".." in Path(name).parts]
    if outside:
        raise FunctreeError(
            f"{index} names files outside its folder: {listed(list(map(value_text, outside)))}"
        )
    return [folder / name for name in names]


def _file_names(index: Path) -> set[str]:
    """Read the file names in an index."""
    try:
        named = parsed(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FunctreeError(f"{index} is not JSON: {error}") from None
    files = named.get("weight_map") if isinstance(named, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise FunctreeError(f'{index} must have a "weight_map" that maps each weight to its file')
    return set(files.values())
