"""Texts of values: the same for equal ones in each process, and never an address."""

import copy
import enum
import functools
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functree as ft
from functree.processes.facts import configuration, facts_of, settings
from functree.processes.value_text import value_text
from tests.lib.meshes import MESH


class Plain:
    """`repr` shows the address alone."""

    def __init__(self, **values: Any):
        vars(self).update(values)

    def read(self) -> Any:
        return vars(self)


class Slots:
    __slots__ = ("a",)

    def __init__(self, a: Any):
        self.a = a


class Hashed(Plain):
    @functools.cached_property
    def known(self) -> int:
        return hash("x")  # another number in each process


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


class Unpickled:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def itself(value: Any) -> Any:
    own = Plain(value=value)
    vars(own)["itself"] = own
    return own


def with_hash() -> Hashed:
    made = Hashed(a=1)
    assert made.known
    return made


# In a table of eight places 0 and 8 meet, so the order of a set is that in which they came.
ONE, OTHER = {0, 8}, {8, 0}

# Two values that are equal.
EQUAL: dict[str, tuple[Any, Any]] = {
    "sets": (ONE, OTHER),
    "frozensets": (frozenset([0, 8]), frozenset([8, 0])),
    "sets of texts": (set("abcdefgh"), set("hgfedcba")),
    "sets in sets": ({frozenset([0, 8])}, {frozenset([8, 0])}),
    "sets in tuples": ((1, ONE), (1, OTHER)),
    "sets in objects": (Plain(a=ONE), Plain(a=OTHER)),
    "sets in objects with slots": (Slots(ONE), Slots(OTHER)),
    "sets in dataclasses": (Frozen(frozenset(ONE)), Frozen(frozenset(OTHER))),
    "sets in named tuples": (Pair(ONE, 1), Pair(OTHER, 1)),
    "sets in partials": (functools.partial(max, ONE), functools.partial(max, OTHER)),
    "sets that a method is of": (Plain(a=ONE).read, Plain(a=OTHER).read),
    "keys that are sets": ({frozenset([0, 8]): 1}, {frozenset([8, 0]): 1}),
    "keys without an order": ({1: 1, "a": 2}, {"a": 2, 1: 1}),
    "keys in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "mappings": (MappingProxyType({"a": ONE}), MappingProxyType({"a": OTHER})),
    "views": ({0: 1, 8: 1}.keys(), {8: 1, 0: 1}.keys()),
    "objects": (object(), object()),
    "objects in themselves": (itself(1), itself(1)),
    "objects that know their hash": (with_hash(), Hashed(a=1)),
    "objects without contents": (threading.Lock(), threading.Lock()),
    "objects that refuse": (Unpickled(), Unpickled()),
    "functions": (lambda: 1, lambda: 1),
    "optimizers": (optax.adam(1e-3), optax.adam(1e-3)),
    "arrays of objects": (np.array([ONE], object), np.array([OTHER], object)),
    "arrays": (jnp.arange(9), np.arange(9, dtype=np.int32)),
    "layouts": (ft.AxisRules({"a": "data"}), ft.AxisRules({"a": "data"})),
}  # fmt: skip

