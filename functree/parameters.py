"""What a user passes for a parameter ─► one error that names each wrong value, and what belongs in its place."""

import inspect
import math
import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import all_leaves

from functree.errors import FunctreeError, Problem, RuleError


class Takes(NamedTuple):
    """The values that a parameter takes.

    Attributes:
        text: what they are, for messages.
        fits: whether a value is one of them.
    """

    text: str
    fits: Callable[[Any], bool]

    def or_none(self) -> "Takes":
        """These values and None."""
        return Takes(f"{self.text}, or None", lambda value: value is None or self.fits(value))


def _is_integer(value: object) -> bool:
    # A flag is an `int` in Python, and in the place of a number it is a mistake.
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_size(value: Any) -> bool:
    """Whether a value is a positive integer."""
    return _is_integer(value) and bool(value > 0)


def _is_extent(value: Any) -> bool:
    return _is_integer(value) and bool(value >= 0)


def _are_positions(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, tuple | list) and all(map(_is_integer, value)))


def is_number(value: object) -> bool:
    """Whether a value is a finite real number."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_floating(value: Any) -> bool:
    """Whether a value is a dtype of floating-point numbers, in one of the forms that JAX takes."""
    # numpy takes None for float64, and everything that has a `dtype`, such as an array.
    if not isinstance(value, str | type | np.dtype | type(jnp.float32)):
        return False
    try:
        return bool(jnp.issubdtype(jnp.dtype(value), jnp.floating))
    except TypeError:
        return False


def is_integers(value: Any) -> bool:
    """Whether a value is an array of integers, which may be traced or abstract."""
    arrays = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    return isinstance(value, arrays) and bool(jnp.issubdtype(value.dtype, jnp.integer))


def is_key(value: object) -> bool:
    """Whether a value is one random key, typed or raw, concrete, traced or abstract."""
    if not isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return False
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value.shape == ()
    return value.dtype == np.uint32 and len(value.shape) == 1


FLAG = Takes("True or False", lambda value: isinstance(value, bool | np.bool_))
SIZE = Takes("a positive integer", is_size)
EXTENT = Takes("an integer, at least 0", _is_extent)
POSITIVE = Takes("a positive number", lambda value: is_number(value) and value > 0)
FRACTION = Takes("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
DECAY = Takes("at least 0 and less than 1", lambda value: is_number(value) and 0 <= value < 1)
# A `staticmethod` is callable, but a function that wraps one is bound to instances.
FUNCTION = Takes("a function", lambda value: callable(value) and not isinstance(value, staticmethod))
KEY = Takes("a random key, such as `jax.random.key(0)`", is_key)
FLOATING = Takes("a floating-point dtype, such as `jnp.float32`", is_floating)
ROOM = Takes("a number, at least 0", lambda value: is_number(value) and value >= 0)
TEXT = Takes("a text", lambda value: isinstance(value, str))
FILE = Takes("the path of a file", lambda value: isinstance(value, str | os.PathLike) and str(value) != "")
FOLDER = FILE._replace(text="the path of a folder")
POSITION = Takes("an integer", _is_integer)
POSITIONS = Takes("a position, or several in a tuple", _are_positions)
MAPPING = Takes("a mapping", lambda value: isinstance(value, Mapping))
ITERABLE = Takes("a list or a tuple", lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes))
# Not an iterator, which the check would use up.
_COLLECTION = Takes("a collection", lambda value: isinstance(value, Collection) and ITERABLE.fits(value))
SHAPE = Takes("a tuple of sizes", lambda value: _COLLECTION.fits(value) and all(map(_is_extent, value)))
DEVICES = Takes(
    "a tuple of devices", lambda value: isinstance(value, tuple) and all(isinstance(one, jax.Device) for one in value)
)
TEXTS = Takes("a collection of texts", lambda value: _COLLECTION.fits(value) and all(map(TEXT.fits, value)))


def shown(value: object) -> str:
    """A value in messages: shortened, and an array by its dtype and shape."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    return value.__name__ if isinstance(value, type) else reprlib.repr(value)


def problems(**given: tuple[object, Takes]) -> Iterator[Problem]:
    """A problem for each value that does not belong in its parameter.

    Examples:
        >>> from functree.parameters import SIZE, problems
        >>> [(problem.what, problem.why) for problem in problems(embed=(8, SIZE), heads=(0, SIZE))]
        [('heads=0', 'it must be a positive integer')]
    """
    for name, (value, takes) in given.items():
        if not takes.fits(value):
            remedy = ""
            if isinstance(value, staticmethod | classmethod | property):
                remedy = f"put `@{type(value).__name__}` above the decorators of functree"
            yield Problem(None, None, f"{name}={shown(value)}", f"it must be {takes.text}", remedy)


def check(headline: str, **given: tuple[object, Takes]) -> None:
    """Raise FunctreeError for values that do not belong in their parameters.

    Args:
        headline: what is not possible with such values.
        **given: for each parameter, its value and what it takes.
    """
    if found := list(problems(**given)):
        raise FunctreeError(headline, found)


def check_tree(function: str, tree: object) -> None:
    """Raise FunctreeError for a class, or for a function that was not called, in the place of a tree."""
    if not callable(tree) or not all_leaves([tree]):  # a callable module is a tree
        return
    what, remedy = "a function", "call it first"
    if isinstance(tree, type):
        what, remedy = "a class", "make an instance of it"
    name = getattr(tree, "__name__", None) or shown(tree)
    raise FunctreeError(
        f"{function} takes a tree of arrays, and {name} is {what}: {remedy}, or give `ft.abstract({name})(...)` for "
        "the shapes alone"
    )


def check_callback(function: Callable[..., Any], what: str) -> None:
    """Raise RuleError for a function that cannot be called with a path and a leaf, as filters and layouts are."""
    # A mesh is callable too, as a decorator.
    if not isinstance(function, jax.sharding.Mesh):
        try:
            inspect.signature(function).bind((), None)
        except ValueError:  # a function in C that says nothing about its parameters
            return
        except TypeError:
            pass
        else:
            return
    raise RuleError(f"{shown(function)} is not {what}: a function is one if it takes `(path, leaf)`")
