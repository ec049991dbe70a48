"""`StaticValue`: leaves that are not arrays, by type and value."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from functree.errors import FunctreeError
from functree.tree.skeleton.static_value import StaticValue, equal, is_hashable, runs_once


@dataclasses.dataclass(frozen=True)
class Config:
    size: Any
    note: Any = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(eq=False)
class ByIdentity:
    size: Any


NAN = float("nan")
VALUES: list[Any] = [
    0, False, 0.0, -0.0, 0j, -0j, 1, True, 1.0, 1 + 0j, NAN, "1", b"1", None, ..., int, bool,
    (), (1,), (1, 0), frozenset(), frozenset([1]), Config(1), Config(2), ByIdentity(1), ByIdentity(1), jnp.sin,
    jnp.dtype("int8"), np.zeros(2, jax.dtypes.float0), np.zeros(3, jax.dtypes.float0), np.zeros((2, 1), jax.dtypes.float0),
    ft.Axes("a"), ft.P("a"), ft.P("b"), jax.tree.structure({1: 0}), jax.tree.structure([{1: 0}]),
    np.float32(0), np.float32(-0.0), np.float64(0), np.float64(-0.0), np.float64("nan"), np.int32(0), np.bool_(False),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(VALUES)), ids=lambda i: f"{i} {type(VALUES[i]).__name__}")
def test_no_other_is_equal(i: int):
    for j, other in enumerate(VALUES):
        assert (StaticValue(VALUES[i]) == StaticValue(other)) == (i == j), (VALUES[i], other)
        assert StaticValue(VALUES[i]).differs(other) == (i != j)


MADE_TWICE: dict[str, Any] = {
    "nan": lambda: float("nan"),
    "nan of numpy": lambda: np.float32("nan"),
    "a config": lambda: Config((1, "a"), note=object()),
    "a gradient of integers": lambda: np.zeros((2, 3), jax.dtypes.float0),
}


@pytest.mark.parametrize("make", MADE_TWICE.values(), ids=MADE_TWICE)
def test_what_is_made_twice_is_equal(make: Any):
    one, other = StaticValue(make()), StaticValue(make())
    assert one == other and hash(one) == hash(other) and is_hashable(one.value)


@pytest.mark.parametrize("value", [[], {}, set(), ([],), Config([]), bytearray()], ids=repr)
def test_what_has_no_hash_has_that_of_its_type(value: Any):
    one, other = StaticValue(value), StaticValue(copy.deepcopy(value))
    assert one == other and hash(one) == hash(other) and not is_hashable(value)


def test_arrays_that_jax_cannot_hold_are_compared_with_their_dtypes():
    day, seconds = np.array(["2026-01-01"], "M8[D]"), np.array(["2026-01-01"], "M8[s]")
    assert StaticValue(day) == StaticValue(day.copy()) and np.array_equal(day, seconds)
    assert StaticValue(day) != StaticValue(seconds)


class Odd:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("asked")

    __hash__ = object.__hash__


def test_a_value_is_equal_to_itself_without_being_asked():
    odd = Odd()
    assert StaticValue(odd) == StaticValue(odd) and equal(odd, odd)
    assert StaticValue(odd).differs(3)
    with pytest.raises(FunctreeError, match="class Odd cannot be compared: its `==` raises Runt"):
        StaticValue(odd).differs(Odd())


class Loader:
    def __iter__(self) -> Iterator[int]:
        return iter(())


RUNS_ONCE = {
    "generator": ((x for x in ()), True),
    "list": ([], False),
    "loader": (Loader(), False),
}


@pytest.mark.parametrize(("value", "once"), RUNS_ONCE.values(), ids=RUNS_ONCE)
def test_what_runs_once(value: Any, once: bool):
    assert runs_once(value) is once
