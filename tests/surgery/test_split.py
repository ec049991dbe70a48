"""A tree taken apart and put together: the same tree, whatever the filters."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
from functree.errors import FunctreeError, RuleError
from functree.tree.arrays import is_array
from functree.tree.skeleton.skeleton import Skeleton
from tests.lib.checks import raises
from tests.lib.trees import Keyless, Leafy, containers, flat, same

ARRAYS = [
    np.zeros((2, 3), np.float32),
    np.int32(4),
    jax.ShapeDtypeStruct((2,), jnp.bfloat16),
    np.ones(2, np.int8),
]
OTHERS = [None, 1, True, 1.0, 0, False, -1.5, "text", abs, (), np.dtype("f4"), 2j]
LEAVES = st.sampled_from(ARRAYS) | st.sampled_from(OTHERS)
TREES = st.recursive(LEAVES, containers, max_leaves=12)
FILTERS = st.lists(
    st.sampled_from(
        ["**.0.**", "*", "**", "w.**", "**.w", "kept.**", Leafy, list, Keyless, ft.has_ndim(1), ft.is_trainable,
         ~ft.has_dtype(jnp.floating), ft.larger_than(2), ft.glob("**.left") | ft.glob("**.right"),
         lambda path, leaf: len(path) % 2 == 0],
    ),
    max_size=4,
)  # fmt: skip


def matching(tree: Any, filters: list[Any]) -> list[Any]:
    """The filters without those that `split` refuses: patterns and classes that match nothing."""
    kept = []
    for one in filters:
        try:
            ft.split(tree, one, ...)
        except ft.FunctreeError:
            continue
        kept.append(one)
    return kept


@given(TREES, FILTERS)
def test_merge_undoes_split(tree: Any, filters: list[Any]) -> None:
    filters = matching(tree, filters)
    static, *parts = ft.split(tree, *filters, ...)
    assert len(parts) == len(filters) + 1
    assert same(ft.merge(static, *parts), tree)
    assert same(ft.merge(static, *parts[::-1]), tree)
    columns = list(zip(*[flat(part)[0] for part in parts], strict=True))
    for value, column in zip(flat(tree)[0], columns, strict=True):
        assert [v for v in column if v is not None] == (
            [] if not is_array(value) else [v for v in column if v is value]
        )
    assert all(flat(part)[1] == flat(tree)[1] for part in parts)


@given(TREES, FILTERS)
def test_an_array_is_in_the_part_of_the_first_filter(tree: Any, filters: list[Any]) -> None:
    filters = matching(tree, filters)
    _, *parts = ft.split(tree, *filters, ...)
    for index, part in enumerate(parts):
        earlier = ft.split(tree, *filters[:index], ...)[-1]
        for mine, theirs in zip(flat(part)[0], flat(earlier)[0], strict=True):
            assert mine is None or mine is theirs


@given(TREES, FILTERS)
def test_static_does_not_depend_on_the_filters(tree: Any, filters: list[Any]) -> None:
    static = ft.split(tree)[0]
    other = ft.split(tree, *matching(tree, filters), ...)[0]
    assert isinstance(static, Skeleton) and static == other and hash(static) == hash(other)
    again = ft.split(
        jax.tree.map(lambda leaf: leaf + 1 if isinstance(leaf, np.ndarray) else leaf, tree)
    )[0]
    assert again == static and hash(again) == hash(static)
    assert not any(is_array(value) for _, value in static.others)


def model() -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 3, 4, 2, key=jax.random.key(0))


def test_a_model() -> None:
    mlp = model()
    static, bias, rest = ft.split(mlp, "**.bias", ...)
    assert bias.layers[0].weight is None and bias.layers[0].bias is mlp.layers[0].bias
    assert bias.activation is None and rest.layers[0].bias is None
    assert ft.merge(static, bias, rest)(jnp.ones(2)).shape == (3,)
    assert repr(static) == f"<Skeleton: 6 arrays, {len(static.others)} other leaves>"


def test_a_packed_model_is_split_by_the_models_paths() -> None:
    mlp = model()
    static, bias, rest = ft.split([ft.pack(mlp), "text"], "0.layers.*.bias", ...)
    assert bias[0].arrays[::2] == (None,) * 3 and bias[0].arrays[1] is mlp.layers[0].bias
    assert rest[0].tree.layers[0].weight is mlp.layers[0].weight
    assert static.paths == ft.split([mlp, "text"])[0].paths
    assert same(ft.merge(static, bias, rest)[0].tree, mlp)
    with pytest.raises(FunctreeError, match=r"(?s)6 leaves cannot be merged.*layers\.0\.weight"):
        ft.merge(static)


def test_static_is_a_key_for_jit() -> None:
    calls = []

    def body(static: Any, arrays: Any) -> Any:
        calls.append(static)
        return ft.merge(static, arrays)["w"]

    f = jax.jit(body, static_argnums=0)
    for n in (1, 1, True, 1):
        f(*ft.split({"n": n, "w": jnp.ones(2)}))
    assert len(calls) == 2


def test_no_arrays_and_no_tree() -> None:
    for tree in ({}, [], None, {"n": 1}):
        static, part = ft.split(tree)
        assert ft.merge(static, part) == tree == ft.merge(static)


CASES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "no filter matches": (
        lambda: ft.split({"a": np.ones((2, 3), np.float32), "b": np.ones(2)}, "b"),
        ("split: no filter matches 1 leaf", "a   f32[2, 3]", "no filter matches it", "or `...` as the last"),
    ),
    "unhashable": (
        lambda: ft.split({"a": [np.array([None]), np.array("text")], "b": set()}),
        ("3 leaves cannot be static", "a.0, a.1   ndarray", "neither an array nor hashable", "b   set", "make the leaf an array"),
    ),
    "not a static": (lambda: ft.merge({"w": 1}), ("merge: `static` has type dict: pass the first result of `ft.split`",)),  # type: ignore[arg-type]
    "missing": (
        lambda: ft.merge(*ft.split(model(), "**.bias", ...)[:2]),
        ("3 leaves cannot be merged", "layers.0.weight, layers.1.weight", "is in 0 parts", "in exactly one"),
    ),
    "twice": (lambda: ft.merge(*(s := ft.split({"w": np.ones(2)})), s[1]), ("w", "is in 2 parts")),
    "another structure": (
        lambda: ft.merge(ft.split({"w": np.ones(2)})[0], {"v": np.ones(2)}),
        ("merge: part 0, of type dict with 1 leaf, does not have the structure", "with None for leaves"),
    ),
    "too many": (
        lambda: ft.merge(ft.split({"n": 1, "w": np.ones(2)})[0], {"n": 1, "w": np.ones(2)}),
        ("merge: 1 leaf cannot be merged", "n", "is not the path of an array in the tree that"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_errors(case: str) -> None:
    call, told = CASES[case]
    with raises(*told):
        call()


def test_everything_else_is_the_last_filter() -> None:
    with raises("split: `...` matches all remaining arrays", error=RuleError):
        ft.split(model(), ..., "**.bias")


class Two(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Conv1d


def two() -> Two:
    keys = jax.random.split(jax.random.key(0))
    return Two(eqx.nn.Linear(2, 3, key=keys[0]), eqx.nn.Conv1d(2, 3, 1, key=keys[1]))


NAMES_NOTHING: dict[str, tuple[Any, str]] = {
    "a glob": ("third.**", "glob('third.**')"),
    "a regular expression": (re.compile("third.*"), "re.compile('third.*')"),
    "a class": (eqx.nn.LSTMCell, "under(LSTMCell)"),
    "not a typo": (~ft.glob("**.wieght"), "glob('**.wieght')"),
    "one of two": (ft.glob("first.*") | ft.glob("third.*"), "glob('third.*')"),
}


@pytest.mark.parametrize("case", NAMES_NOTHING)
def test_a_filter_that_names_nothing_of_the_tree(case: str) -> None:
    written, told = NAMES_NOTHING[case]
    with raises(
        f"split: {told} matches no array of the tree",
        "first.weight",
        "f32[3, 2]",
        "correct the filter",
    ):
        ft.split(two(), written, ...)


@pytest.mark.parametrize("written", [
    ft.has_axis("nowhere"), lambda path, leaf: False, ft.under(Two) & ft.is_buffer, eqx.nn.Linear | eqx.nn.LSTMCell,
    ~ft.under(eqx.nn.LSTMCell),
], ids=["axis", "function", "in a class", "two classes", "not"])  # fmt: skip
def test_a_filter_by_a_property_may_match_nothing(written: Any) -> None:
    _, part, rest = ft.split(two(), written, ...)
    assert len(jax.tree.leaves(part)) + len(jax.tree.leaves(rest)) == 4


@pytest.mark.parametrize("static", [lambda tree: ft.split(tree)[0], ft.pack])
def test_static_data_cannot_be_pickled(static: Callable[[Any], Any]) -> None:
    """JAX's treedef of an Equinox module would be unpickled, and fail where it is used."""
    with raises("cannot be pickled", "pickle the tree itself"):
        pickle.dumps(static(model()))
