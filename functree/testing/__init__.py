"""This package provides assertions about layouts, collectives, compilations and sharded results.

`first_nonfinite` finds the first operation that makes a NaN or an infinity.
"""

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
    """Return the public names, for `dir` and completion.

    Submodules are attributes of their package, but not public.
    """
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
