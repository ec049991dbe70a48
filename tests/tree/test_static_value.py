"""`StaticValue`: static values by type and value."""

import copy
import dataclasses
from decimal import Decimal
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
from functree.tree.skeleton.static_value import StaticValue, is_hashable, same_value


class Point(NamedTuple):
    x: Any
    y: Any = 0


class Other(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True)
class Config:
    size: Any
    note: Any = dataclasses.field(default="", compare=False)


@dataclasses.dataclass
class Changeable:
    """It has no hash, since it can be changed."""

    size: Any


@dataclasses.dataclass(eq=False)
class ByIdentity:
    size: Any


@dataclasses.dataclass(frozen=True)
class Lenient:
    """It is compared by an `==` of its own, which does not read the field."""

    note: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lenient)

    def __hash__(self) -> int:
        return 0


@jax.tree_util.register_pytree_node_class
class Aux:
    """A node with static data of any kind."""

    def __init__(self, child: Any, data: Any):
        self.child, self.data = child, data

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.child,), self.data

    @classmethod
    def tree_unflatten(cls, data: Any, children: Any) -> "Aux":
        return cls(*children, data)


NAN = float("nan")
VALUES: list[Any] = [
    0, False, 0.0, -0.0, 0j, -0j, 1, True, 1.0, 1 + 0j, NAN, "1", b"1", None, ..., int, bool,
    (), (1,), (True,), (1.0,), ((1,),), ((True,),), (0.0,), (-0.0,), (NAN,), frozenset(), frozenset([1]),
    frozenset([True]), frozenset([(1,)]), frozenset([(1.0,)]), Point(1), Point(True), Other(1), (1, 0),
    Point((1,)), Point((True,)),
    Config(1), Config(True), Config((1,)), Config((1.0,)), ByIdentity(1), ByIdentity(1), jnp.sin, jnp.dtype("int8"),
    np.zeros(2, jax.dtypes.float0), np.zeros(3, jax.dtypes.float0), np.zeros((2, 1), jax.dtypes.float0),
    ft.Axes("a"), ft.P("a"), ft.P("b"), jax.tree.structure({1: 0}), jax.tree.structure({True: 0}),
    jax.tree.structure([{1: 0}]), jax.tree.structure([{1.0: 0}]),
    np.float32(0), np.float32(-0.0), np.float64(0), np.float64(-0.0), np.float64("nan"), np.int32(0), np.bool_(False),
    Decimal("0"), Decimal("-0"), Decimal("0.0"), Point(NAN, 1), Config(NAN),
    jax.tree.structure(Aux(None, {"n": 1})), jax.tree.structure(Aux(None, {"n": True})),
    jax.tree.structure(Aux(None, {1})), jax.tree.structure(Aux(None, {True})),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(VALUES)), ids=lambda i: f"{i} {type(VALUES[i]).__name__}")
def test_no_other_is_equal(i: int):
    for j, other in enumerate(VALUES):
        assert (StaticValue(VALUES[i]) == StaticValue(other)) == (i == j), (VALUES[i], other)
        assert StaticValue(VALUES[i]).differs(other) == (i != j)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NAN,
        lambda: float("nan"),
        lambda: (float("nan"), -0.0, 1),
        lambda: (np.float32("nan"), np.float64("nan"), np.float32(-0.0), Decimal("NaN")),
        lambda: frozenset([float("nan"), (1, True)]),
        lambda: Point("a", (1.0,)),
        lambda: Config((1, "a"), note=object()),
        lambda: Config(float("nan")),
        lambda: Lenient(object()),
        lambda: (Point(float("nan"), Config((float("nan"),))),),
        lambda: jax.tree.structure(Aux(None, {"n": float("nan"), "m": [1]})),
        lambda: jax.tree.structure([{1: 0}, None]),
        lambda: ft.Axes("a", None),
        lambda: "a" * 1000,
        lambda: np.zeros((2, 3), jax.dtypes.float0),
        lambda: (np.zeros(2, jax.dtypes.float0), 1),
    ],
)
def test_what_is_made_twice_is_equal(make: Any):
    one, other = make(), make()
    assert StaticValue(one) == StaticValue(other) and hash(StaticValue(one)) == hash(
        StaticValue(other)
    )
    assert not StaticValue(one).differs(other)
    assert repr(StaticValue("a")) == "'a'" and StaticValue(1) != 1


def test_a_value_is_equal_to_itself_without_being_asked():
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("asked")

        __hash__ = object.__hash__

    odd = Odd()
    assert (
        StaticValue(odd) == StaticValue(odd)
        and not StaticValue(odd).differs(odd)
        and StaticValue(odd).differs(3)
    )


@pytest.mark.parametrize(
    "value", [[], {}, set(), ([],), Point([]), Config([]), bytearray()], ids=repr
)
def test_what_has_no_hash_has_that_of_its_type(value: Any):
    assert hash(StaticValue(value)) == hash(StaticValue(copy.deepcopy(value)))
    assert StaticValue(value) == StaticValue(copy.deepcopy(value))
    assert not is_hashable(value)


