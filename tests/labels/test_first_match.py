"""The first of ordered filters that matches, against a loop."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
from functree.labels.filters import FirstMatch, as_filter
from functree.labels.leaves import Leaf, Root
from functree.tree.axes import Axes
from functree.tree.paths import Path
from tests.lib.patterns import KEYS, PARTS, written

VALUES = [np.zeros((), np.float32), np.zeros((2, 3), np.float32), np.zeros(4, np.int32)]


def naive(filters: Sequence[ft.Filter], leaf: Leaf) -> int | None:
    return next((i for i, f in enumerate(filters) if f(leaf)), None)


def leaf(path: Sequence[Any], *roots: Sequence[Any], value: Any = VALUES[0]) -> Leaf:
    """A leaf whose path filters see, and the paths from names above it on."""
    axes, above = Axes(*[None] * value.ndim), [Root("a name", Path(root)) for root in roots]
    return Leaf(Path(path), value, axes, seen=Path(path), roots=tuple(above))


GLOBS = st.lists(PARTS, max_size=3).map(written)
OTHERS = st.sampled_from(
    [ft.has_ndim(1), ft.has_ndim(2), ~ft.glob("a.**"), re.compile("a.*"), ft.is_trainable, ...]
)
FILTERS = st.lists(GLOBS | GLOBS | KEYS.map(lambda key: str(Path((key,)))) | OTHERS, max_size=8)
PLACES = st.lists(KEYS, max_size=3)
ROOTS = st.lists(st.lists(KEYS, min_size=1, max_size=3), max_size=2, unique_by=lambda path: path[0])
LEAVES = st.builds(lambda path, roots, value: leaf(path, *roots, value=value), PLACES, ROOTS, st.sampled_from(VALUES))  # fmt: skip


@given(FILTERS, st.lists(LEAVES, min_size=1, max_size=4))
def test_it_is_a_loop(filters: list[Any], leaves: list[Leaf]) -> None:
    known = [as_filter(f) for f in filters]
    first = FirstMatch(known)
    assert [first(x) for x in leaves] == [naive(known, x) for x in leaves]


def check(filters: Sequence[Any], expected: int | None, *paths: Sequence[Any]) -> None:
    known = [as_filter(f) for f in filters]
    assert FirstMatch(known)(leaf(*paths)) == naive(known, leaf(*paths)) == expected


def test_a_pattern_that_begins_with_a_name_above() -> None:
    moment = [("w",), ("opt_state", 0, "mu", "w")]
    check(["w", "opt_state.**"], 0, *moment)
    check(["opt_state.0.nu.**", "**.mu.**", "opt*.**", "w"], 3, *moment)
    # It is matched with the path from the name on, and with no other.
    check(["a.b"], None, ("a", "b"), ("a", "c", "b"))
    check(["a.*.b"], 0, ("a", "b"), ("a", "c", "b"))
    # The key of a name may be None.
    check(["[None]"], 0, ("a",), (None,))
    check(["[None].a"], None, ("a",), (None,))


def test_without_a_path_only_a_pattern_that_names_it_matches() -> None:
    step = leaf(("step",), ("step",), value=VALUES[1])._replace(seen=None)
    others = ["**", "*", re.compile(".*"), ft.regex("step"), ft.has_ndim(2), ~ft.glob("a"), int]
    others += [lambda path, leaf: True, ft.glob("step") & ft.has_ndim(1), ~ft.glob("step")]
    for item in others:
        assert FirstMatch([as_filter(item)])(step) is None
    for item in ["step", ft.Path(("step",)), ft.glob("a") | "step", ...]:
        assert FirstMatch([as_filter(item)])(step) == 0
    assert FirstMatch([as_filter(ft.glob("step") & ft.has_ndim(2))])(step) == 0
