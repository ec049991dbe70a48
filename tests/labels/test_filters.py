"""Filters: each row of the table, their combination, and that they are values."""

# ruff: noqa: UP007  (`Union` and `Optional` are forms under test)

import enum
import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar, Union

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array, Float

import functree as ft
from functree.errors import RuleError
from functree.labels.filters import (
    as_filter,
    names,
)
from functree.labels.leaves import Root, read
from tests.lib.checks import raises


class Norm(eqx.Module):
    scale: Float[Array, "embed"]
    mean: ft.Buffer[Float[Array, "embed"]]


class Base(eqx.Module):
    pass


class MLP(Base):
    up: Float[Array, "embed hidden"]
    bias: Float[Array, "hidden"]


class Model(eqx.Module):
    blocks: list[MLP]
    norm: Norm
    table: dict[str, Array]
    step: Array
    key: Array
    half: Array
    lin: eqx.nn.Linear


def model() -> Model:
    def block() -> MLP:
        return MLP(jnp.ones((2, 3)), jnp.ones(3))

    return Model(
        blocks=[block() for _ in range(11)],
        norm=Norm(jnp.ones(2), jnp.zeros(2)),
        table={"a.b": jnp.ones((4, 4)), "0": jnp.ones((), complex), "w\n": np.ones(2, np.float32)},
        step=jnp.asarray(0),
        key=jax.random.key(0),
        half=jnp.ones((2, 2), jnp.bfloat16),
        lin=eqx.nn.Linear(2, 3, key=jax.random.key(0)),
    )


LEAVES = read(model()).leaves
PATHS = {str(leaf.path) for leaf in LEAVES}


def matched(written: Any) -> set[str]:
    keep = as_filter(written)
    return {str(leaf.path) for leaf in LEAVES if keep(leaf)}


def paths(pattern: str) -> set[str]:
    """By the text, as an oracle."""
    found = {path for path in PATHS if re.fullmatch(pattern, path)}
    assert found
    return found


def is_even(path: ft.Path, leaf: Any) -> bool:
    assert isinstance(path, ft.Path) and hasattr(leaf, "shape")
    return len(path) > 1 and path[1] in (0, 2, 4, 6, 8, 10)


TABLE: dict[str, tuple[Any, str]] = {
    "glob": ("blocks.*.up", r"blocks\.\d+\.up"),
    "glob of digits": ("blocks.1*.up", r"blocks\.(1|10)\.up"),
    "glob, any depth": ("**.bias", r"(.*\.)?bias"),
    "glob, quoted": ('table."a.b"', r'table\."a\.b"'),
    "glob, a line": (r'table."w\n"', r'table\."w\\n"'),
    "a path": (ft.Path(("table", "0")), r'table\."0"'),
    "regex": (re.compile(r"blocks\.[02]\..*"), r"blocks\.[02]\..*"),
    "regex, the whole text": (re.compile("step|lin|half|eight"), "step|half"),
    "regex, flags": (re.compile(r"NORM.*", re.IGNORECASE), "norm.*"),
    "class": (MLP, r"blocks\..*"),
    "base class": (Base, r"blocks\..*"),
    "two classes": (MLP | Norm, r"(blocks|norm)\..*"),
    "typing.Union": (Union[MLP, Norm], r"(blocks|norm)\..*"),
    "under": (ft.under(eqx.nn.Linear), r"lin\..*"),
    "a container": (list, r"blocks\..*"),
    "has_axis": (ft.has_axis("hidden"), r"blocks\..*"),
    "has_ndim": (ft.has_ndim(0), r'step|key|table\."0"'),
    "has_dtype, kind": (ft.has_dtype(jnp.integer), "step"),
    "has_dtype": (ft.has_dtype(jnp.bfloat16), "half"),
    "has_dtype, key": (ft.has_dtype(jax.dtypes.prng_key), "key"),
    "larger_than": (ft.larger_than(6), r'table\."a\.b"'),
    "trainable": (ft.is_trainable, r"blocks.*|norm\.scale|table.*|half|lin.*"),
    "buffer": (ft.is_buffer, r"norm\.mean"),
    "callable": (is_even, r"blocks\.(0|2|4|6|8|10)\..*"),
    "everything": (..., ".*"),
    "and, text at the right": (ft.under(MLP) & "**.bias", r"blocks\..*\.bias"),
    "and, text at the left": ("**.bias" & ft.under(MLP), r"blocks\..*\.bias"),
    "or, class at the left": (Norm | ft.glob("step"), r"norm\..*|step"),
    "and, callable": (is_even & ft.has_ndim(2), r"blocks\.(0|2|4|6|8|10)\.up"),
    "union of classes and a filter": (MLP | Norm | ft.glob("step"), r"(blocks|norm)\..*|step"),
}


