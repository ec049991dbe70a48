"""A `Body` turns a user's function of modules into a function of arrays that JAX can trace.

A function of modules ─► a `Body`.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

from jax.tree_util import register_pytree_with_keys

from functree.calls.call_groups import Traces
from functree.calls.output import Output
from functree.calls.signature import AnyFunction
from functree.tree.arrays import AnyArray, Tree
from functree.tree.paths import Path


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
            keys = tuple(str(paths[i]).removeprefix(paths[i][0]) for i in members)
            self._parts.append((slice(members[0], members[-1] + 1), keys))

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
