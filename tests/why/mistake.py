"""A program with a mistake in its layout, and the same program after it was mended by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Mistake:
    """A mistake that was planted in a program.

    Attributes:
        name: its name.
        what: what is wrong, and what it costs.
        make: makes the function, its arguments and its layouts, with the mistake.
        mended: makes them after the edit that mends it, made by hand.
        edit: what mends it: `constraint` (one is removed), `spec` (of an argument, in one
            dimension), `rule` (of a layout), `result` (the layout of a result); None where it takes
            other code.
        named: what has to be named: a part of the line of the constraint, the path of the argument,
            the axis of the rule, the path of the result, or the line of the code to change.
        third: the name of the third mesh axis, beside `data` and `model`.
    """

    name: str
    what: str
    make: Callable[[Mesh], Made]
    mended: Callable[[Mesh], Made]
    edit: str | None
    named: str
    third: str = "seq"
