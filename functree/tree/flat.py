"""`make(*args, **kwargs)` ─► a function from arrays to arrays that JAX can trace, whatever else goes in or out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten

from functree.tree.leaves import is_array


class Flat:
    """A function from a list of arrays to a list of different arrays; the rest of its result is kept when it is traced.

    One array that stands at two places of the result is one array of the list.

    Args:
        make: any function.
        args: its arguments; what is no array is static.
        kwargs: likewise.
        fresh: each place of the result has a copy of its own, and never an input itself.
    """

    def __init__(self, make: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], fresh: bool = False):
        self.make: Callable[..., Any] = make
        self.fresh: bool = fresh
        self.flat: list[Any]
        self.treedef: Any
        self.flat, self.treedef = tree_flatten((tuple(args), dict(kwargs)))
        self.positions: list[int] = [i for i, x in enumerate(self.flat) if is_array(x)]
        self.arrays: list[Any] = [self.flat[i] for i in self.positions]
        self.which: list[int] = []  # for each array of the result, its place in the list
        self.rest: list[Any] = []  # the result's leaves, arrays left out
        self.out_treedef: Any = None
        self.__name__: str = getattr(make, "__name__", type(make).__name__)
        self.__qualname__: str = self.__name__

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        flat = list(self.flat)
        for position, array in zip(self.positions, arrays, strict=True):
            flat[position] = array
        args, kwargs = self.treedef.unflatten(flat)
        leaves, self.out_treedef = tree_flatten(self.make(*args, **kwargs))
        self.rest = [None if is_array(x) else x for x in leaves]
        # Fresh ones are copies, so that the optimizers whose `init` gives one array twice do not either.
        results = [jnp.copy(x) if self.fresh else x for x in leaves if is_array(x)]
        first: dict[int, int] = {}
        self.which = [first.setdefault(id(x), len(first)) for x in results]
        return [jnp.asarray(x) for x in {id(x): x for x in results}.values()]

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the list; traces the function."""
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.arrays]
        return jax.eval_shape(self, shapes)

    def result(self, values: Sequence[Any]) -> Any:
        """The function's result, with these for the list's arrays."""
        arrays = iter([values[i] for i in self.which])
        flat = [next(arrays) if x is None else x for x in self.rest]
        return self.out_treedef.unflatten(flat)
