"""A filter `wrt=` and the leaves it is for ─► an error for a pattern in it that matches none."""

from collections.abc import Sequence

from functree.errors import RuleError
from functree.labels.filters.filter import FilterLike, as_filter, patterns
from functree.labels.filters.near import meant
from functree.labels.leaf import Leaf


def check_wrt(wrt: FilterLike, leaves: Sequence[Leaf], whose: str) -> None:
    """Check that each pattern in a filter matches a leaf.

    With a misspelled pattern in `~ft.glob(...)`, parameters that should be frozen would be trained.
    A class or a property may be that of no leaf: such filters are written for many models.

    Args:
        wrt: the filter.
        leaves: all leaves of what is differentiated or trained.
        whose: a text for what the leaves are of, for the error.

    Raises:
        RuleError: a pattern matches no leaf.
    """
    for pattern in patterns(as_filter(wrt)):
        if not any(map(pattern, leaves)):
            near = meant(pattern, leaves)
            raise RuleError(f"wrt={wrt!r}: {pattern!r} matches no leaf of {whose}{near}")
