"""Sizes and numbers that a layer is created with ─► the problems with them."""

import math
from collections.abc import Iterator
from numbers import Real

import numpy as np

from functree.errors import FunctreeError, Problem


def is_size(value: object) -> bool:
    """Whether a value is a positive integer."""
    # A flag is an `int` in Python, and in the place of a size it is a mistake.
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value > 0)


def is_number(value: object) -> bool:
    """Whether a value is a finite real number."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def size_problems(**sizes: object) -> Iterator[Problem]:
    """A problem for each size that is not a positive integer.

    Examples:
        >>> from functree.nn.checks import size_problems
        >>> [(problem.what, problem.why) for problem in size_problems(embed=8, heads=0)]
        [('heads=0', 'it must be a positive integer')]
    """
    for name, value in sizes.items():
        if not is_size(value):
            yield Problem(None, None, f"{name}={value!r}", "it must be a positive integer")


def check_sizes(layer: str, **sizes: object) -> None:
    """Raise FunctreeError for the sizes of a layer that are not positive integers."""
    # JAX would raise a ZeroDivisionError in an initializer, or an error about shapes that does not name the argument.
    if problems := list(size_problems(**sizes)):
        raise FunctreeError(f"{layer} cannot be built", problems)
