"""A call of a function that another library has jitted ─► the paths of its arrays in the call.

Such a library hands JAX other trees than those of the call: `eqx.filter_jit` a tuple of leaves,
`nnx.jit` the variables of each module.
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from numbers import Number
from typing import NamedTuple

import jax
import numpy as np
from jax.stages import Compiled
from jax.tree_util import tree_flatten_with_path

from functree.calls.signature import AnyFunction
from functree.tree.arrays import Tree, is_array
from functree.tree.paths import Path

Beginning = tuple[Hashable, ...]
"""The beginning of the paths of an argument's arrays: `("x",)`, or `("rest", 1)` for the second of
`*rest`."""


class Given(NamedTuple):
    """A leaf of a call.

    Attributes:
        argument: the position or the name of its argument.
        path: its path in the call.
        leaf: the leaf.
    """

    argument: int | str
    path: Path
    leaf: object


def paths_in_call(
    fn: AnyFunction,
    wrapped: object,
    compiled: Compiled,
    args: Sequence[Tree],
    kwargs: Mapping[str, Tree],
) -> dict[Path, Path]:
    """The path of each array in the call, by its path in the trees that JAX has; empty if these are
    the call, or if the paths are not known.

    Args:
        fn: the jitted function.
        wrapped: what the library has made of JAX's compiled function.
        compiled: JAX's compiled function.
        args: the positional arguments of the call.
        kwargs: the others.
    """
    if wrapped is compiled:
        return {}
    call: list[Given] = []
    beginnings = positional(fn, len(args)) or [("args", i) for i in range(len(args))]
    for i, value in enumerate(args):
        call.extend(_leaves(i, beginnings[i], value))
    for key in sorted(kwargs):
        call.extend(_leaves(key, (key,), kwargs[key]))
    # Equinox hands JAX the leaves themselves, in an order of its own, by this function.
    preprocess = getattr(wrapped, "preprocess", None)
    if preprocess is None:
        return _by_order(compiled, call)
    info = getattr(wrapped, "info", None)
    return _by_identity(fn, call, args, kwargs, lambda *args: preprocess(info, *args))


def positional(fn: AnyFunction, number: int) -> list[Beginning] | None:
    """The beginnings of the paths of that many positional arguments; None if the function has no
    signature that Python can read."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    kinds, found = inspect.Parameter, list[Beginning]()
    for parameter in signature.parameters.values():
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
            found.append((parameter.name,))
        elif parameter.kind is kinds.VAR_POSITIONAL:
            found.extend((parameter.name, i) for i in range(number - len(found)))
    return found


def _leaves(argument: int | str, beginning: Beginning, value: Tree) -> Iterator[Given]:
    for path, leaf in tree_flatten_with_path(value)[0]:
        yield Given(argument, Path((*beginning, *Path.of(path))), leaf)


def _by_identity(
    fn: AnyFunction,
    call: Sequence[Given],
    args: Sequence[Tree],
    kwargs: Mapping[str, Tree],
    handed: Callable[[Sequence[Tree], Mapping[str, Tree]], Tree],
) -> dict[Path, Path]:
    """The paths, from a function that returns what JAX gets for a call."""
    paths: dict[int, Path] = {}
    fun = getattr(fn, "__wrapped__", None)
    # A module that is called has arrays of its own, below the first parameter of its method.
    own, *_ = inspect.signature(type(fun).__call__).parameters
    for one in _leaves(own, (own,), fun):
        paths.setdefault(id(one.leaf), one.path)
    # A new array for each one, since an array may be at several paths. And in the place of each
    # argument a list of its leaves, so that no node of the user's is built with them.
    new: dict[int | str, list[object]] = {i: [] for i in (*range(len(args)), *kwargs)}
    for one in call:
        mark = np.empty(0) if isinstance(one.leaf, jax.Array | np.ndarray) else one.leaf
        new[one.argument].append(mark)
        if mark is not one.leaf:
            paths[id(mark)] = one.path
    tree = handed([new[i] for i in range(len(args))], {key: new[key] for key in kwargs})
    found: dict[Path, Path] = {}
    for path, leaf in tree_flatten_with_path((tree, {}))[0]:
        if id(leaf) in paths:
            found[Path.of(path)] = paths[id(leaf)]
    return found


def _by_order(compiled: Compiled, call: Sequence[Given]) -> dict[Path, Path]:
    """The paths, if JAX has the leaves in the order of the call, as those of Flax' modules are; an
    array that is at several of their paths, once."""
    entries, _ = tree_flatten_with_path(compiled.in_avals)
    found = [Path.of(path) for path, _ in entries]
    wanted = _form([path[:2] for path in found], [aval for _, aval in entries])
    # JAX traces numbers too, but not those of static arguments.
    arrays = [one for one in call if is_array(one.leaf)]
    traced = [one for one in call if is_array(one.leaf) or isinstance(one.leaf, Number)]
    for given in (traced, arrays, _once(traced), _once(arrays)):
        # Otherwise JAX has something else, and no name is guessed.
        if _form([one.argument for one in given], [one.leaf for one in given]) == wanted:
            return dict(zip(found, [one.path for one in given], strict=True))
    return {}


def _once(given: Sequence[Given]) -> list[Given]:
    """The leaves, each array only at the first of its paths."""
    first = {id(one.leaf): one for one in reversed(given) if is_array(one.leaf)}
    return [one for one in given if first.get(id(one.leaf), one) is one]


def _form(arguments: Sequence[Hashable], leaves: Sequence[object]) -> tuple[object, ...]:
    """What is the same for leaves in the same order: the number of each argument's leaves, and
    their shapes."""
    sizes = [len(list(run)) for _, run in groupby(arguments)]
    return sizes, [getattr(leaf, "shape", ()) for leaf in leaves]
