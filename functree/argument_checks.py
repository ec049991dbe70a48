"""All arguments of a call are checked together: arguments ─► one error for all wrong values."""

import functools
import inspect
import math
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import all_leaves
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from functree.errors import FunctreeArgumentError, FunctreeTypeError, Problem, RuleError

P = ParamSpec("P")
R = TypeVar("R")


class Takes(NamedTuple):
    """The values that a parameter accepts.

    Attributes:
        text: the description of these values in messages, after "it must be".
        fits: a function that returns whether a parameter accepts a value.
    """

    text: str
    fits: Callable[[Any], bool]

    def __repr__(self) -> str:
        return self.text  # `help` shows it in annotations

    def or_none(self) -> "Takes":
        """Return a copy that also accepts None."""
        return Takes(f"{self.text}, or None", lambda value: value is None or self.fits(value))


def _is_integer(value: object) -> bool:
    # In Python, a bool is an `int`, but a bool here is a mistake.
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_size(value: Any) -> bool:
    """Return whether a value is a positive integer."""
    return _is_integer(value) and bool(value > 0)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite real number within the range of a float."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def is_floating(value: Any) -> bool:
    """Return whether a value denotes a floating-point dtype in a form that JAX accepts."""
    # NumPy accepts None as float64, and any object with a `dtype`, such as an array.
    if not isinstance(value, str | type | np.dtype | type(jnp.float32)):
        return False
    try:
        dtype = jnp.dtype(value)
    # NumPy parses more than names, such as `(3,)f4`, and raises errors of several classes.
    except (TypeError, ValueError, SyntaxError):
        return False
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_name(value: object) -> TypeGuard[str]:
    """Return whether a value is a nonempty string."""
    return isinstance(value, str) and value != ""


_ARRAYS = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def is_integers(value: object) -> bool:
    """Return whether a value is an integer array, which may be traced or abstract."""
    return isinstance(value, _ARRAYS) and bool(jnp.issubdtype(value.dtype, jnp.integer))


def is_key(value: object) -> bool:
    """Return whether a value is a single random key: typed or raw, concrete, traced or abstract."""
    if not isinstance(value, _ARRAYS):
        return False
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value.shape == ()
    return value.dtype == np.uint32 and len(value.shape) == 1


FLAG = Takes("True or False", lambda value: isinstance(value, bool | np.bool_))
SIZE = Takes("a positive integer", is_size)
EXTENT = Takes("a non-negative integer", lambda value: _is_integer(value) and value >= 0)
POSITIVE = Takes("a positive number", lambda value: is_number(value) and value > 0)
FRACTION = Takes("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
DECAY = Takes("at least 0 and less than 1", lambda value: is_number(value) and 0 <= value < 1)
ROOM = Takes("a non-negative number", lambda value: is_number(value) and value >= 0)
# A `staticmethod` is callable, but a function that wraps one is bound to instances.
FUNCTION = Takes(
    "a function", lambda value: callable(value) and not isinstance(value, staticmethod)
)
KEY = Takes("a random key, such as `jax.random.key(0)`", is_key)
FLOATING = Takes("a floating-point dtype, such as `jnp.float32`", is_floating)
TEXT = Takes("a string", lambda value: isinstance(value, str))


def _is_path(value: Any) -> bool:
    """Return whether a value is a path that the system accepts.

    Such a path is not empty, and has no null character.
    """
    if not isinstance(value, str | os.PathLike):
        return False
    text = os.fspath(value)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False  # a lone surrogate
    return isinstance(text, str) and text != "" and "\0" not in text


FILE = Takes("the path of a file", _is_path)
FOLDER = FILE._replace(text="the path of a folder")

# `Path` turns `gs://` into `gs:/`, so the pattern matches both.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|(gs|gcs|s3|s3a|az|abfss?|hdfs|https?|file):/")


def _is_local(value: Any) -> bool:
    """Return whether a path is valid and not a URL.

    Writing to a URL would create a local folder.
    """
    return _is_path(value) and _ADDRESS.match(os.fspath(value)) is None


_NO_ADDRESS = "not a URL: to copy files to or from a bucket, use the bucket's own tools"
LOCAL_FILE = Takes(f"{FILE.text}, {_NO_ADDRESS}", _is_local)
LOCAL_FOLDER = Takes(f"{FOLDER.text}, {_NO_ADDRESS}", _is_local)
POSITION = Takes("an integer", _is_integer)
POSITIONS = Takes(
    "an integer, or a tuple of integers",
    lambda value: (
        _is_integer(value) or (isinstance(value, tuple | list) and all(map(_is_integer, value)))
    ),
)
MAPPING = Takes("a mapping", lambda value: isinstance(value, Mapping))
ITERABLE = Takes(
    "a list or a tuple",
    lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes),
)
# An iterator is not a collection: the check would exhaust it.
_COLLECTION = Takes(
    "a collection", lambda value: isinstance(value, Collection) and ITERABLE.fits(value)
)
SHAPE = Takes(
    "a tuple of sizes", lambda value: _COLLECTION.fits(value) and all(map(EXTENT.fits, value))
)
TEXTS = Takes(
    "a collection of strings", lambda value: _COLLECTION.fits(value) and all(map(TEXT.fits, value))
)


