"""A compiled program ─► the line of the source that an instruction comes from.

The text of a program begins with four tables: names of files, names of functions, places in files, and stack frames,
which refer to each other by number. The metadata of an instruction has the number of its innermost frame.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from functree.compiled.hlo import Instruction

_FILE = re.compile(r'(\d+) "(.*)"')
_LOCATION = re.compile(r"(\d+) \{file_name_id=(\d+).* line=(\d+)")
_FRAME = re.compile(r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")

# Files of packages, in which users do not look for their own model. The layers of `functree.nn` are parts of a model,
# and a line in one says more than the line that calls the whole model; but not the products that they share.
_OWN = Path(__file__).parents[1]
_LAYERS = _OWN / "nn"
_SHARED = frozenset({"activations.py", "attend.py", "cached.py", "products.py", "shards.py"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})


class Sources:
    """The lines of source that the instructions of a program come from.

    Args:
        text: the text of the program.
    """

    def __init__(self, text: str):
        self._text = text
        self._known: dict[int, str | None] = {}

    def line(self, one: Instruction) -> str | None:
        """`file:line` of an instruction; None if it has no stack frame."""
        frame = one.metadata("stack_frame_id")
        return None if frame is None else self.of_frame(int(frame))

    def of_frame(self, frame: int) -> str | None:
        """`file:line` of a stack frame: that of the innermost frame in the user's model, or else of the innermost."""
        if frame not in self._known:
            self._known[frame] = self._chosen(frame)
        return self._known[frame]

    def _chosen(self, frame: int) -> str | None:
        frames = list(self._outwards(frame))
        chosen = next((place for place in frames if _is_model(Path(place[0]))), None)
        if chosen is None:
            chosen = next(iter(frames), None)
        return None if chosen is None else f"{chosen[0]}:{chosen[1]}"

    def _outwards(self, frame: int) -> Iterator[tuple[str, int]]:
        """File and line of a frame, and of those around it."""
        while frame in self._frames:
            location, parent = self._frames[frame]
            file, line = self._locations[location]
            yield self._files[file], line
            # It is printed one too high, so that the outermost frame seems to be its own parent.
            frame = parent - 1

    @cached_property
    def _files(self) -> dict[int, str]:
        return {int(number): name for number, name in _FILE.findall(self._table("FileNames"))}

    @cached_property
    def _locations(self) -> dict[int, tuple[int, int]]:
        found = _LOCATION.findall(self._table("FileLocations"))
        return {int(number): (int(file), int(line)) for number, file, line in found}

    @cached_property
    def _frames(self) -> dict[int, tuple[int, int]]:
        found = _FRAME.findall(self._table("StackFrames"))
        return {int(number): (int(location), int(parent or 0)) for number, location, parent in found}

    def _table(self, title: str) -> str:
        """The lines of a table in the head of the text; empty if it has no such table."""
        start = self._text.find(f"\n{title}\n")
        return "" if start < 0 else self._text[start : self._text.find("\n\n", start + 1)]


def _is_model(file: Path) -> bool:
    """Whether a file is code of a model, and not of a package or of functree's transforms."""
    if file.is_relative_to(_OWN):
        return file.is_relative_to(_LAYERS) and file.name not in _SHARED
    return not _INSTALLED & set(file.parts)
