"""One array of a tree, with all that filters, layouts and messages ask about it."""

import re
from typing import Any, NamedTuple

from functree.errors import Problem
from functree.tree.axes import Axes
from functree.tree.paths import Path


class Leaf(NamedTuple):
    """An array of a tree, with all that a filter or a layout may ask about it.

    Attributes:
        path: where it stands.
        value: the array, or what stands for one.
        axes: the names of its dimensions.
        within: the classes of the nodes that it lies in, outermost first.
        names: the paths that a pattern is tried on, where they are not just its own: below the subtree that a layout
            stands over, and the parameter's that it stands for.
        stacked: how many leading dimensions are those of stacks.
        annotated: whether anything names its axes.
        unnamed: for each unnamed dimension that an annotation leaves whole, what is written there.
        spec: the physical spec of its annotation.
        buffer: whether it is marked as not trained.
        problem: why its axes cannot be told.
    """

    path: Path
    value: Any
    axes: Axes
    within: tuple[type, ...] = ()
    names: tuple[Path, ...] = ()
    stacked: int = 0
    annotated: bool = False
    unnamed: tuple[str, ...] = ()
    spec: Any = None
    buffer: bool = False
    problem: Problem | None = None

    @property
    def patterned(self) -> tuple[Path, ...]:
        """The paths that patterns are tried on."""
        return self.names or (self.path,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def text(self) -> str:
        """`f32[512, 128]  "embed hidden"`, as messages show it."""
        named = f'   "{self.axes}"' if any(self.axes) else ""
        return array_text(self.value) + named


def array_text(value: Any) -> str:
    """`f32[512, 128]`."""
    return f"{dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"


def dtype_text(dtype: Any) -> str:
    """`f32`, `bf16`, `i32`, `u8`, `key<fry>`: a dtype as JAX's own texts shorten it."""
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
    return re.sub(r"^(bfloat|float|uint|int|complex)(?=\d)", lambda m: short[m.group()], str(dtype))
