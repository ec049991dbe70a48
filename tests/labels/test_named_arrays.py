"""Bare arrays and the texts of their axes ─► leaves that have these axes."""

from typing import Any

import equinox as eqx
import pytest
from jaxtyping import Array, Float

import functree as ft
from functree.errors import RuleError, ShardingError
from functree.labels.leaves import named_arrays, read
from tests.lib.checks import raises
from tests.lib.trees import x


class Model(eqx.Module):
    up: Float[Array, "embed hidden"]
    scale: Array


def batch() -> Any:
    return {"ids": x(4, 8), "n": 3, "x": [x(4, 8, 2), "text", None, x(4)]}


OWN = {"ids": "_ _", "x.0": "_ _ _", "x.3": "_"}

# Axes ─► those of the leaves, where they differ from their own. Leaves that are no arrays have no
# axes, and count in the tree of the axes nevertheless.
CASES: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "nothing": (batch(), None, OWN),
    "for one array": (x(4, 8), "batch seq", {"": "batch seq"}),
    "as `Axes`": (x(4, 8), ft.Axes("batch", None), {"": "batch _"}),
    "for one of several": (batch(), {"ids": "b s", "n": None, "x": None}, OWN | {"ids": "b s"}),
    "for all below": (
        [{"a": x(4, 2), "n": 1, "b": [x(6, 3)]}, x(2)],
        ["b e", None],
        {"0.a": "b e", "0.b.0": "b e", "1": "_"},
    ),
    "beside annotations": (
        [Model(x(2, 3), x(2)), x(4, 2)],
        [None, "b e"],
        {"0.up": "embed hidden", "0.scale": "_", "1": "b e"},
    ),
    "as annotated": (
        [Model(x(2, 3), x(2, 3))],
        "embed hidden",
        {"0.up": "embed hidden", "0.scale": "embed hidden"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_axes(case: str) -> None:
    tree, axes, expected = CASES[case]
    leaves = read(tree)
    found = named_arrays(leaves, tree, axes)
    assert {str(leaf.path): str(leaf.axes) for leaf in found.leaves} == expected
    assert found.skeleton is leaves.skeleton
    for before, leaf in zip(leaves.leaves, found.leaves, strict=True):
        assert leaf is before or leaf.annotated


# Axes ─► the path of each array that they do not fit, and why.
ERRORS: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "too many": ({"a": [1, x(4, 8)]}, {"a": "b s e"}, {"a.1": '"b s e" names 3 dimensions, but the array has 2'}),
    "annotated otherwise": (
        [Model(x(2, 3), x(2))],
        [Model("batch hidden", "b")],  # pyright: ignore
        {"0.up": 'is annotated "embed hidden", but `axes` names it "batch hidden"'},
    ),
    "several": (
        {"a": x(4), "b": x(4, 8), "c": x(2)},
        {"a": "b s", "b": "b", "c": "b"},
        {"a": '"b s" names 2 dimensions, but the array has 1', "b": '"b" names 1 dimension, but the array has 2'},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    tree, axes, expected = ERRORS[case]
    with pytest.raises(ShardingError) as error:
        named_arrays(read(tree), tree, axes)
    assert {str(problem.path): problem.why for problem in error.value.problems} == expected


def test_axes_of_what_is_no_array() -> None:
    with raises('axes="b" names the dimensions of a bare array, but this is a int'):
        named_arrays(read({"n": 3}), {"n": 3}, {"n": "b"})


def test_axes_of_another_structure() -> None:
    with raises('at `ids`: 3 is not a text such as `"batch embed"`', error=RuleError):
        named_arrays(read(batch()), batch(), {"ids": 3, "n": None, "x": None})
