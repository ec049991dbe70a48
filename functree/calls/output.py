"""The result of a compiled function ─► an `Output`: its arrays, and the rest as static data."""

from collections.abc import Sequence

import jax
from jax.core import Tracer
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from functree.calls.closures import held, kept_by
from functree.calls.signature import RESULT
from functree.calls.static_arguments import HIJAX_REMEDY, is_hijax
from functree.errors import FunctreeError, FunctreeTypeError, Problem, count
from functree.labels.leaf import array_problem, unheld_problem
from functree.labels.leaves import read, too_deep
from functree.tree.arrays import Tree, is_unheld_number
from functree.tree.paths import Path
from functree.tree.skeleton.skeleton import Skeleton
from functree.tree.skeleton.static_value import PLAIN, runs_once


class Output:
    """A flattened result of a function, as one node for JAX.

    Attributes:
        values: the arrays of the result, or what there is for each of them, such as its sharding.
        skeleton: the result without its arrays.
        which: for each array of the skeleton, its index among the values; None if these are one to
            one.
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
            FunctreeError: a static value of the result is a traced array, a function that closes
                over one, or what computes only when it is used, such as a generator. It must not be
                used after the trace. Or an array of the result is abstract.
        """
        try:
            skeleton, values = Skeleton.apart(tree)
            # From the tree, since a skeleton that has not seen one would have to build a sample.
            skeleton.learn(tree)
        except RecursionError:
            raise too_deep(tree) from None
        except SystemError:
            read(tree)  # raises an error for a tree that JAX cannot flatten
            raise
        problems: list[Problem] = []
        for path, value in skeleton.statics:
            if is_unheld_number(value):
                problems.append(unheld_problem(Path((RESULT, *path)), value))
        if problems:
            number = count(len(problems), "array")
            raise FunctreeTypeError(f"{name}: JAX cannot hold {number} of the result", problems)
        for path, value in skeleton.statics:
            found = _outliving(value)
            if found is not None:
                what, why, remedy = found
                why += ", which would be after its trace has ended"
                problems.append(Problem(Path((RESULT, *path)), None, what, why, remedy))
        if problems:
            number = count(len(problems), "static value")
            raise FunctreeError(
                f"{name}: the result has {number} that would outlive the trace", problems
            )
        _check_values(values, skeleton, name)
        return cls(values, skeleton)

    def distinct(self) -> "Output":
        """The same output, in which an array that is at two paths of the result is only one
        value."""
        # While a function is traced, an array at two paths is one tracer, hence by identity.
        first: dict[int, int] = {}
        which = tuple(first.setdefault(id(value), len(first)) for value in self.values)
        different = {id(value): value for value in self.values}
        return Output(tuple(different.values()), self.skeleton, which)

    def built(self) -> Tree:
        """The result of a call. It shares nothing that can be changed with the results of other
        calls."""
        return self.skeleton.build(self._spread(self.values))

    @property
    def tree(self) -> Tree:
        """A tree with the structure of the result, whose values may be anything."""
        return self.like(self.values)

    def like(self, values: Sequence[Tree]) -> Tree:
        """A tree with the structure of the result and with other values."""
        return self.skeleton.fill(self._spread(values))

    def paths(self) -> list[Path]:
        """The path of each value; of one that is at several paths of the result, the first."""
        found = [Path()] * len(self.values)
        which = self.which or range(len(self.values))
        # From the last to the first, so that the first path is what stays.
        for i, path in reversed(list(zip(which, self.skeleton.paths, strict=True))):
            found[i] = path
        return found

    def _spread(self, values: Sequence[Tree]) -> Sequence[Tree]:
        """Values of the output ─► one for each array of the skeleton."""
        if self.which is None:
            return values
        return [values[i] for i in self.which]


def _check_values(values: Sequence[Tree], skeleton: Skeleton, name: str) -> None:
    """Raise FunctreeError for arrays of a result that are abstract."""
    if not any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
        return
    problems: list[Problem] = []
    why, remedy = "is abstract, but a program returns values", "return it from outside of the trace"
    for path, value in zip(skeleton.paths, values, strict=True):
        if isinstance(value, jax.ShapeDtypeStruct):
            problems.append(array_problem(Path((RESULT, *path)), value, why, remedy))
    number = count(len(problems), "abstract array")
    raise FunctreeTypeError(f"{name}: the result has {number}", problems)


def _outliving(value: object) -> tuple[str, str, str] | None:
    """What a static value is that must not be used after the trace, why, and the remedy; None for
    other values."""
    if type(value) in PLAIN:
        return None
    if isinstance(value, jax.Ref):
        return "Ref", "has its value when it is used", "return its value, `ref[...]`"
    if is_hijax(value):
        why = "is a value of `jax.experimental.hijax`, whose arrays would be traced when it is used"
        return type(value).__name__, why, HIJAX_REMEDY
    if isinstance(value, Tracer):
        remedy = "declare the field without `static=True`"
        return "", "is a traced array in a static field", remedy
    if callable(value) and not isinstance(value, type):
        for path, variable in held(kept_by(value)):
            if isinstance(variable, Tracer):
                remedy = (
                    "make it an array of the result; or make the object outside of the trace, and "
                    "then `ft.shard` it"
                )
                return "", f"closes over a traced array, `{path}`", remedy
    # Such as a generator, whose body would run with the traced arrays that it has.
    if runs_once(value):
        return type(value).__name__, "computes when it is used", "return a list or an array"
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
