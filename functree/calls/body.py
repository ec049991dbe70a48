"""A function of modules ─► a `Body`: a function of arrays that JAX can trace, for calls with one skeleton."""

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import Any

from jax.tree_util import register_pytree_with_keys

from functree.calls.derivatives import Context
from functree.calls.output import Output
from functree.tree.paths import Path


class Labels:
    """The keys of arrays in their parameter. Behind its name, the text of a key makes the path of the array.

    It is one object for all calls, so JAX compares it by identity.
    """

    __slots__ = ("keys",)

    def __init__(self, keys: Iterable[str]):
        self.keys: tuple[str, ...] = tuple(keys)


class Arrays:
    """The arrays of a parameter, as a node that JAX flattens in one Python call, with a path for each array."""

    __slots__ = ("labels", "values")

    def __init__(self, values: Sequence[Any], labels: Labels):
        self.values: Sequence[Any] = values
        self.labels: Labels = labels


register_pytree_with_keys(
    Arrays,
    lambda node: (tuple(zip(node.labels.keys, node.values, strict=True)), node.labels),
    lambda labels, values: Arrays(tuple(values), labels),
    lambda node: (tuple(node.values), node.labels),
)


def donated_places(paths: Sequence[Path], donated: Collection[str]) -> tuple[int, ...]:
    """The indices of the arrays of donated parameters; `more.mode` is the name of the argument `mode` in `**more`."""
    return tuple(i for i, path in enumerate(paths) if path[0] in donated or ".".join(map(str, path[:2])) in donated)


class Arguments:
    """The arrays of a call as the arguments of a compiled function: one for each parameter of the user's function.

    If only some of the arrays of a parameter are donated, this parameter has several.

    Args:
        paths: the paths of the arrays, in JAX's order; so those of a parameter are next to each other.
        donated: the indices of the donated arrays.

    Attributes:
        names: of the arguments.
        donated_arguments: the indices of the donated arguments.
        donated: the indices of the donated arrays.
        kept: the indices of the others.
    """

    def __init__(self, paths: Sequence[Path], donated: tuple[int, ...]):
        self.donated: tuple[int, ...] = donated
        given = set(donated)
        self.kept: tuple[int, ...] = tuple(i for i in range(len(paths)) if i not in given)
        self.names: list[str] = []
        self.donated_arguments: list[int] = []
        self._parts: list[tuple[slice, Labels]] = []
        for (name, is_donated), run in groupby(range(len(paths)), lambda i: (paths[i][0], i in given)):
            self._add(name, is_donated, list(run), paths)

    def _add(self, name: str, donated: bool, places: Sequence[int], paths: Sequence[Path]) -> None:
        while name in self.names:
            name += "_"
        if donated:
            self.donated_arguments.append(len(self.names))
        labels = Labels(str(paths[i]).removeprefix(paths[i][0]) for i in places)
        self.names.append(name)
        self._parts.append((slice(places[0], places[-1] + 1), labels))

    def split(self, values: Sequence[Any]) -> tuple[Arrays, ...]:
        """A value for each array ─► the arguments."""
        return tuple([Arrays(values[part], labels) for part, labels in self._parts])

    def join(self, arguments: Iterable[Arrays]) -> list[Any]:
        """The arguments ─► their values in the order of the call's arrays."""
        return [value for argument in arguments for value in argument.values]


class Body:
    """The function that JAX traces: from `Arrays` for each parameter to an `Output`.

    JAX caches traces by the identity of the function. One body is used for all programs that differ only in the
    shardings of arrays, so the user's function is traced once for all of them. A body holds no array, and only a weak
    reference to the user's function.

    Args:
        compute: a function from the arrays of a call to the output.
        arguments: how the arrays are passed.
        fun: returns the user's function. JAX shows its file and line.
        name: the name of that function.
        context: the context in which the user's function runs; None if it needs none.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Any]], Output],
        arguments: Arguments,
        fun: Callable[[], Callable[..., Any]],
        name: str,
        context: Context | None = None,
    ):
        self._compute, self._fun = compute, fun
        self.context: Context | None = context
        self.arguments: Arguments = arguments
        self.__name__: str = name.rpartition(".")[2]
        self.__qualname__: str = self.__name__
        # By this JAX names the arguments, in errors and in the compiled text.
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in arguments.names]
        self.__signature__: inspect.Signature = inspect.Signature(parameters)

    def __call__(self, *arguments: Arrays) -> Output:
        return self._compute(self.arguments.join(arguments))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The user's function. JAX shows its file and line in errors."""
        return self._fun()
