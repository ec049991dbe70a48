"""The result of a compiled function ─► an `Output`: its arrays in one flat node, and the rest as static data."""

from collections.abc import Sequence
from typing import Any

from jax.core import Tracer
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from functree.calls.closures import held_at_any_depth, kept_by
from functree.calls.signature import RESULT
from functree.errors import FunctreeError, Problem, count
from functree.tree.leaves import read, too_deep
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton, statics_of
from functree.tree.skeleton.static_value import runs_once


class Output:
    """A flattened result of a function.

    Attributes:
        values: the arrays of the result.
        skeleton: the result without its arrays.
        which: for each array of the skeleton, its index among the values; None if these are one to one.
    """

    __slots__ = ("skeleton", "values", "which")
    values: Sequence[Any]
    skeleton: Skeleton
    which: tuple[int, ...] | None

    def __init__(self, values: Sequence[Any], skeleton: Skeleton, which: tuple[int, ...] | None = None):
        self.values, self.skeleton, self.which = values, skeleton, which

    @classmethod
    def of(cls, tree: Any, name: str) -> "Output":
        """Flatten a result.

        Args:
            tree: the result of a function that is being traced.
            name: the name of the function.

        Raises:
            FunctreeError: a static value of the result is a traced array, a function that closes over one, or what
                computes only when it is used, such as a generator. It must not be used after the trace.
        """
        try:
            skeleton, values = Skeleton.apart(tree)
            statics = statics_of(tree)
        except RecursionError:
            raise too_deep(tree) from None
        except SystemError:
            read(tree)  # raises an error for a tree that JAX cannot flatten
            raise
        problems: list[Problem] = []
        for path, value in statics:
            what, why, remedy = "", "", ""
            if isinstance(value, Tracer):
                why, remedy = "is a traced array in a static field", "declare the field without `static=True`"
            elif (kept := _traced_in(value)) is not None:
                why = f"closes over a traced array, `{kept}`"
                remedy = (
                    "make it an array of the result; or make the object outside of the trace, and then `ft.shard` it"
                )
            elif runs_once(value):
                what, why, remedy = type(value).__name__, "computes when it is used", "return a list or an array"
            if remedy:
                why += ", which would be after its trace has ended"
                problems.append(Problem(Path((RESULT, *path)), None, what, why, remedy))
        if problems:
            number = count(len(problems), "static value")
            raise FunctreeError(f"{name}: the result has {number} that would outlive the trace", problems)
        return cls(values, skeleton)

    def distinct(self) -> "Output":
        """The same output, in which an array that is at two paths of the result is only one value."""
        first: dict[int, int] = {}
        which = tuple(first.setdefault(id(value), len(first)) for value in self.values)
        different = {id(value): value for value in self.values}
        return Output(tuple(different.values()), self.skeleton, which)

    def built(self) -> Any:
        """The result of a call. It shares nothing that can be changed with the results of other calls."""
        return self.skeleton.build(self.values if self.which is None else [self.values[i] for i in self.which])

    @property
    def tree(self) -> Any:
        """A tree with the structure of the result, whose values may be anything."""
        return self.like(self.values)

    def like(self, values: Sequence[Any]) -> Any:
        """A tree with the structure of the result and with other values."""
        return self.skeleton.fresh(values if self.which is None else [values[i] for i in self.which])


def _traced_in(value: Any) -> Path | None:
    """The path of a traced array that a function keeps, among its variables; None if there is none."""
    if not callable(value) or isinstance(value, type):
        return None
    return next((path for path, held in held_at_any_depth(kept_by(value)) if isinstance(held, Tracer)), None)


register_pytree_with_keys(
    Output,
    lambda node: (
        tuple((GetAttrKey(str(i)), value) for i, value in enumerate(node.values)),
        (node.skeleton, node.which),
    ),
    lambda static, values: Output(tuple(values), *static),
    lambda node: (tuple(node.values), (node.skeleton, node.which)),
)
