"""A `Body` turns a user's function of modules into a function of arrays that JAX can trace.

A function of modules ─► a `Body`, from `Arrays` to an `Output`. The output holds the arrays of the
result, and the rest as static data.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

import jax
from jax.core import Tracer
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from functree.calls.call_groups import Traces
from functree.calls.closures import held, kept_by
from functree.calls.signature import JAX_VALUE, RESULT, AnyFunction, is_jax_value
from functree.errors import FunctreeTypeError, Problem, count
from functree.labels.leaves import array_problem, read, too_deep
from functree.tree.arrays import AnyArray, Tree
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


# Arguments


class Arrays:
    """The arrays of an argument and their keys, as a node that JAX flattens in one Python call.

    A parameter's name and a key together form an array's path. In trees that JAX builds from these
    nodes, other values, such as shardings, may replace the arrays.
    """

    __slots__ = ("keys", "values")

    def __init__(self, values: Sequence[Tree], keys: tuple[str, ...]):
        self.values: Sequence[Tree] = values
        self.keys: tuple[str, ...] = keys


register_pytree_with_keys(
    Arrays,
    lambda node: (tuple(zip(node.keys, node.values, strict=True)), node.keys),
    lambda keys, values: Arrays(tuple(values), keys),
    # JAX flattens with this function when it needs no paths, as in each call.
    lambda node: (tuple(node.values), node.keys),
)


def donated_indices(paths: Sequence[Path], donated: Collection[str]) -> tuple[int, ...]:
    """Return the indices of the arrays of donated parameters.

    The name `more.mode` stands for the argument `mode` in `**more`.
    """
    indices: list[int] = []
    for i, path in enumerate(paths):
        if path[0] in donated or ".".join(map(str, path[:2])) in donated:
            indices.append(i)
    return tuple(indices)


class Arguments:
    """The arrays of a call, grouped into the arguments of a compiled function.

    Each parameter of the user's function becomes one argument, or several if only some of its
    arrays are donated.

    Args:
        paths: the paths of the arrays in JAX's order, so a parameter's arrays are adjacent.
        donated: the indices of the donated arrays.

    Attributes:
        names: the names of the arguments.
        donated_arguments: the indices of the donated arguments.
        donated: the indices of the donated arrays.
        kept: the indices of the arrays that are not donated.
    """

    def __init__(self, paths: Sequence[Path], donated: tuple[int, ...]):
        indices = range(len(paths))
        given = set(donated)
        self.donated: tuple[int, ...] = donated
        self.kept: tuple[int, ...] = tuple(i for i in indices if i not in given)
        self.names: list[str] = []
        self.donated_arguments: list[int] = []
        self._parts: list[tuple[slice, tuple[str, ...]]] = []
        for (name, is_donated), run in groupby(indices, lambda i: (paths[i][0], i in given)):
            # JAX names arguments after the body's parameters, whose names must be distinct.
            while name in self.names:
                name += "_"
            if is_donated:
                self.donated_arguments.append(len(self.names))
            self.names.append(name)
            members = list(run)
            keys = [str(paths[i]).removeprefix(paths[i][0]) for i in members]
            self._parts.append((slice(members[0], members[-1] + 1), tuple(keys)))

    def split(self, values: Sequence[Tree]) -> tuple[Arrays, ...]:
        """Group values, one for each array, into the arguments."""
        # This runs in every call, and a list is faster than a generator.
        return tuple([Arrays(values[part], keys) for part, keys in self._parts])

    def join(self, arguments: Iterable[Arrays]) -> list[Tree]:
        """Return the values of the arguments in the order of the call's arrays."""
        return [value for argument in arguments for value in argument.values]


class Body:
    """The function that JAX traces. It takes one `Arrays` per argument and returns an `Output`.

    JAX caches traces by the identity of the function. Programs that differ only in the shardings of
    arrays share one body, so the user's function is traced once for all of them. A body holds no
    arrays, and only a weak reference to the user's function.

    Args:
        compute: a function from the arrays of a call to the output.
        arguments: the grouping of the arrays into arguments.
        traces: the traces of the user's function, which refer to the function and hold its name.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[AnyArray]], Output],
        arguments: Arguments,
        traces: Traces,
    ):
        self._compute, self._fun = compute, traces.fun
        self.name: str = traces.signature.name
        self.arguments: Arguments = arguments
        self.__name__: str = self.name.rpartition(".")[2]
        self.__qualname__: str = self.__name__
        # JAX reads argument names from this signature, for errors and for the compiled text.
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in arguments.names
        ]
        self.__signature__: inspect.Signature = inspect.Signature(parameters)

    def __call__(self, *arguments: Arrays) -> Output:
        return self._compute(self.arguments.join(arguments))

    @property
    def __wrapped__(self) -> AnyFunction:
        """The user's function, whose file and line JAX shows in errors."""
        return self._fun()
