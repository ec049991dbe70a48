"""Of a table of cases, the cells that a run tests: all of them, or enough to meet each pair of
values.

What breaks a cell is mostly one of its values, or two of them together. So the suite runs a
covering of the pairs, with the cells that the table lists as special; `python -m tests.soak
--tables` runs every cell. Random cases are fewer in the suite, too.
"""

import itertools
import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import hypothesis

Cell = tuple[Any, ...]

# The variable of the environment with which `python -m tests.soak --tables` asks for the whole tables.
WHOLE = "FUNCTREE_WHOLE_TABLES"


def pairs(cell: Cell) -> set[Hashable]:
    """The pairs of values of a cell, each value with the index of its factor."""
    return set(itertools.combinations(enumerate(cell), 2))


def covering(cells: Iterable[Cell], special: Iterable[Cell] = ()) -> list[Cell]:
    """The special cells, and others until each pair of values that stands in some cell is met.

    Each of the others is the cell that meets most of the pairs that are left, and of several the
    first. So a table has one covering, in each process of a run.

    Args:
        cells: the whole table.
        special: cells of it that are taken whatever they cover.

    Returns:
        Cells of the table, in its order.
    """
    found = {cell: pairs(cell) for cell in cells}
    taken = set(special)
    assert taken <= found.keys(), f"no cells of the table: {taken - found.keys()}"
    left = set().union(*found.values()).difference(*(found[cell] for cell in taken))
    while left:
        best = max(found, key=lambda cell: len(found[cell] & left))
        taken.add(best)
        left -= found[best]
    return [cell for cell in found if cell in taken]


def whole_tables() -> bool:
    """Whether this run tests every cell of its tables, as the soak asks."""
    return bool(os.environ.get(WHOLE))


def selected_cells(cells: Sequence[Cell], special: Iterable[Cell] = ()) -> Sequence[Cell]:
    """The cells that this run tests: the whole table, if the soak asks for it, or a covering."""
    return cells if whole_tables() else covering(cells, special)


def examples(number: int) -> hypothesis.settings:
    """So many random examples of a test that is slow; for the soak, 500."""
    return hypothesis.settings(max_examples=500 if whole_tables() else number)
