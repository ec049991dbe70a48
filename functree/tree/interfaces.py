"""Base classes for modules that the walk over a tree treats in a special way.

`SelfNaming` is also for classes of users. The others are the base classes of functree's own
`Stacked`, `Packed`, `StateRef` and `State`: these are defined in packages that this one must not
import.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from functree.tree.arrays import AnyArray, Tree
from functree.tree.axes import Axes, Names
from functree.tree.paths import Path


class SelfNaming(Protocol):
    """A module that names its own leaves, for a class whose instances have different axes. Any
    class may define this.

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


def own_names(node: Tree) -> Names | None:
    """The names that a module gives to its own leaves; None if it gives none."""
    # This runs for each module. `isinstance` with a protocol takes ten times as long.
    return node.__axis_names__() if hasattr(type(node), "__axis_names__") else None


Dimensions = int | Sequence[int]
"""Dimensions of an array, counted from the end: -1 is the last one."""

Matrices = Mapping[str, tuple[Dimensions, Dimensions] | None]
"""For fields of a module, or paths below it: the dimensions of a matrix that are summed over, and
those of the result. None for what is no matrix."""


class HasMatrices(Protocol):
    """A module that says which of its arrays are matrices, as `ft.nn.matrix_dimensions` asks. Any
    class may define this.

    Examples:
        >>> class Projection(eqx.Module):
        ...     weight: Float[Array, "embed heads head_dim"]
        ...
        ...     def __matrix_dimensions__(self):
        ...         return {"weight": (-3, (-2, -1))}
        >>> projection = Projection(jnp.ones((2, 3, 4)))
        >>> ft.nn.matrix_dimensions(projection)(projection).weight
        MuonDimensionNumbers(reduction_axis=-3, output_axis=(-2, -1))
    """

    def __matrix_dimensions__(self) -> Matrices: ...


def own_matrices(node: Tree) -> Matrices | None:
    """What a module says about its matrices; None if it says nothing."""
    if not hasattr(type(node), "__matrix_dimensions__"):
        return None
    return node.__matrix_dimensions__()


class Stack:
    """A module that holds several equal layers as one: every array below it has leading dimensions
    for the layers."""

    @abstractmethod
    def stack_axes(self) -> tuple[str, ...]:
        """The names of these dimensions, outermost first."""


class PackedTree:
    """A node that holds another tree in a packed form: its leaves have the paths, axes and modules
    of that tree."""

    __slots__ = ()

    @property
    @abstractmethod
    def tree(self) -> Tree:
        """The tree that was packed."""


class HoldsState:
    """A module whose arrays are state and not parameters."""

    __slots__ = ()


class TrainingState:
    """A module with a model and the state of the optimizer that trains it; the base of
    `TrainState`.

    Its fields are `model`, `opt_state`, `tx`, and `wrt`, the filter of the parameters that the
    optimizer updates.
    """

    model: Tree
    opt_state: Tree
    tx: Any
    wrt: Any


class Entry(NamedTuple):
    """One piece of state, without its value.

    Attributes:
        path: the path in the model of the module that declares it.
        axes: the names of its dimensions; those of stacks are first.
        stacked: the number of leading dimensions that belong to stacks of layers.
    """

    path: Path
    axes: Axes
    stacked: int


class StateMapping(HoldsState, Mapping[Path, AnyArray]):
    """A mapping from paths in a model to arrays. It is one node of a tree, with one child for each
    path."""

    __slots__ = ()

    @abstractmethod
    def entries(self) -> Sequence[Entry]:
        """One entry for each child, in the order of the children."""

    @abstractmethod
    def of_layers(self, layer: Tree) -> tuple[dict[Path, AnyArray], dict[Path, AnyArray]]:
        """The values that all layers of a stack share, and the values of which each layer has its
        own part."""

    @abstractmethod
    def update(self, values: Mapping[Path, AnyArray]) -> "StateMapping":
        """The same mapping with other values at some paths."""
