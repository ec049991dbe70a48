"""What comes out of a compiled function: its arrays in one flat node, and all the rest as static data."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jax.tree_util import GetAttrKey, register_pytree_with_keys

from functree.tree.codec import Form, builder, form_of, taker


class Shape:
    """A result without its arrays: equal by value, so that a second trace of one function gives the same."""

    def __init__(self, form: Form):
        self.form: Form = form
        try:
            self._hash: int = hash(form)
        except TypeError:  # a set, say: it goes out as it is, and compares by value
            self._hash = hash(form.arrays)

    @cached_property
    def build(self) -> Any:
        """A function from arrays to the result."""
        return builder(self.form)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Shape) and self.form == other.form)

    def __hash__(self) -> int:
        return self._hash


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
        form = form_of(tree)
        return cls(taker(form)(tree) or (), Shape(form))

    @property
    def tree(self) -> Any:
        """The result."""
        return self.shape.build(self.values)


register_pytree_with_keys(
    Result,
    lambda node: (tuple((GetAttrKey(str(i)), x) for i, x in enumerate(node.values)), node.shape),
    lambda shape, values: Result(tuple(values), shape),
    lambda node: (tuple(node.values), node.shape),
)
