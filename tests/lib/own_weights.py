"""The functions of docs/own-weights.md, which users copy; and, run as a program, one of several
processes that load weights with them.

Its arguments are the folder of the weights, and whether the last process has another file.
"""

import sys
from doctest import DocTestParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from launch import ROOT, initialized

import functree as ft


def copied() -> dict[str, Any]:
    """What the page imports and defines: its functions, its model and its table."""
    page = (ROOT / "docs" / "own-weights.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for example in DocTestParser().get_examples(page):
        if example.source.startswith(("import ", "from ", "def ", "class ", "DTYPES = ")):
            exec(example.source, names)
    return names


class Recorded:
    """A slice of safetensors that records how many elements of it are read at once."""

    def __init__(self, source: Any, most: dict[str, int], name: str):
        self._source, self._most, self._name = source, most, name
        self.get_shape, self.get_dtype = source.get_shape, source.get_dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        found = self._source[index]
        self._most[self._name] = max(self._most.get(self._name, 0), found.size)
        return found


def recording(names: dict[str, Any]) -> dict[str, int]:
    """The elements that are read at most at once, by tensor, of all that these functions read."""
    most: dict[str, int] = {}
    opened = names["safe_open"]

    class Opened:
        def __init__(self, *args: Any, **options: Any):
            self._file = opened(*args, **options)
            self.keys = self._file.keys

        def get_slice(self, name: str) -> Recorded:
            return Recorded(self._file.get_slice(name), most, name)

    names["safe_open"] = Opened
    return most


def main(folder: Path, has_other: bool) -> None:
    """Load weights as all other processes do, and print what was read of the head, and its sum."""
    initialized()
    page = copied()
    most = recording(page)
    layout, mesh = ft.FSDP(("data", "model"), min_size=0), ft.make_mesh(data=2, model=4)
    like = ft.abstract(page["make"], layout, mesh)(jax.random.key(0))
    files = [folder / ("other" if has_other and jax.process_index() else "a.safetensors")]
    ft.check_processes(sizes=[file.stat().st_size for file in files])
    table = {"blocks.*.up.*": "l.*.up.*", "blocks.*.down.*": "l.*.down.*", "head": "head.T"}
    model = page["load"](files, like, table)
    print("READ", most["head"], float(ft.jit(jnp.sum)(model.head)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "other")
