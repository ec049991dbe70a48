"""A function of modules ─► a `Body`: a function of arrays that JAX can trace."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from jax.tree_util import register_pytree_with_keys

from functree.calls.call_groups import Traces
from functree.calls.derivative_rules import MakeContext
from functree.calls.output import Output
from functree.calls.signature import AnyFunction
from functree.tree.arrays import AnyArray, Tree
from functree.tree.paths import Path


@dataclass(frozen=True, eq=False)
class Labels:
    """The keys of arrays in their parameter. Behind its name, the text of a key makes the path of
    the array.

    There is one object for equal keys, which JAX compares by identity: it compares a new function
    with those before whose arguments are as many.
    """

    keys: tuple[str, ...]


_labels = functools.lru_cache(maxsize=1024)(Labels)


class Arrays:
    """The arrays of a parameter, as a node that JAX flattens in one Python call, with a path for
    each array.

    In trees that JAX makes of such nodes, it has something else for each array, such as its
    sharding.
    """

    __slots__ = ("labels", "values")

    def __init__(self, values: Sequence[Tree], labels: Labels):
        self.values: Sequence[Tree] = values
        self.labels: Labels = labels


register_pytree_with_keys(
    Arrays,
    lambda node: (tuple(zip(node.labels.keys, node.values, strict=True)), node.labels),
    lambda labels, values: Arrays(tuple(values), labels),
    # JAX flattens by this one wherever it needs no paths, as in each call.
    lambda node: (tuple(node.values), node.labels),
)


def donated_indices(paths: Sequence[Path], donated: Collection[str]) -> tuple[int, ...]:
    """The indices of the arrays of donated parameters; `more.mode` is the name of the argument
    `mode` in `**more`."""
    indices: list[int] = []
    for i, path in enumerate(paths):
        if path[0] in donated or ".".join(map(str, path[:2])) in donated:
            indices.append(i)
    return tuple(indices)


class Arguments:
    """The arrays of a call as the arguments of a compiled function: one for each parameter of the
    user's function.

    If only some of the arrays of a parameter are donated, this parameter has several.

    Args:
        paths: the paths of the arrays, in JAX's order; so those of a parameter are next to each
            other.
        donated: the indices of the donated arrays.

    Attributes:
        names: of the arguments.
        donated_arguments: the indices of the donated arguments.
        donated: the indices of the donated arrays.
        kept: the indices of the others.
    """

    def __init__(self, paths: Sequence[Path], donated: tuple[int, ...]):
        indices = range(len(paths))
        given = set(donated)
        self.donated: tuple[int, ...] = donated
        self.kept: tuple[int, ...] = tuple(i for i in indices if i not in given)
        self.names: list[str] = []
        self.donated_arguments: list[int] = []
        self._parts: list[tuple[slice, Labels]] = []
        for (name, is_donated), run in groupby(indices, lambda i: (paths[i][0], i in given)):
            # JAX names the arguments by the parameters of the body, and these need different names.
            while name in self.names:
                name += "_"
            if is_donated:
                self.donated_arguments.append(len(self.names))
            self.names.append(name)
            own = list(run)
            labels = _labels(tuple(str(paths[i]).removeprefix(paths[i][0]) for i in own))
            self._parts.append((slice(own[0], own[-1] + 1), labels))

    def split(self, values: Sequence[Tree]) -> tuple[Arrays, ...]:
        """A value for each array ─► the arguments."""
        # By a list, since a generator takes longer, and this is a part of every call.
        return tuple([Arrays(values[part], labels) for part, labels in self._parts])

    def join(self, arguments: Iterable[Arrays]) -> list[Tree]:
        """The arguments ─► their values in the order of the call's arrays."""
        return [value for argument in arguments for value in argument.values]


class Body:
    """The function that JAX traces: from `Arrays` for each parameter to an `Output`.

    JAX caches traces by the identity of the function. One body is used for all programs that differ
    only in the shardings of arrays, so the user's function is traced once for all of them. A body
    holds no array, and only a weak reference to the user's function.

    Args:
        compute: a function from the arrays of a call to the output.
        arguments: how the arrays are passed.
        traces: the user's function, whose file and line JAX shows, and its name, for messages.
        context: the context in which the user's function runs; None if it needs none.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[AnyArray]], Output],
        arguments: Arguments,
        traces: Traces,
        context: MakeContext | None = None,
    ):
        self._compute, self._fun = compute, traces.fun
        self.name: str = traces.signature.name
        self.context: MakeContext | None = context
        self.arguments: Arguments = arguments
        self.__name__: str = self.name.rpartition(".")[2]
        self.__qualname__: str = self.__name__
        # By this JAX names the arguments, in errors and in the compiled text.
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in arguments.names
        ]
        self.__signature__: inspect.Signature = inspect.Signature(parameters)

    def __call__(self, *arguments: Arrays) -> Output:
        return self._compute(self.arguments.join(arguments))

    @property
    def __wrapped__(self) -> AnyFunction:
        """The user's function. JAX shows its file and line in errors."""
        return self._fun()
