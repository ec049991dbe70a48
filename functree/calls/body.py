"""A function of calls ─► a function of arrays that JAX can trace, for one skeleton of its calls."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from jax.tree_util import GetAttrKey, register_pytree_with_keys

from functree.calls.output import Output
from functree.tree.paths import Path


class Labels:
    """The names of some arguments' arrays, as they stand in the compiled text. The same object for each call."""

    __slots__ = ("keys",)

    def __init__(self, paths: Iterable[Path]):
        self.keys: tuple[Any, ...] = tuple(GetAttrKey(str(path)) for path in paths)


class Arrays:
    """Arguments' arrays: a node that flattens in constant Python time, with a path for each array."""

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


class Arguments:
    """The arrays of a call as the two arguments of a compiled function: those that are kept, and those donated.

    Args:
        paths: of the arrays.
        donated: the names of the donated parameters; `more.mode` is one among any names.
    """

    def __init__(self, paths: Sequence[Path], donated: frozenset[str]):
        is_donated = [path[0] in donated or ".".join(map(str, path[:2])) in donated for path in paths]
        self.donated: tuple[int, ...] = tuple(i for i, given in enumerate(is_donated) if given)
        self.kept: tuple[int, ...] = tuple(i for i, given in enumerate(is_donated) if not given)
        self.take_donated: Callable[[Sequence[Any]], Sequence[Any]] = _taker(self.donated, len(paths))
        self.take_kept: Callable[[Sequence[Any]], Sequence[Any]] = _taker(self.kept, len(paths))
        self._kept_labels = Labels(paths[i] for i in self.kept)
        self._donated_labels = Labels(paths[i] for i in self.donated)

    def split(self, values: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """A value for each array ─► the two arguments."""
        kept, donated = self.take_kept(values), self.take_donated(values)
        return Arrays(kept, self._kept_labels), Arrays(donated, self._donated_labels)

    def join(self, kept: Arrays, donated: Arrays) -> list[Any]:
        """The two arguments ─► their values in the order of the call's arrays."""
        values: list[Any] = [None] * (len(self.kept) + len(self.donated))
        for places, arrays in ((self.kept, kept), (self.donated, donated)):
            for place, value in zip(places, arrays.values, strict=True):
                values[place] = value
        return values


def _taker(places: Sequence[int], size: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The values at some places, in C."""
    if len(places) == size:
        return lambda values: values
    if len(places) < 2:
        return lambda values: [values[i] for i in places]
    return itemgetter(*places)


class Body:
    """A function from the two arguments to an `Output`: what JAX traces.

    JAX finds a trace by the identity of its function. So one of these serves every program that differs only in how
    the arrays are sharded, and the user's function is traced once for all of them. It holds neither an array nor, but
    weakly, the user's function.

    Args:
        compute: from a call's arrays to the output.
        arguments: how the arrays are handed over.
        fun: gives the user's function, whose name, file and line JAX shows.
        name: of that function.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Any]], Output],
        arguments: Arguments,
        fun: Callable[[], Callable[..., Any]],
        name: str,
    ):
        self._compute, self._fun = compute, fun
        self.arguments: Arguments = arguments
        self.__name__: str = name.rpartition(".")[2]
        self.__qualname__: str = self.__name__
        self.__signature__: inspect.Signature = inspect.signature(self.__call__)

    def __call__(self, kept: Arrays, donated: Arrays) -> Output:
        return self._compute(self.arguments.join(kept, donated))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The user's function, of which JAX names the file and the line in its errors."""
        return self._fun()