SCALARS = st.sampled_from([0, False, 0.0, -0.0, 1, True, 1.0, 1j, "a", None, NAN])
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Config, inner),
    ),
    max_leaves=8,
)


def text(value: Any) -> Any:
    """A value as text, so that type and value tell."""
    if type(value) is frozenset:
        return f"frozenset({sorted(map(text, value))})"
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(text, value))})"
    return f"Config({text(value.size)})" if isinstance(value, Config) else repr(value)


@given(NESTED, NESTED)
def test_equal_if_and_only_if_they_read_the_same(one: Any, other: Any):
    assert (StaticValue(one) == StaticValue(other)) == (text(one) == text(other))
    assert StaticValue(one).differs(other) == (StaticValue(one) != StaticValue(other))
    if StaticValue(one) == StaticValue(other):
        assert hash(StaticValue(one)) == hash(StaticValue(other))


class Refuses:
    """Equal to nothing that it can be compared with."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("must not be compared")

    __hash__ = object.__hash__


def test_values_are_compared_only_if_their_hashes_are_equal():
    """The static values of two functions meet where generated code is shared; one must not break
    the other."""
    one, other = Refuses(), Refuses()
    assert same_value(one, one) and not same_value(one, other) and StaticValue(one).differs(other)
    assert not same_value((1, one), (1, other)) and StaticValue(one) != StaticValue(other)
    for value in (one, other, one):
        held = [Held(jnp.ones(20), value) for _ in range(20)]
        f = ft.jit(lambda x, held=held: (jax.tree.map(lambda leaf: leaf * 2, held), x))
        for _ in range(4):
            assert f(jnp.ones(2))[0][3].static is value


X = jnp.ones(2)


class Held(eqx.Module):
    x: Any
    static: Any = eqx.field(static=True)


KEY = jax.random.key(0)
ARRAYS: dict[str, tuple[Any, Any, bool]] = {
    "values": (np.arange(3), np.arange(3), True),
    "other values": (np.arange(3), np.arange(1, 4), False),
    "nan": (np.array([np.nan]), np.array([np.nan]), True),
    "zeros of two signs": (np.array([0.0]), np.array([-0.0]), False),
    "dtypes": (np.ones(2, np.float32), np.ones(2, np.int32), False),
    "shapes": (np.ones((2, 1)), np.ones((1, 2)), False),
    "objects": (np.array([None, "a"], object), np.array([None, "a"], object), True),
    "other objects": (np.array([1, "a"], object), np.array([True, "a"], object), False),
    "of jax": (jnp.arange(3), jnp.arange(3), True),
    "others of jax": (jnp.arange(3), jnp.arange(1, 4), False),
    "of jax and numpy": (jnp.arange(3), np.arange(3, dtype=np.int32), False),
    "keys": (KEY, jax.random.key(0), True),
    "other keys": (KEY, jax.random.key(1), False),
    "in a list": ([{"a": np.arange(3)}], [{"a": np.arange(3)}], True),
    "in a config": (Changeable(np.arange(3)), Changeable(np.arange(3)), True),
    "in another config": (Changeable(np.arange(3)), Changeable(np.arange(1, 4)), False),
    "masked": (np.ma.array([1], mask=[True]), np.ma.array([1], mask=[False]), False),
}


@pytest.mark.parametrize(("one", "other", "equal"), ARRAYS.values(), ids=ARRAYS)
def test_arrays_are_compared_by_their_values(one: Any, other: Any, equal: bool):
    assert same_value(one, other) is equal and same_value(one, one)
    if equal:
        assert hash(StaticValue(one)) == hash(StaticValue(other))


def test_a_traced_array_is_only_itself():
    def f(x: Any, y: Any) -> Any:
        assert same_value(x, x) and not same_value(x, y) and not same_value(X, y)
        return x

    jax.eval_shape(f, X, X)


class Raises:
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")


def test_a_comparison_that_raises():
    with pytest.raises(ft.FunctreeError) as caught:
        same_value([Raises()], [Raises()])
    for fragment in (
        "static data of class Raises cannot be compared",
        "its `==` raises ValueError: the truth value is ambiguous",
        "give it an `__eq__` that returns True or False, and a `__hash__`",
    ):
        assert fragment in str(caught.value)


class ByTheRemedy:
    def __init__(self, values: np.ndarray):
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByTheRemedy) and bool(np.array_equal(self.values, other.values))

    def __hash__(self) -> int:
        return hash(self.values.tobytes())


def test_the_remedy_for_a_comparison_that_raises():
    one, same, other = (ByTheRemedy(np.full(3, x)) for x in (1, 1, 2))
    assert same_value([one], [same]) and not same_value([one], [other])
    assert StaticValue(one) == StaticValue(same) and hash(StaticValue(one)) == hash(
        StaticValue(same)
    )
