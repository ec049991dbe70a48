"""A prefix tree and a tree ─► each value with its subtree, or where the two differ."""

from collections import OrderedDict
from typing import Any

import pytest

from functree.errors import MAX_PATHS, RuleError
from functree.tree.paths import Path
from functree.tree.prefix import PrefixOf, aligned, where_text

OF = PrefixOf(
    "colors",
    "color",
    lambda value: isinstance(value, str),
    "is not a color",
    lambda prefix, tree: f"; of {type(tree).__name__}",
)

CASES: dict[str, tuple[Any, Any, list[tuple[str, str, Any]]]] = {
    "one for all": ("red", {"a": [1, 2]}, [("red", "", {"a": [1, 2]})]),
    "for a leaf": ("red", 1, [("red", "", 1)]),
    "for None": (["red"], [None], [("red", "0", None)]),
    "in the order of the tree": (
        {"b": "red", "a": ["blue", "green"]},
        {"a": [1, {"c": 2}], "b": 3},
        [("blue", "a.0", 1), ("green", "a.1", {"c": 2}), ("red", "b", 3)],
    ),
    "empty": ({}, {}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_belongs_together(case: str) -> None:
    prefix, tree, expected = CASES[case]
    assert [(one, str(path), node) for one, path, node in aligned(prefix, tree, OF)] == expected


MANY = {f"k{i}": i for i in range(MAX_PATHS + 5)}
ERRORS: dict[str, tuple[Any, Any, str]] = {
    "no color": ({"a": 3}, {"a": [1]}, "at `a`: 3 is not a color, or a tree of these; of list"),
    "of another type": (
        {"a": ["red"]},
        {"a": ("x",)},
        "at `a`: the colors are a list and the tree is a tuple; a tree of colors has the tree's "
        "own structure down to each color; of tuple",
    ),
    "deeper than the tree": (
        ["red", ["blue"]],
        [1, 2],
        "at `1`: the colors are a list and the tree is a leaf; a tree of colors has the tree's own "
        "structure down to each color; of int",
    ),
    "both": (
        {"a": "red", "b": "red"},
        {"b": 1, "c": 2},
        "at the root: `a` is only in the colors; `c` is only in the tree: a tree of colors has the "
        "keys of the tree; of dict",
    ),
    "in another order": (
        OrderedDict(b="red", a="red"),
        OrderedDict(a=1, b=2),
        "at the root: the colors have the keys of the tree in another order: `b`, `a` instead of "
        "`a`, `b`; of OrderedDict",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    prefix, tree, message = ERRORS[case]
    with pytest.raises(RuleError) as error:
        list(aligned(prefix, tree, OF))
    assert str(error.value) == message


def test_only_the_first_keys_are_listed() -> None:
    with pytest.raises(RuleError) as error:
        list(aligned({}, MANY, OF))
    assert str(error.value).count("`k") == MAX_PATHS and "5 more" in str(error.value)


def test_without_a_hint() -> None:
    bare = PrefixOf("colors", "color", OF.is_one, "is no color")
    with pytest.raises(RuleError) as error:
        list(aligned(3, [1], bare))
    assert str(error.value) == "at the root: 3 is no color, or a tree of these"


def test_places() -> None:
    assert where_text(Path()) == "the root" and where_text(Path(("a", 0))) == "`a.0`"
