"""Assertions for users' own tests: layouts, what programs move, compilations, and sharded against
unsharded results; and the first operation at which something goes wrong."""

from functree.testing.budgets import assert_collectives, assert_layout, assert_peak_memory
from functree.testing.first_difference import assert_same_as_unsharded
from functree.testing.first_nonfinite import first_nonfinite
from functree.testing.operation import Operation
from functree.testing.recompiling import assert_closed, assert_no_recompile

__all__ = [
    "assert_layout",
    "assert_same_as_unsharded",
    "first_nonfinite",
    "Operation",
    "assert_collectives",
    "assert_peak_memory",
    "assert_closed",
    "assert_no_recompile",
]


def __dir__() -> list[str]:
    """The public names, for `dir` and completion.

    Submodules are attributes of their package, and are not public.
    """
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
