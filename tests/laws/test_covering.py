"""The covering of a table: every pair of values that stands in a cell is met, by few cells."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.covering import WHOLE, covering, pairs, selected_cells

FACTORS = ("abcdefghijkl", "mn", "opq", "rstuvwxyzABCDE")
TABLE = list(itertools.product(*FACTORS))
# Each value with the index of its factor: `a` of one factor is not `a` of another one.
SMALL = list(itertools.product("abc", "ab", "abcd"))


@given(st.lists(st.sampled_from(SMALL), unique=True), st.data())
def test_every_pair_of_a_possible_cell_is_met(cells: list[tuple[str, ...]], data: st.DataObject):
    special = data.draw(st.lists(st.sampled_from(cells), unique=True) if cells else st.just([]))
    found = covering(cells, special)
    met = set().union(*map(pairs, found))
    assert met == set().union(*map(pairs, cells))
    assert set(special) <= set(found)
    assert found == [cell for cell in cells if cell in set(found)]


def test_few_cells_are_enough():
    found = covering(TABLE)
    # Two factors alone have 12 · 14 pairs, and a cell meets one of them.
    assert len(found) == 12 * 14
    assert len(TABLE) == 6 * len(found)


def test_a_pair_is_two_values_of_two_factors():
    assert pairs(("a", "a", "b")) == {
        ((0, "a"), (1, "a")),
        ((0, "a"), (2, "b")),
        ((1, "a"), (2, "b")),
    }


def test_what_is_special_is_a_cell():
    with pytest.raises(AssertionError, match="no cells of the table"):
        covering(TABLE, [("a", "m", "o", "?")])


def test_the_soak_takes_the_whole_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(WHOLE, raising=False)
    assert selected_cells(TABLE, TABLE[:3]) == covering(TABLE, TABLE[:3])
    monkeypatch.setenv(WHOLE, "1")
    assert selected_cells(TABLE, TABLE[:3]) == TABLE