@pytest.mark.parametrize("case", TABLE)
def test_table(case: str) -> None:
    written, expected = TABLE[case]
    assert matched(written) == paths(expected)


MAKERS: dict[str, Callable[[], ft.Filter]] = {
    "glob('**.bias')": lambda: ft.glob("**.bias"),
    "re.compile('x')": lambda: as_filter(re.compile("x")),
    "under(MLP | Norm)": lambda: ft.under(MLP | Norm),
    "has_axis('embed')": lambda: ft.has_axis("embed"),
    "has_ndim(2)": lambda: ft.has_ndim(2),
    "has_dtype(floating)": lambda: ft.has_dtype(jnp.floating),
    "has_dtype(float32)": lambda: ft.has_dtype(jnp.float32),
    "larger_than(8)": lambda: ft.larger_than(8),
    "is_trainable": lambda: ft.is_trainable,
    "is_buffer": lambda: ft.is_buffer,
    "is_even": lambda: as_filter(is_even),
    "...": lambda: as_filter(...),
    "~has_ndim(2)": lambda: ~ft.has_ndim(2),
    "glob('a') & glob('b') & glob('c')": lambda: "a" & (ft.glob("b") & "c"),
    "glob('a') | glob('b') & ~has_ndim(2)": lambda: ft.glob("a") | ft.glob("b") & ~ft.has_ndim(2),
    "(glob('a') | glob('b')) & has_ndim(2)": lambda: (ft.glob("a") | "b") & ft.has_ndim(2),
    "~(glob('a') & glob('b'))": lambda: ~(ft.glob("a") & "b"),
}


# What the text of a filter uses, apart from functree.
USED = {"re": re, "MLP": MLP, "Norm": Norm, "floating": jnp.floating, "float32": jnp.float32}


@pytest.mark.parametrize("text", MAKERS)
def test_repr(text: str) -> None:
    assert repr(MAKERS[text]()) == text
    assert as_filter(eval(text, {**vars(ft), **USED, "is_even": is_even})) == MAKERS[text]()


def test_different_filters_differ() -> None:
    made = [make() for make in MAKERS.values()]
    assert len(set(made)) == len(made)


def test_spellings_of_a_dtype() -> None:
    spellings = [jnp.float32, np.float32, "float32", np.dtype("float32")]
    assert {ft.has_dtype(s) for s in spellings} == {ft.has_dtype(jnp.float32)}
    assert ft.has_dtype(jnp.floating) != ft.has_dtype(jnp.float32)


def test_state_is_whatever_is_in_it() -> None:
    """Not only an array that a class of state has as a field of its own."""
    kept = ft.StateRef(jnp.ones(3))
    found = read({"w": jnp.ones(2), "kept": kept, "state": ft.make_state([kept])[1]}).leaves
    assert [str(leaf.path) for leaf in found if ft.is_state(leaf)] == ["kept.init", "state.0"]
    assert [str(leaf.path) for leaf in found if ft.is_trainable(leaf)] == ["w"]
    nested = found[0]._replace(within=(dict, ft.State, list))
    assert ft.is_state(nested) and not ft.is_trainable(nested)


