"""What classes of higher floors tell the walk over a tree: base classes, asked for here and nowhere else by name.

`SelfNaming` is for users too. The others are how functree's own `Stacked`, `Packed`, `StateRef` and `State` make
themselves known to the floors below them.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from functree.tree.axes import Axes, Names
from functree.tree.paths import Path


class SelfNaming(Protocol):
    """A module that names its own leaves, for a class whose instances differ. A user's class may define it.

    Examples:
        >>> class Projection(eqx.Module):
        ...     weight: Array
        ...     axes: str = eqx.field(static=True)
        ...
        ...     def __axis_names__(self):
        ...         return ft.names(weight=self.axes)
        >>> ft.tree_axes(Projection(jnp.ones((2, 3)), "embed heads")).weight
        Axes('embed', 'heads')
    """

    def __axis_names__(self) -> Names: ...


def own_names(node: Any) -> Names | None:
    """The names that a module gives to its own leaves."""
    # Asked of the class: `isinstance` of a protocol takes ten times as long.
    return node.__axis_names__() if hasattr(type(node), "__axis_names__") else None


class Stack:
    """A module that holds several equal layers as one: every array below it has leading dimensions for them."""

    @abstractmethod
    def stack_axes(self) -> tuple[str, ...]:
        """The names of these dimensions, outermost first."""


class PackedTree:
    """A node that stands for a tree: its leaves have the paths, axes and modules of that tree."""

    __slots__ = ()

    @property
    @abstractmethod
    def tree(self) -> Any:
        """The tree."""


class HoldsState:
    """A module whose arrays are state, and no parameters."""

    __slots__ = ()


class Entry(NamedTuple):
    """What is known of one piece of state, besides its value.

    Attributes:
        path: of the module that declares it, in the model.
        axes: the names of its dimensions, those of stacks in front.
        stacked: how many leading dimensions are those of stacks.
    """

    path: Path
    axes: Axes
    stacked: int


class StateMapping(HoldsState, Mapping[Path, Any]):
    """A mapping from paths in a model to arrays, which is one node of a tree with one child for each."""

    __slots__ = ()

    @abstractmethod
    def entries(self) -> Sequence[Entry]:
        """What is known of each child, in order."""

    @abstractmethod
    def of_layers(self, layer: Any) -> tuple[dict[Path, Any], dict[Path, Any]]:
        """The values that all layers of a stack share, and those of which each layer has its own part."""

    @abstractmethod
    def update(self, values: Mapping[Path, Any]) -> "StateMapping":
        """The same mapping with other values at some paths."""
