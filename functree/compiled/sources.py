"""`Sources` finds the source line that an instruction of a compiled program comes from.

A program's text begins with four tables that refer to each other by number: files, functions,
places in files, and stack frames. An instruction's metadata contains the number of its innermost
frame.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from functree.compiled.hlo import Instruction

_FILE = re.compile(r'(\d+) "(.*)"')
_LOCATION = re.compile(r"(\d+) \{file_name_id=(\d+).* line=(\d+)")
_FRAME = re.compile(r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")

_PACKAGE = Path(__file__).parents[1]
_INSTALLED = ("site-packages", "dist-packages")
# Installed packages whose code is not part of a model. All calls of one of their layers or helpers
# share a line, so the line of the caller is more informative.
_NO_MODELS = frozenset({"einops", "equinox", "flax", "haliax", "jax", "jaxlib", "optax"})
_layer_files: set[str] = set()


def name_lines_of(*layers: Callable[..., object]) -> None:
    """Treat the modules of some layers as model code, although the modules belong to functree.

    `functree.nn`, which this module cannot import, calls this function once with its public layers.
    Layers are parts of a user's model, and a line inside a layer is more informative than the line
    that calls the whole model.

    Args:
        layers: classes and functions.
    """
    for layer in layers:
        # `inspect.getfile` would return the file of a decorator.
        _layer_files.add(str(sys.modules[layer.__module__].__file__))


class Lines(NamedTuple):
    """The source lines that an instruction comes from, each written as `file:line`.

    Attributes:
        source: the innermost line of model code; if there is none, the innermost line.
        called_from: the innermost line of the user's own code, if `source` is in an installed
            package or in functree; None otherwise.
    """

    source: str
    called_from: str | None


class Sources:
    """The source lines of a program's instructions.

    Args:
        text: the text of the program.
    """

    def __init__(self, text: str):
        files: dict[str, str] = dict(_FILE.findall(_table(text, "FileNames")))
        places: dict[str, tuple[str, int]] = {}
        for place, file, line in _LOCATION.findall(_table(text, "FileLocations")):
            places[place] = (files[file], int(line))
        # The file, the line and the parent of each frame.
        self._frames: dict[int, tuple[str, int, int]] = {}
        for frame, place, parent in _FRAME.findall(_table(text, "StackFrames")):
            # The printed parent is one too high: the outermost frame seems to be its own parent.
            self._frames[int(frame)] = (*places[place], int(parent or 0) - 1)
        self._known: dict[int, Lines | None] = {}

    def of(self, one: Instruction) -> Lines | None:
        """Return the lines of an instruction; None if it has no stack frame."""
        frame = one.metadata("stack_frame_id")
        if frame is None:
            return None
        return self.of_frame(int(frame))

    def of_frame(self, frame: int) -> Lines | None:
        """Return the lines of a stack frame, or None if the text does not contain the frame."""
        if frame not in self._known:
            self._known[frame] = lines_of(self._outwards(frame))
        return self._known[frame]

    def _outwards(self, frame: int) -> Iterator[tuple[str, int]]:
        """Yield the file and line of a frame, and of each frame around it, innermost first."""
        while frame in self._frames:
            file, line, frame = self._frames[frame]
            yield file, line


def _table(text: str, title: str) -> str:
    """Return the lines of a table at the beginning of a text; empty if there is none."""
    start = text.find(f"\n{title}\n")
    if start < 0:
        return ""
    return text[start : text.find("\n\n", start + 1)]


def lines_of(frames: Iterable[tuple[str, int]]) -> Lines | None:
    """Choose the source lines among frames, innermost first; None if there are no frames."""
    innermost = source = called_from = None
    for file, number in frames:
        line = f"{file}:{number}"
        innermost = innermost or line
        if source is None and is_model_file(file):
            source = line
        if not is_own_file(file) and not _in_package(file):
            called_from = line  # the user's own code
            break
    if innermost is None:
        return None
    if source is None or source == called_from:
        return Lines(source or innermost, None)
    return Lines(source, called_from)


def source_end(source: str) -> str:
    """Return the last two parts of a file's path, which suffice to recognize the file."""
    return "/".join(source.replace("\\", "/").split("/")[-2:])


def is_model_file(file: str) -> bool:
    """Return whether a file may contain a model.

    Such files are the user's files, functree's layers, and files of installed packages that may
    contain models.
    """
    if is_own_file(file):
        return is_layer(file)
    package = _in_package(file)
    return not package or package[0] not in _NO_MODELS


@cache
def is_own_file(file: str) -> bool:
    """Return whether a file belongs to functree."""
    return Path(file).is_relative_to(_PACKAGE)


def is_layer(file: str) -> bool:
    """Return whether a file contains a layer of functree."""
    return file in _layer_files


@cache
def _in_package(file: str) -> tuple[str, ...]:
    """Return a path's parts below a folder of installed packages; empty if it is not in one."""
    parts = Path(file).parts
    # The last such folder: a virtual environment may be inside another one's packages.
    for i in range(len(parts) - 1, -1, -1):
        if parts[i] in _INSTALLED:
            return parts[i + 1 :]
    return ()