NONSENSE: dict[str, tuple[Callable[[], Any], str]] = {
    "a number": (lambda: as_filter(3), "3 is not a filter: write a glob (`'**.bias'`), a compiled regular"),
    "an unhashable callable": (lambda: as_filter(Unhashable()), "a hashable callable"),
    "an alias of a class": (lambda: as_filter(list[int]), "a class without type arguments, or such classes joined by `|`, not list[int]"),
    "a union with one": (lambda: ft.under(Boxed[int] | MLP), "without type arguments"),
    "no axis": (lambda: ft.has_axis("a b"), "has_axis('a b'): the axis must be an identifier other than `_`"),
    "no number": (lambda: ft.has_ndim("2"), "has_ndim('2'): the number of dimensions must be a non-negative integer"),  # pyright: ignore
    "no dtype": (lambda: ft.has_dtype("nonsense"), "has_dtype('nonsense'): the argument must be a dtype, or a kind of dtype"),
    "a size that is a truth": (lambda: ft.larger_than(True), "larger_than(True): the number of elements must be a finite, non-negative number"),
    "and ...": (lambda: ft.glob("a") & ..., "`...` cannot be combined with other filters: use it alone, as the last"),
}  # fmt: skip


T = TypeVar("T")


class Boxed(eqx.Module, Generic[T]):
    item: T


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, path: Any, leaf: Any) -> bool:
        return True


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense(case: str) -> None:
    make, message = NONSENSE[case]
    with raises(message, error=RuleError):
        make()


# Laws

ATOMS = st.sampled_from([make() for text, make in MAKERS.items() if text != "..."])
FORMULAS = st.recursive(
    ATOMS.map(lambda f: (f, f)),
    lambda inner: st.one_of(
        inner.map(lambda p: (~p[0], ("not", p[1]))),
        st.tuples(inner, inner).map(lambda p: (p[0][0] & p[1][0], ("and", p[0][1], p[1][1]))),
        st.tuples(inner, inner).map(lambda p: (p[0][0] | p[1][0], ("or", p[0][1], p[1][1]))),
    ),
    max_leaves=8,
)


def truth(formula: Any, leaf: Any) -> bool:
    if isinstance(formula, ft.Filter):
        return formula(leaf)
    if formula[0] == "not":
        return not truth(formula[1], leaf)
    return (all if formula[0] == "and" else any)([truth(formula[1], leaf), truth(formula[2], leaf)])


@given(FORMULAS, st.sampled_from(LEAVES))
def test_combinations_are_logic(formula: Any, leaf: Any) -> None:
    assert formula[0](leaf) is truth(formula[1], leaf)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


# Filters that name something above a leaf

# A bias' moment, in the training state at `runs.0`.
MOMENT = LEAVES[0]._replace(
    path=ft.Path(("runs", 0, "opt_state", 0, "mu", "w", "bias")),
    seen=ft.Path(("w", "bias")),
    roots=tuple(
        Root("a name", ft.Path(("runs", 0, "opt_state", 0, "mu", "w", "bias")[start:]))
        for start in range(3)
    ),
)


# What is written ─► whether it matches the bias' moment, and whether it names something above it:
# then it decides about the moment, which otherwise follows the bias.
FIELDS: dict[str, tuple[Any, bool, bool]] = {
    "glob": ("opt_state.**", True, True),
    "glob from a key above": ("runs.**", True, True),
    "glob from an index above": ("0.opt_state.**", True, True),
    "glob of another moment": ("opt_state.*.nu.**", False, False),
    "glob of a leaf": ("**.bias", True, False),
    "path": (ft.Path(("opt_state", 0, "mu", "w", "bias")), True, True),
    "not": (~ft.glob("opt_state.**"), False, True),
    "and": (ft.glob("**.bias") & "opt_state.**", True, True),
    "or": (ft.glob("opt_state.*.nu.**") | "opt_state.*.mu.**", True, True),
    "or, of another moment": (ft.glob("opt_state.*.nu.**") | "**.bias", True, False),
}


@pytest.mark.parametrize("case", FIELDS)
def test_whether_a_filter_names_something_above(case: str) -> None:
    written, matches, named = FIELDS[case]
    assert as_filter(written)(MOMENT) is matches
    assert names(as_filter(written), MOMENT) is named


def test_a_path_with_a_key_that_has_no_literal() -> None:
    with raises("is not a path", error=RuleError):
        as_filter(ft.Path((Color.RED, 0)))
