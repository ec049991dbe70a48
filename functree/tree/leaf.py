"""One array of a tree, with all that filters, layouts and messages ask about it."""

from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from functree.errors import Problem
from functree.tree.arrays import array_text
from functree.tree.axes import Axes
from functree.tree.paths import Path


class Leaf(NamedTuple):
    """An array of a tree, with all that a filter or a layout may ask about it.

    Attributes:
        path: from the root of the tree.
        value: the array, or what stands for one.
        axes: the names of its dimensions.
        within: the classes of the nodes above it, outermost first.
        aliases: the paths that a pattern is tried on, where they are not just its own: the path below the subtree that
            a layout stands over, and that of the parameter that it belongs to.
        stacked: how many leading dimensions are those of stacks.
        annotated: whether anything names its axes.
        unnamed: for each unnamed dimension that an annotation leaves whole, what is written there.
        spec: the physical spec of its annotation.
        buffer: whether it is marked as not trained.
        misfit: why its axes cannot be told.
    """

    path: Path
    value: Any
    axes: Axes
    within: tuple[type, ...] = ()
    aliases: tuple[Path, ...] = ()
    stacked: int = 0
    annotated: bool = False
    unnamed: tuple[str, ...] = ()
    spec: PartitionSpec | None = None
    buffer: bool = False
    misfit: Problem | None = None

    @property
    def patterned(self) -> tuple[Path, ...]:
        """The paths that a pattern is tried on."""
        return self.aliases or (self.path,)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.value.shape

    @property
    def text(self) -> str:
        """`f32[512, 128]  "embed hidden"`, as messages show it."""
        named = f'   "{self.axes}"' if any(self.axes) else ""
        return array_text(self.value) + named

    def dimension(self, dim: int) -> str:
        """A dimension as messages name it: by its axis, else by its position."""
        name = self.axes[dim] if dim < len(self.axes) else None
        return f'"{name}"' if name else f"dimension {dim}"

    def problem(self, why: str, remedy: str) -> Problem:
        """The record of something that is wrong with this leaf."""
        return Problem(self.path, tuple(self.shape), self.text, why, remedy)


def array_problem(path: Path, value: Any, why: str, remedy: str) -> Problem:
    """The record of something that is wrong with an array of which only the path is known."""
    return Problem(path, tuple(value.shape), array_text(value), why, remedy)
