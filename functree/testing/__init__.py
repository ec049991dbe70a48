"""This package provides assertions about layouts, collectives, compilations and sharded results.

`first_nonfinite` finds the first operation that makes a NaN or an infinity.
"""

import types as _types

from functree.testing.budgets import assert_collectives as assert_collectives
from functree.testing.budgets import assert_layout as assert_layout
from functree.testing.budgets import assert_peak_memory as assert_peak_memory
from functree.testing.first_difference import assert_same_as_unsharded as assert_same_as_unsharded
from functree.testing.first_nonfinite import first_nonfinite as first_nonfinite
from functree.testing.operation import Operation as Operation
from functree.testing.recompiling import assert_closed as assert_closed
from functree.testing.recompiling import assert_no_recompile as assert_no_recompile


def __dir__() -> list[str]:
    """Return the public names, for `dir` and completion.

    Submodules are attributes of their package, but not public.
    """
    return [name for name, value in globals().items() if not isinstance(value, _types.ModuleType)]


# Type checkers read the imports above instead.
__all__ = [name for name in __dir__() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]
