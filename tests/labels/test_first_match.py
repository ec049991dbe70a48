"""The first of ordered filters that matches, against a loop."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
from functree.labels.filters.filter import as_filter
from functree.labels.filters.first_match import FirstMatch
from functree.labels.leaf import Leaf
from functree.tree.axes import Axes
from functree.tree.paths import Path
from tests.lib.patterns import KEYS, PARTS, written

VALUES = [np.zeros((), np.float32), np.zeros((2, 3), np.float32), np.zeros(4, np.int32)]


def naive(filters: Sequence[ft.Filter], leaf: Leaf) -> int | None:
    return next((i for i, f in enumerate(filters) if f(leaf)), None)


def leaf(*paths: Sequence[Any], value: Any = VALUES[0]) -> Leaf:
    return Leaf(Path(paths[0]), value, Axes(*[None] * value.ndim), aliases=tuple(map(Path, paths)))


GLOBS = st.lists(PARTS, max_size=3).map(written)
OTHERS = st.sampled_from(
    [ft.has_ndim(1), ft.has_ndim(2), ~ft.glob("a.**"), re.compile("a.*"), ft.is_trainable, ...]
)
FILTERS = st.lists(GLOBS | GLOBS | KEYS.map(lambda key: str(Path((key,)))) | OTHERS, max_size=8)
PLACES = st.lists(KEYS, max_size=3)
LEAVES = st.builds(lambda paths, value: leaf(*paths, value=value), st.lists(PLACES, min_size=1, max_size=3),
    st.sampled_from(VALUES),
)  # fmt: skip


@given(FILTERS, st.lists(LEAVES, min_size=1, max_size=4))
def test_it_is_a_loop(filters: list[Any], leaves: list[Leaf]) -> None:
    known = [as_filter(f) for f in filters]
    first = FirstMatch(known)
    assert [first(x) for x in leaves] == [naive(known, x) for x in leaves]


def check(filters: Sequence[Any], expected: int | None, *paths: Sequence[Any]) -> None:
    known = [as_filter(f) for f in filters]
    assert FirstMatch(known)(leaf(*paths)) == naive(known, leaf(*paths)) == expected


def test_literals_and_patterns_in_order() -> None:
    check(["**.b", "a.b"], 0, ("a", "b"))
    check(["a.b", "**.b"], 0, ("a", "b"))
    check(["c", "a.b", "**.b", "a.b"], 1, ("a", "b"))
    check(["x.*", "*.b", "a.*"], 1, ("a", "b"))
    check(["a.b", "a.b"], 0, ("a", "b"))


def test_what_stands_between_globs_keeps_its_place() -> None:
    check(["x", ft.has_ndim(0), "a"], 1, ("a",))
    check(["a", ft.has_ndim(0), "x"], 0, ("a",))
    check(["*.b", ft.has_ndim(0), "a.*"], 0, ("a", "b"))
    check(["x", ft.has_ndim(3), "a"], 2, ("a",))
    check([ft.has_ndim(3), "x", ...], 2, ("a",))


def test_none_and_nothing() -> None:
    check([], None, ("a",))
    check(["x", "y.*"], None, ("a",))
    check([""], 0, ())
    check(["**"], 0, ())


def test_the_least_over_all_names() -> None:
    check(["model.**", "a"], 0, ("a",), ("model", "a"))
    check(["a", "model.**"], 0, ("model", "a"), ("a",))
    check(["z", "a", "model.**"], 1, ("model", "a"), ("a",))


def test_hundreds_of_globs() -> None:
    filters = [f"blocks.{i}.*" for i in range(300)] + [f"blocks.{i}.w" for i in range(300)]
    check(filters, 299, ("blocks", 299, "w"))
    check(filters[::-1], 0, ("blocks", 299, "w"))
