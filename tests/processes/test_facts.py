"""Lines of values: the same for equal ones in each process, and never an address."""

import copy
import enum
import functools
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functree as ft
from functree.errors import FunctreeTypeError
from functree.processes.check_processes import facts_of, settings, value_text
from tests.lib.meshes import MESH


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = field(default=None, repr=False)


# In a table of eight places 0 and 8 meet, so the order of a set is that in which they came.
ONE, OTHER = {0, 8}, {8, 0}

# Two values that are equal.
EQUAL: dict[str, tuple[Any, Any]] = {
    "sets": (ONE, OTHER),
    "sets in dataclasses": (Frozen(frozenset(ONE)), Frozen(frozenset(OTHER))),
    "sets in partials": (functools.partial(max, ONE), functools.partial(max, OTHER)),
    "keys in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "mappings": (MappingProxyType({"a": ONE}), MappingProxyType({"a": OTHER})),
    "functions": (lambda: 1, lambda: 1),
    "optimizers": (optax.adam(1e-3), optax.adam(1e-3)),
    "arrays": (jnp.arange(9), np.arange(9, dtype=np.int32)),
    "arrays with other strides": (np.arange(40.0)[::2], np.arange(40.0)[::2].copy()),
}  # fmt: skip

# Two values that differ.
UNEQUAL: dict[str, tuple[Any, Any]] = {
    "types": (1, 1.0),
    "bools": (1, True),
    "zeros": (0.0, -0.0),
    "containers": ((1, 2), [1, 2]),
    "fields that are not in repr": (Frozen(1, 2), Frozen(1, 3)),
    "ordered dicts": (OrderedDict(a=1), OrderedDict(a=2)),
    "functions": (jnp.sin, jnp.cos),
    "keywords": (functools.partial(sorted, reverse=True), functools.partial(sorted, reverse=False)),
    "specs": (ft.P("data"), ft.P(None)),
    "arrays": (np.arange(9), np.arange(1, 10)),
    "long texts": ("a" * 5000, "a" * 4999 + "b"),
    "filters": (ft.glob("a.**"), ft.glob("b.**")),
    "meshes": (MESH, ft.make_mesh(data=8)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_have_equal_texts(name: str) -> None:
    one, other = EQUAL[name]
    assert value_text(one) == value_text(other)
    assert facts_of({"value": one}) == facts_of({"value": other})
    assert not re.search(r" at 0x|\n", "".join(facts_of(one)))


@pytest.mark.parametrize("name", UNEQUAL)
def test_other_values_have_other_texts(name: str) -> None:
    one, other = UNEQUAL[name]
    assert value_text(one) != value_text(other)
    assert facts_of({"value": one}) != facts_of({"value": other})


def test_trees_have_a_line_for_each_leaf() -> None:
    tree = {"b": [1, None, "x\ny"], "a": frozenset("x")}
    assert facts_of(tree) == [
        "dict",
        "a: frozenset{'x'}",
        "b: list",
        "b.0: 1",
        "b.1: None",
        r"b.2: 'x\ny'",
    ]


OTHERS: dict[str, Any] = {
    "object": object(),
    "lock": threading.Lock(),
    "in a list": [1, object()],
    "array of objects": np.array([{1}], object),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_objects_are_refused_by_name(name: str) -> None:
    with pytest.raises(
        FunctreeTypeError, match=r"^a: .* objects cannot be compared between processes"
    ):
        facts_of({"a": OTHERS[name]} if name != "in a list" else {"a": Frozen(OTHERS[name])})
    # An argument of a function that is not compared counts by its class.
    assert facts_of({"a": OTHERS["object"]}, skip=True) == ["dict", "a: object"]


class Static(eqx.Module):
    value: Any
    name: str = eqx.field(static=True, default="")


# Trees with the same leaves.
TREES: dict[str, tuple[Any, Any]] = {
    "static fields": (Static(1, "a"), Static(1, "b")),
    "containers": ([1, 2], (1, 2)),
    "None": ({"a": [1], "b": None}, {"a": [1]}),
    "packed": (ft.pack(Static(jnp.ones(3), "a")), ft.pack(Static(jnp.ones(3), "b"))),
    "registered": (jax.tree_util.Partial(max, 1), jax.tree_util.Partial(min, 1)),
}


@pytest.mark.parametrize("name", TREES)
def test_the_structure_of_trees_counts(name: str) -> None:
    one, other = TREES[name]
    assert facts_of(one) != facts_of(other)
    assert facts_of(one) == facts_of(copy.deepcopy(one))


def test_plans_count_by_their_rows_and_their_mesh() -> None:
    tree, layout = {"w": jnp.ones((8, 8))}, ft.P("data")
    devices = jax.devices()
    plan = ft.plan(tree, layout, ft.make_mesh(data=8, devices=devices))
    assert facts_of(plan) == facts_of(ft.plan(tree, layout, ft.make_mesh(data=8, devices=devices)))
    for other in (
        ft.plan(tree, layout, ft.make_mesh(data=8, devices=devices[::-1])),
        ft.plan(tree, layout, {"data": 8, "model": 1}),
        ft.plan(tree, ft.on_host(layout), ft.make_mesh(data=8, devices=devices)),
        ft.plan(tree, ft.P(None, "data"), ft.make_mesh(data=8, devices=devices)),
    ):
        assert facts_of(other) != facts_of(plan)


def test_settings_are_those_of_now() -> None:
    before = settings()
    with jax.threefry_partitionable(False), jax.default_matmul_precision("float32"):
        lines = settings()
    assert settings() == before != lines
    assert "jax_threefry_partitionable = False" in lines
    assert "jax_default_matmul_precision = float32" in lines
    assert lines[0] == f"jax {jax.__version__}"
