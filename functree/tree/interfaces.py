"""Base classes mark the modules that tree traversals treat specially.

They are bases of functree's own `Stacked`, `Packed`, `StateRef`, `State` and `TrainState`, which
are defined in packages that this package must not import. Users' classes may define
`__matrix_dimensions__`.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from functree.tree.arrays import AnyArray, Tree
from functree.tree.axes import Axes
from functree.tree.paths import Path

Dimensions = int | tuple[int, ...]
"""The dimensions of an array, counted from the end: -1 is the last one."""

Matrices = Mapping[str, tuple[Dimensions, Dimensions] | None]
"""A mapping from a module's fields to the dimensions of matrices.

Each value holds the dimensions that a product sums over, and the dimensions of the product's
result. The value is None for an array that is not a matrix."""


def own_matrices(node: Tree) -> Matrices | None:
    """Return a module's declaration of its matrices, for `ft.nn.matrix_dimensions`, or None.

    Any class may define `__matrix_dimensions__`.

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
    if not hasattr(type(node), "__matrix_dimensions__"):
        return None
    return node.__matrix_dimensions__()


class Stack:
    """A module that holds several layers of one structure as a single layer.

    Every array below it has leading dimensions for the layers.
    """

    @abstractmethod
    def stack_axes(self) -> tuple[str, ...]:
        """Return the names of the leading dimensions, outermost first."""


class PackedTree:
    """A node that holds another tree in packed form.

    Its leaves have the same paths, axes and enclosing modules as in that tree.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def tree(self) -> Tree:
        """The tree that was packed."""


class HoldsState:
    """A module whose arrays are state and not parameters."""

    __slots__ = ()


class TrainingState:
    """A module with a model and the state of its optimizer; the base of `TrainState`.

    Its fields are `model`, `opt_state`, `tx`, and `wrt`, the filter for the parameters that the
    optimizer updates.
    """

    model: Tree
    opt_state: Tree
    tx: Any
    wrt: Any


class Entry(NamedTuple):
    """A piece of state, without its value.

    Attributes:
        path: the path of its `StateRef` in the model.
        axes: the names of its dimensions, beginning with the axes of stacks.
        stacked: the number of leading dimensions that belong to stacks of layers.
    """

    path: Path
    axes: Axes
    stacked: int


class StateMapping(HoldsState, Mapping[Path, AnyArray]):
    """A mapping from paths in a model to arrays.

    It is one node of a tree, with one child for each path.
    """

    __slots__ = ()

    @abstractmethod
    def entries(self) -> Sequence[Entry]:
        """Return an entry for each child, in the order of the children."""

    @abstractmethod
    def of_layers(self, layer: Tree) -> tuple[dict[Path, AnyArray], dict[Path, AnyArray]]:
        """Separate the values that all layers of a stack share from the values sliced by layer."""

    @abstractmethod
    def update(self, values: Mapping[Path, AnyArray]) -> "StateMapping":
        """Return a copy of the mapping with new values at some paths."""
