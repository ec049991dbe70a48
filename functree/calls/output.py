"""What comes out of a compiled function: its arrays in one flat node, and the rest as static data."""

from collections.abc import Sequence
from typing import Any

from jax.core import Tracer
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from functree.errors import FunctreeError, Problem, count
from functree.tree.skeleton.skeleton import Skeleton


class Output:
    """A function's result, taken apart.

    Attributes:
        values: its arrays.
        skeleton: the result without its arrays.
        which: for each array of the skeleton, its place among the values; None where each has one of its own.
    """

    __slots__ = ("skeleton", "values", "which")
    values: Sequence[Any]
    skeleton: Skeleton
    which: tuple[int, ...] | None

    def __init__(self, values: Sequence[Any], skeleton: Skeleton, which: tuple[int, ...] | None = None):
        self.values, self.skeleton, self.which = values, skeleton, which

    @classmethod
    def of(cls, tree: Any, name: str) -> "Output":
        """A result taken apart.

        Args:
            tree: the result of a function that is being traced.
            name: of the function.

        Raises:
            FunctreeError: a tracer in a static field of the result, where it would outlive its trace.
        """
        skeleton = Skeleton.of(tree)
        kept = [path for path, value in skeleton.statics if isinstance(value, Tracer)]
        if kept:
            why = "is a traced array in a static field, which would be used after its trace has ended"
            problems = [Problem(path, None, "", why, "declare the field without `static=True`") for path in kept]
            raise FunctreeError(
                f"{name}: {count(len(kept), 'static field')} of the result with traced values", problems
            )
        return cls(skeleton.take(tree) or (), skeleton)

    def distinct(self) -> "Output":
        """The same, with an array that stands at two places of the result only once."""
        first: dict[int, int] = {}
        which = tuple(first.setdefault(id(value), len(first)) for value in self.values)
        different = {id(value): value for value in self.values}
        return Output(tuple(different.values()), self.skeleton, which)

    @property
    def tree(self) -> Any:
        """The result."""
        return self.like(self.values)

    def like(self, values: Sequence[Any]) -> Any:
        """A tree like the result, with others for its values."""
        return self.skeleton.build(values if self.which is None else [values[i] for i in self.which])


register_pytree_with_keys(
    Output,
    lambda node: (
        tuple((GetAttrKey(str(i)), value) for i, value in enumerate(node.values)),
        (node.skeleton, node.which),
    ),
    lambda static, values: Output(tuple(values), *static),
    lambda node: (tuple(node.values), (node.skeleton, node.which)),
)