# Two values that differ.
UNEQUAL: dict[str, tuple[Any, Any]] = {
    "types": (1, 1.0),
    "bools": (1, True),
    "zeros": (0.0, -0.0),
    "containers": ((1, 2), [1, 2]),
    "empty containers": ((), []),
    "classes": (Frozen(1), Pair(1, None)),
    "sets": ({1, 2}, {1, 3}),
    "kinds of sets": ({1}, frozenset({1})),
    "objects": (Plain(a=1), Plain(a=2)),
    "names": (Plain(a=1), Plain(b=1)),
    "objects with slots": (Slots(1), Slots(2)),
    "objects that know their hash": (Hashed(a=1), Hashed(a=2)),
    "fields that are not in repr": (Frozen(1, 2), Frozen(1, 3)),
    "objects in themselves": (itself(1), itself(2)),
    "members": (Color.RED, Color.BLUE),
    "namespaces": (SimpleNamespace(a=1), SimpleNamespace(a=2)),
    "patterns": (re.compile("a"), re.compile("b")),
    "ordered dicts": (OrderedDict(a=1), OrderedDict(a=2)),
    "functions": (jnp.sin, jnp.cos),
    "modules": (np, jnp),
    "dtypes": (np.dtype("int32"), np.dtype("int64")),
    "specs": (ft.P("data"), ft.P(None)),
    "treedefs": (jax.tree.structure([1]), jax.tree.structure((1,))),
    "random states": (np.random.default_rng(0), np.random.default_rng(1)),
    "arrays": (np.arange(9), np.arange(1, 10)),
    "dtypes of arrays": (np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int16)),
    "long texts": ("a" * 5000, "a" * 4999 + "b"),
    "arrays in objects": (Plain(a=np.arange(99)), Plain(a=np.arange(1, 100))),
    "layouts": (ft.FSDP("data"), ft.FSDP("model")),
    "filters": (ft.glob("a.**"), ft.glob("b.**")),
    "meshes": (MESH, ft.make_mesh(data=8)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_have_equal_texts(name: str) -> None:
    one, other = EQUAL[name]
    assert value_text(one) == value_text(other)
    assert facts_of({"value": one}) == facts_of({"value": other})
    assert not re.search(r" at 0x|\n", value_text(one))


@pytest.mark.parametrize("name", UNEQUAL)
def test_other_values_have_other_texts(name: str) -> None:
    one, other = UNEQUAL[name]
    assert value_text(one) != value_text(other)
    assert facts_of({"value": one}) != facts_of({"value": other})
    assert len(value_text(one)) < 3000


def test_trees_have_a_line_for_each_leaf() -> None:
    tree = {"b": [1, None, "x\ny"], "a": {frozenset("x"): 1}}
    assert facts_of(tree) == [
        "dict",
        "a: {frozenset{'x'}: 1}",
        "b: list",
        "b.0: 1",
        "b.1: None",
        r"b.2: 'x\ny'",
    ]


@pytest.mark.parametrize("children", [1, 2])
def test_values_that_are_too_large_have_the_name_of_their_class(children: int) -> None:
    """Nested deeply, or with so many ways to one object that writing them would not end."""
    deep: Any = Plain()
    for _ in range([10_000, 60][children - 1]):
        deep = Plain(deep=[deep] * children)
    assert value_text(deep) == f"{__name__}.Plain"


class Static(eqx.Module):
    value: Any
    name: str = eqx.field(static=True, default="")


# Trees with the same leaves.
TREES: dict[str, tuple[Any, Any]] = {
    "static fields": (Static(1, "a"), Static(1, "b")),
    "static sets": (Static(1, cast(str, {"a"})), Static(1, cast(str, {"b"}))),
    "containers": ([1, 2], (1, 2)),
    "empty": ({"a": [1], "b": []}, {"a": [1]}),
    "None": ({"a": [1], "b": None}, {"a": [1]}),
    "packed": (ft.pack(Static(jnp.ones(3), "a")), ft.pack(Static(jnp.ones(3), "b"))),
    "registered": (jax.tree_util.Partial(max, 1), jax.tree_util.Partial(min, 1)),
}


@pytest.mark.parametrize("name", TREES)
def test_the_structure_of_trees_counts(name: str) -> None:
    one, other = TREES[name]
    assert facts_of(one) != facts_of(other)
    assert facts_of(one) == facts_of(copy.deepcopy(one))


def test_settings_are_those_of_now() -> None:
    before = configuration(), settings()
    with jax.threefry_partitionable(False), jax.default_matmul_precision("float32"):
        now, lines = configuration(), settings()
    assert (configuration(), settings()) == before and now != before[0]
    assert "jax_threefry_partitionable = False" in lines
    assert "jax_default_matmul_precision = float32" in lines
    assert lines[0] == f"jax {jax.__version__}"
