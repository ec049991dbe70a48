"""A function of modules ─► a `Body`: a function of arrays that JAX can trace, for calls with one skeleton."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

from jax.tree_util import GetAttrKey, register_pytree_with_keys

from functree.calls.derivatives import Context
from functree.calls.output import Output
from functree.tree.paths import Path


class Labels:
    """The names of arrays in the compiled text. It is one object for all calls, so JAX compares it by identity."""

    __slots__ = ("keys",)

    def __init__(self, paths: Iterable[Path]):
        self.keys: tuple[Any, ...] = tuple(GetAttrKey(str(path)) for path in paths)


class Arrays:
    """The arrays of arguments, as a node that JAX flattens in one Python call, with a path for each array."""

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
    """The arrays of a call as the two arguments of a compiled function: arrays that are kept, and donated arrays.

    Args:
        paths: the paths of the arrays.
        donated: the names of the donated parameters; `more.mode` is the argument `mode` in `**more`.
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
    """A function from values to those at some indices. Most values are selected in C, by `itemgetter`."""
    if len(places) == size:
        return lambda values: values
    # `itemgetter` returns a tuple only for two or more indices.
    if len(places) < 2:
        return lambda values: [values[i] for i in places]
    return itemgetter(*places)


class Body:
    """The function that JAX traces: from the two arguments to an `Output`.

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
        self.__signature__: inspect.Signature = inspect.signature(self.__call__)

    def __call__(self, kept: Arrays, donated: Arrays) -> Output:
        return self._compute(self.arguments.join(kept, donated))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The user's function. JAX shows its file and line in errors."""
        return self._fun()