# Annotations for `checked`.
Flag = Annotated[bool, FLAG]
Size = Annotated[int, SIZE]
Positive = Annotated[float, POSITIVE]
Room = Annotated[float, ROOM]
Fraction = Annotated[float, FRACTION]
Decay = Annotated[float, DECAY]
Key = Annotated[PRNGKeyArray, KEY]
FloatingDtype = Annotated[DTypeLike, FLOATING]


def shown(value: object) -> str:
    """Format a value for a message: an array as its dtype and shape, other values shortened."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    return value.__name__ if isinstance(value, type) else reprlib.repr(value)


def check(headline: str, /, *others: Problem, **given: tuple[object, Takes]) -> None:
    """Raise an error that lists the arguments with invalid values.

    Args:
        headline: the first line of the error, with the function's name and what failed.
        *others: further problems.
        **given: for each parameter, its value and the values that it accepts.

    Raises:
        FunctreeArgumentError: if a parameter does not accept its value. The error lists all values.
    """
    found: list[Problem] = []
    for name, (value, takes) in given.items():
        if not takes.fits(value):
            remedy = ""
            if isinstance(value, staticmethod | classmethod | property):
                remedy = f"put `@{type(value).__name__}` above functree's decorators"
            why = f"it must be {takes.text}"
            found.append(Problem(None, None, f"{name}={shown(value)}", why, remedy))
    if found or others:
        raise FunctreeArgumentError(headline, [*found, *others])


def kinds_of(annotated: Callable[..., Any]) -> dict[str, Takes]:
    """Collect the `Takes` in the annotations of a function's parameters or a class's fields.

    An annotation may be a union with None. A `Literal` of strings accepts these strings.

    Examples:
        >>> from functree.argument_checks import Size, kinds_of
        >>> def make(size: Size, depth: Size | None, name: str): ...
        >>> kinds = kinds_of(make)
        >>> kinds["size"].text, kinds["depth"].text, len(kinds)
        ('a positive integer', 'a positive integer, or None', 2)
    """
    found: dict[str, Takes] = {}
    for name, hint in get_type_hints(annotated, include_extras=True).items():
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for option in options:
            extras = getattr(option, "__metadata__", ())
            if get_origin(option) is Literal:
                extras = (_one_of(get_args(option)),)
            for extra in extras:
                if isinstance(extra, Takes):
                    found[name] = extra.or_none() if type(None) in options else extra
    return found


def _one_of(names: tuple[str, ...]) -> Takes:
    text = f"one of {', '.join(map(repr, names))}"
    return Takes(text, lambda value: isinstance(value, str) and value in names)


def checked(headline: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Build a decorator that checks a function's arguments with the `Takes` in its annotations.

    The decorated function raises the errors of `check`, with this headline. Default values are not
    checked.

    Examples:
        >>> from functree.argument_checks import Size, checked
        >>> @checked("square: invalid arguments")
        ... def square(size: Size) -> int:
        ...     return size * size
        >>> square(0)
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeArgumentError: square: invalid arguments
        <BLANKLINE>
          size=0
              it must be a positive integer
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kinds, positional = kinds_of(function), inspect.getfullargspec(function).args

        @functools.wraps(function)
        def with_check(*args: P.args, **kwargs: P.kwargs) -> R:
            given = dict(zip(positional, args, strict=False)) | kwargs
            check(headline, **{name: (given[name], kinds[name]) for name in kinds if name in given})
            return function(*args, **kwargs)

        return with_check

    return decorate


def check_tree(function: str, tree: object) -> None:
    """Raise FunctreeTypeError if a user passed a class or a function instead of a tree."""
    if not callable(tree) or not all_leaves([tree]):  # a callable module is a tree
        return
    what, remedy = "a function", "call it first"
    if isinstance(tree, type):
        what, remedy = "a class", "make an instance of it"
    name = getattr(tree, "__name__", None) or shown(tree)
    raise FunctreeTypeError(
        f"{function} takes a tree of arrays, but {name} is {what}: {remedy}, "
        f"or pass `ft.abstract({name})(...)` if you only need shapes"
    )


def check_callback(function: Callable[..., Any], what: str) -> None:
    """Raise RuleError if a filter or layout cannot be called with a path and a leaf."""
    # A mesh is callable too, since it is a decorator.
    if not isinstance(function, jax.sharding.Mesh):
        try:
            inspect.signature(function).bind((), None)
        except ValueError:  # a C function without a signature
            return
        except TypeError:
            pass
        else:
            return
    raise RuleError(f"{shown(function)} is not {what}: a callable must take `(path, leaf)`")
