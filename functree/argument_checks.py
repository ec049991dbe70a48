"""What a user passes for a parameter ─► one error that names each wrong value, and what belongs in
its place."""

import functools
import inspect
import math
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from numbers import Real
from types import UnionType
from typing import (
    Annotated,
    Any,
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

from functree.errors import FunctreeError, FunctreeTypeError, FunctreeValueError, Problem, RuleError

P = ParamSpec("P")
R = TypeVar("R")


class Takes(NamedTuple):
    """The values that a parameter takes.

    Attributes:
        text: what they are, for messages.
        is_type: whether a value is of their type; if it is not, the error is a `TypeError`.
        is_value: whether a value of their type is one of them; if not, it is a `ValueError`.
    """

    text: str
    is_type: Callable[[Any], bool]
    is_value: Callable[[Any], bool] = lambda value: True

    def fits(self, value: object) -> bool:
        """Whether a value is one of them."""
        return self.is_type(value) and self.is_value(value)

    def or_none(self) -> "Takes":
        """These values and None."""
        return Takes(
            f"{self.text}, or None",
            lambda value: value is None or self.is_type(value),
            lambda value: value is None or self.is_value(value),
        )


def _is_integer(value: object) -> bool:
    # A flag is an `int` in Python, and in the place of a number it is a mistake.
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_size(value: Any) -> bool:
    """Whether a value is a positive integer."""
    return _is_integer(value) and bool(value > 0)


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number that a float can be."""
    try:
        return _is_real(value) and math.isfinite(value)
    except OverflowError:
        return False


def _is_dtype(value: Any) -> bool:
    """Whether a value stands for a dtype in one of the forms that JAX takes."""
    # numpy takes None for float64, and everything that has a `dtype`, such as an array.
    if not isinstance(value, str | type | np.dtype | type(jnp.float32)):
        return False
    try:
        jnp.dtype(value)
    # numpy reads more than names, such as `(3,)f4`, and raises errors of several classes.
    except (TypeError, ValueError, SyntaxError):
        return False
    return True


def is_floating(value: Any) -> bool:
    """Whether a value is a dtype of floating-point numbers, in one of the forms that JAX takes."""
    return _is_dtype(value) and bool(jnp.issubdtype(jnp.dtype(value), jnp.floating))


def is_name(value: object) -> TypeGuard[str]:
    """Whether a value is a text that is not empty."""
    return isinstance(value, str) and value != ""


_ARRAYS = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def is_integers(value: object) -> bool:
    """Whether a value is an array of integers, which may be traced or abstract."""
    return isinstance(value, _ARRAYS) and bool(jnp.issubdtype(value.dtype, jnp.integer))


def is_key(value: object) -> bool:
    """Whether a value is one random key, typed or raw, concrete, traced or abstract."""
    if not isinstance(value, _ARRAYS):
        return False
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value.shape == ()
    return value.dtype == np.uint32 and len(value.shape) == 1


FLAG = Takes("True or False", lambda value: isinstance(value, bool | np.bool_))
SIZE = Takes("a positive integer", _is_integer, lambda value: value > 0)
EXTENT = Takes("an integer, at least 0", _is_integer, lambda value: value >= 0)
POSITIVE = Takes("a positive number", _is_real, lambda value: is_number(value) and value > 0)
FRACTION = Takes("a number from 0 to 1", _is_real, lambda value: 0 <= value <= 1)
DECAY = Takes("at least 0 and less than 1", _is_real, lambda value: 0 <= value < 1)
ROOM = Takes("a number, at least 0", _is_real, lambda value: is_number(value) and value >= 0)
# A `staticmethod` is callable, but a function that wraps one is bound to instances.
FUNCTION = Takes(
    "a function", lambda value: callable(value) and not isinstance(value, staticmethod)
)
KEY = Takes(
    "a random key, such as `jax.random.key(0)`",
    lambda value: isinstance(value, _ARRAYS),
    is_key,
)
FLOATING = Takes("a floating-point dtype, such as `jnp.float32`", _is_dtype, is_floating)
TEXT = Takes("a text", lambda value: isinstance(value, str))


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)


def _is_possible_path(value: Any) -> bool:
    """Whether the system can be asked about a path: it is not empty, and has no null character."""
    text = os.fspath(value)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False  # half of a character
    return text != "" and "\0" not in text


FILE = Takes("the path of a file", _is_path, _is_possible_path)
FOLDER = FILE._replace(text="the path of a folder")

# Also what `Path` has made of an address.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|(gs|gcs|s3|s3a|az|abfss?|hdfs|https?|file):/")


def _is_local(value: Any) -> bool:
    """Whether a path is no address: by such a name a folder would be made here."""
    return _is_possible_path(value) and _ADDRESS.match(os.fspath(value)) is None


_NO_ADDRESS = "of a file system: copy to or from a bucket by its own tools"
LOCAL_FILE = FILE._replace(text=f"{FILE.text} {_NO_ADDRESS}", is_value=_is_local)
LOCAL_FOLDER = FOLDER._replace(text=f"{FOLDER.text} {_NO_ADDRESS}", is_value=_is_local)
POSITION = Takes("an integer", _is_integer)
POSITIONS = Takes(
    "a position, or several in a tuple",
    lambda value: (
        _is_integer(value) or (isinstance(value, tuple | list) and all(map(_is_integer, value)))
    ),
)
MAPPING = Takes("a mapping", lambda value: isinstance(value, Mapping))
ITERABLE = Takes(
    "a list or a tuple",
    lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes),
)
# Not an iterator, which the check would use up.
_COLLECTION = Takes(
    "a collection", lambda value: isinstance(value, Collection) and ITERABLE.fits(value)
)
SHAPE = Takes(
    "a tuple of sizes",
    lambda value: _COLLECTION.fits(value) and all(map(_is_integer, value)),
    lambda value: all(map(EXTENT.fits, value)),
)
DEVICES = Takes(
    "a tuple of devices",
    lambda value: isinstance(value, tuple) and all(isinstance(one, jax.Device) for one in value),
)
TEXTS = Takes(
    "a collection of texts", lambda value: _COLLECTION.fits(value) and all(map(TEXT.fits, value))
)


# In annotations, for `checked`.
Flag = Annotated[bool, FLAG]
Size = Annotated[int, SIZE]
Positive = Annotated[float, POSITIVE]
Fraction = Annotated[float, FRACTION]
Decay = Annotated[float, DECAY]
Room = Annotated[float, ROOM]
Key = Annotated[PRNGKeyArray, KEY]
FloatingDtype = Annotated[DTypeLike, FLOATING]


def shown(value: object) -> str:
    """A value in messages: shortened, and an array by its dtype and shape."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    return value.__name__ if isinstance(value, type) else reprlib.repr(value)


def problems(**given: tuple[object, Takes]) -> Iterator[Problem]:
    """A problem for each value that does not belong in its parameter.

    Examples:
        >>> from functree.argument_checks import SIZE, problems
        >>> [
        ...     (problem.what, problem.why)
        ...     for problem in problems(embed=(8, SIZE), heads=(0, SIZE))
        ... ]
        [('heads=0', 'it must be a positive integer')]
    """
    for name, (value, takes) in given.items():
        if not takes.fits(value):
            remedy = ""
            if isinstance(value, staticmethod | classmethod | property):
                remedy = f"put `@{type(value).__name__}` above the decorators of functree"
            yield Problem(None, None, f"{name}={shown(value)}", f"it must be {takes.text}", remedy)


def check(headline: str, /, *others: Problem, **given: tuple[object, Takes]) -> None:
    """Raise an error that lists the values that do not belong in their parameters.

    Args:
        headline: what is not possible with such values.
        *others: what else is wrong with values of the right types.
        **given: for each parameter, its value and what it takes.

    Raises:
        FunctreeTypeError: a value is of a wrong type. If others are only wrong, it lists them too.
        FunctreeValueError: all values are of the right types, and some are wrong.
    """
    if found := [*problems(**given), *others]:
        right_type = all(takes.is_type(value) for value, takes in given.values())
        raise parameter_error(headline, found, right_type=right_type)


def kinds_of(annotated: Callable[..., Any]) -> dict[str, Takes]:
    """What the parameters of a function, or the fields of a class, take: the `Takes` in their
    annotations, which may be in a union with None.

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
            for extra in getattr(option, "__metadata__", ()):
                if isinstance(extra, Takes):
                    found[name] = extra.or_none() if type(None) in options else extra
    return found


def checked(headline: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that checks the arguments of a function by the `Takes` in its annotations.

    The function raises the errors of `check`, with this headline. What is not given is not checked.

    Examples:
        >>> from functree.argument_checks import Size, checked
        >>> @checked("no square has this size")
        ... def square(size: Size) -> int:
        ...     return size * size
        >>> square(0)
        Traceback (most recent call last):
            ...
        functree.errors.FunctreeValueError: no square has this size
        <BLANKLINE>
          size=0
              it must be a positive integer
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kinds, names = kinds_of(function), list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def with_check(*args: P.args, **kwargs: P.kwargs) -> R:
            given = dict(zip(names, args, strict=False)) | kwargs
            check(headline, **{name: (given[name], kinds[name]) for name in kinds if name in given})
            return function(*args, **kwargs)

        return with_check

    return decorate


def parameter_error(
    headline: str, found: Iterable[Problem] = (), *, right_type: bool
) -> FunctreeError:
    """The error for values that are not of the right type, or that only are not the right ones."""
    kind = FunctreeValueError if right_type else FunctreeTypeError
    return kind(headline, found)


def check_tree(function: str, tree: object) -> None:
    """Raise FunctreeTypeError for a class or an uncalled function in the place of a tree."""
    if not callable(tree) or not all_leaves([tree]):  # a callable module is a tree
        return
    what, remedy = "a function", "call it first"
    if isinstance(tree, type):
        what, remedy = "a class", "make an instance of it"
    name = getattr(tree, "__name__", None) or shown(tree)
    raise FunctreeTypeError(
        f"{function} takes a tree of arrays, and {name} is {what}: {remedy}, "
        f"or give `ft.abstract({name})(...)` for the shapes alone"
    )


def check_callback(function: Callable[..., Any], what: str) -> None:
    """Raise RuleError for a function that cannot be called with a path and a leaf, as filters and
    layouts are."""
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
    raise RuleError(
        f"{shown(function)} is not {what}: a function is one if it takes `(path, leaf)`"
    )
