"""Paths that differ only in their indices ─► one text."""

from typing import Any

import pytest

import functree as ft
from functree.report.table import but_for_key, common_path, grouped, pattern_of


def paths(*several: str) -> list[ft.Path]:
    return [ft.Path.parse(one) for one in several]


COMMON: dict[str, tuple[list[ft.Path], str]] = {
    "one": (paths("blocks.0.w"), "blocks.0.w"),
    "a run": (paths("b.0.w", "b.1.w", "b.2.w"), "b.{0-2}.w"),
    "single ones": (paths("b.1", "b.3", "b.5"), "b.{1,3,5}"),
    "in any order": (paths("b.10", "b.2", "b.9", "b.1"), "b.{1-2,9-10}"),
    "two indices": (paths("b.0.0", "b.0.1", "b.1.0", "b.1.1"), "b.{0-1}.{0-1}"),
    "one index of two": (paths("b.0.7.w", "b.1.7.w"), "b.{0-1}.7.w"),
    "quoted keys": ([ft.Path(("a.b", 0)), ft.Path(("a.b", 1))], '"a.b".{0-1}'),
    "names and indices": (paths("b.0.q", "b.1.q", "b.0.k", "b.1.k"), "b.{0-1}.{q,k}"),
    "no keys": ([ft.Path()], "(the array)"),
}


@pytest.mark.parametrize("case", COMMON)
def test_common_paths(case: str) -> None:
    several, text = COMMON[case]
    assert common_path(several) == text


# Some paths, other ones, and the position of a key ─► whether they differ in this key alone.
ALIKE: dict[str, tuple[list[ft.Path], list[ft.Path], int, bool]] = {
    "the last": (paths("b.0.q", "b.1.q"), paths("b.0.k", "b.1.k"), 1, True),
    "the last but one": (paths("a.q.w", "a.q.b"), paths("a.k.w", "a.k.b"), 2, True),
    "another key": (paths("a.q"), paths("b.q"), 1, False),
    "other layers": (paths("b.0.q"), paths("b.1.k"), 1, False),
    "fewer of them": (paths("a.q.w", "a.q.b"), paths("a.k.w"), 2, False),
    "longer ones": (paths("a.q"), paths("a.q.w"), 1, False),
}


@pytest.mark.parametrize("case", ALIKE)
def test_paths_that_differ_in_one_key(case: str) -> None:
    some, others, from_end, alike = ALIKE[case]
    assert (but_for_key(some, from_end) == but_for_key(others, from_end)) is alike


@pytest.mark.parametrize(("path", "from_end"), [("w", 2), ("", 1), ("b.0", 1), ("b.0.w", 2)])
def test_an_index_and_no_key_are_joined_with_nothing(path: str, from_end: int) -> None:
    assert but_for_key([ft.Path.parse(path) if path else ft.Path()], from_end) is None


def test_patterns_are_equal_for_other_indices() -> None:
    one, two, other, deeper = paths("b.0.w", "b.1.w", "b.0.v", "b.0.w.0")
    assert pattern_of(one) == pattern_of(two)
    assert len({pattern_of(one), pattern_of(other), pattern_of(deeper)}) == 3


def test_groups_are_in_the_order_of_their_first() -> None:
    values: Any = ["b1", "a1", "b2", "c1", "a2"]
    assert grouped(values, lambda value: value[0]) == [["b1", "b2"], ["a1", "a2"], ["c1"]]
    assert grouped([], len) == []
