"""What comes out of a compiled function: its arrays in one flat node, and all the rest as static data."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.tree_util import GetAttrKey, register_pytree_with_keys, tree_flatten

from functree.tree.leaves import is_array


class Shape(NamedTuple):
    """A result without its arrays: equal by value, so that a second trace of one function gives the same.

    Attributes:
        treedef: of the result.
        positions: of the arrays among its leaves.
        statics: the other leaves, with their types.
    """

    treedef: Any
    positions: tuple[int, ...]
    statics: tuple[tuple[type, Any], ...]

    def fill(self, values: Sequence[Any]) -> Any:
        """The result with these arrays."""
        if not self.statics:
            return self.treedef.unflatten(values)
        arrays, rest, places = iter(values), iter(self.statics), set(self.positions)
        size = len(self.positions) + len(self.statics)
        return self.treedef.unflatten([next(arrays) if i in places else next(rest)[1] for i in range(size)])


class Result:
    """A result on its way out: its arrays, and as static data its shape."""

    __slots__ = ("shape", "values")
    shape: Shape
    values: Sequence[Any]

    def __init__(self, values: Sequence[Any], shape: Shape):
        self.values, self.shape = values, shape

    @classmethod
    def of(cls, tree: Any) -> "Result":
        """A result taken apart. What is no array goes through as it is."""
        leaves, treedef = tree_flatten(tree)
        positions = tuple(i for i, x in enumerate(leaves) if is_array(x))
        places = set(positions)
        statics = tuple((type(x), x) for i, x in enumerate(leaves) if i not in places)
        return cls([leaves[i] for i in positions], Shape(treedef, positions, statics))

    @property
    def tree(self) -> Any:
        """The result."""
        return self.shape.fill(self.values)


register_pytree_with_keys(
    Result,
    lambda node: (tuple((GetAttrKey(str(i)), x) for i, x in enumerate(node.values)), node.shape),
    lambda shape, values: Result(tuple(values), shape),
    lambda node: (tuple(node.values), node.shape),
)
