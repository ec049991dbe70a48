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
        of: makes the function, its arguments and its layouts, from a mesh and what is planted.
        edit: what mends it: `constraint` (one is removed), `spec` (of an argument, in one
            dimension), `rule` (of a layout), `result` (the layout of a result); None where it takes
            other code.
        named: what has to be named: a part of the line of the constraint, the path of the argument,
            the axis of the rule, the path of the result, or the line of the code to change.
        wrong: what is planted.
        right: what mends it by hand.
        third: the name of the third mesh axis, beside `data` and `model`.
    """

    name: str
    of: Callable[[Mesh, Any], Made]
    edit: str | None
    named: str
    wrong: Any = True
    right: Any = False
    third: str = "seq"

    def make(self, mesh: Mesh) -> Made:
        """The program with the mistake."""
        return self.of(mesh, self.wrong)

    def mended(self, mesh: Mesh) -> Made:
        """The program after the edit that mends it, made by hand."""
        return self.of(mesh, self.right)


MISTAKES: list[Mistake] = []
"""The mistakes, as far as their modules were imported."""


def mistake(name: str, **planted: Any) -> Callable[[Any], Any]:
    """List a mistake in what a function makes. The second paragraph of its docstring says what is
    wrong, and what it costs."""

    def listed(of: Any) -> Any:
        MISTAKES.append(Mistake(name, of, **planted))
        return of

    return listed
