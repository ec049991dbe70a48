"""An `Output` holds the result of a compiled function: its arrays, and the rest as static data."""

from collections.abc import Sequence

import jax
from jax.core import Tracer
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from functree.calls.closures import held, kept_by
from functree.calls.signature import RESULT
from functree.calls.static_arguments import JAX_VALUE, is_jax_value
from functree.errors import FunctreeTypeError, Problem, count
from functree.labels.leaf import array_problem
from functree.labels.leaves import read, too_deep
from functree.tree.arrays import Tree
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton
from functree.tree.skeleton.static_value import PLAIN, runs_once


class Output:
    """The flattened result of a function, as one pytree node.

    Attributes:
        values: the arrays of the result, or another value for each array, such as its sharding.
        skeleton: the result without its arrays.
        which: for each array of the skeleton, the index of its value; None if values and arrays
            correspond one to one.
    """

    __slots__ = ("skeleton", "values", "which")
    values: Sequence[Tree]
    skeleton: Skeleton
    which: tuple[int, ...] | None

    def __init__(
        self, values: Sequence[Tree], skeleton: Skeleton, which: tuple[int, ...] | None = None
    ):
        self.values, self.skeleton, self.which = values, skeleton, which

    @classmethod
    def of(cls, tree: Tree, name: str) -> "Output":
        """Flatten a result.

        Args:
            tree: the result of a function that is being traced.
            name: the name of the function.

        Raises:
            FunctreeError: if JAX cannot flatten the result.
            FunctreeError: if an array is abstract.
            FunctreeError: if a static value must not be used after the trace. Examples are traced
                arrays, functions that close over traced arrays, and lazy values such as
                generators.
        """
        try:
            skeleton, values = Skeleton.apart(tree)
            # The skeleton learns from this tree, so that it need not build a sample.
            skeleton.learn(tree)
        except RecursionError:
            raise too_deep(tree) from None
        except SystemError:
            read(tree)  # raises an error for a tree that JAX cannot flatten
            raise
        problems: list[Problem] = []
        for path, value in skeleton.statics:
            texts = _outliving(value)
            if texts is not None:
                what, why, remedy = texts
                why += ", and would be used after its trace has ended"
                problems.append(Problem(Path((RESULT, *path)), None, what, why, remedy))
        for path, value in zip(skeleton.paths, values, strict=True):
            if isinstance(value, jax.ShapeDtypeStruct):
                why, remedy = "is abstract, but a program returns values", "return an array"
                problems.append(array_problem(Path((RESULT, *path)), value, why, remedy))
        if problems:
            number = count(len(problems), "value")
            raise FunctreeTypeError(
                f"{name}: the result has {number} that a compiled function cannot return", problems
            )
        return cls(values, skeleton)

    def distinct(self) -> "Output":
        """Return an equivalent output that holds an array with several paths only once."""
        # Compared by identity: in a trace, an array at two paths is one tracer.
        first: dict[int, int] = {}
        which = tuple(first.setdefault(id(value), len(first)) for value in self.values)
        different = {id(value): value for value in self.values}
        return Output(tuple(different.values()), self.skeleton, which)

    def built(self) -> Tree:
        """Build the result of a call. Results of different calls share no mutable objects."""
        return self.skeleton.build(self._spread(self.values))

    @property
    def tree(self) -> Tree:
        """A tree with the result's structure, filled with this output's values."""
        return self.like(self.values)

    def like(self, values: Sequence[Tree]) -> Tree:
        """Return a tree with the structure of the result and these values."""
        return self.skeleton.fill(self._spread(values))

    def paths(self) -> list[Path]:
        """Return the path of each value, or the first path of a value with several paths."""
        paths = [Path()] * len(self.values)
        which = self.which or range(len(self.values))
        # Assigned from last to first, so that the first path remains.
        for i, path in reversed(list(zip(which, self.skeleton.paths, strict=True))):
            paths[i] = path
        return paths

    def _spread(self, values: Sequence[Tree]) -> Sequence[Tree]:
        """Return one value for each array of the skeleton, in the skeleton's order."""
        if self.which is None:
            return values
        return [values[i] for i in self.which]


def _outliving(value: object) -> tuple[str, str, str] | None:
    """Describe a static value that must not be used after the trace, with the reason and a remedy.

    Return None for all other values.
    """
    if type(value) in PLAIN:
        return None
    if is_jax_value(value):
        return type(value).__name__, *JAX_VALUE
    if isinstance(value, Tracer):
        remedy = "declare the field without `static=True`"
        return "", "is a traced array in a static field", remedy
    if callable(value) and not isinstance(value, type):
        for path, variable in held(kept_by(value)):
            if isinstance(variable, Tracer):
                remedy = (
                    "return the array as a leaf of the result, or create the object outside the "
                    "trace and shard it with `ft.shard`"
                )
                return "", f"closes over a traced array, `{path}`", remedy
    # For example, the body of a generator would run with the traced arrays that it holds.
    if runs_once(value):
        return type(value).__name__, "computes its elements lazily", "return a list or an array"
    return None


register_pytree_with_keys(
    Output,
    lambda node: (
        tuple((GetAttrKey(str(i)), value) for i, value in enumerate(node.values)),
        (node.skeleton, node.which),
    ),
    lambda static, values: Output(tuple(values), *static),
    lambda node: (tuple(node.values), (node.skeleton, node.which)),
)
