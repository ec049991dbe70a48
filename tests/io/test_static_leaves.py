"""Leaves that are no arrays: what cannot be saved is an error by path; what is static is warned
about where it differs."""

import datetime
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functree as ft
from functree.io.checkpoints.contents import static_texts
from tests.lib.checks import raises, warns


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclass(frozen=True)
class Tokens:
    kept: frozenset[str] = field(default_factory=frozenset)


class Plain:
    """A value that has only an address."""


class Angry:
    def __repr__(self) -> str:
        raise RuntimeError("mine")


JAX_LACKS = "which JAX does not support"
UNSAVEABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "a reference": (lambda: jax.new_ref(jnp.ones(3)), "has values that can change"),
    "dates": (lambda: np.array(["2020-01-01"], "M8[D]"), f"has dtype datetime64[D], {JAX_LACKS}"),
    "texts": (lambda: np.array(["a"]), f"has dtype <U1, {JAX_LACKS}"),
    "objects": (lambda: np.array([None, 1], object), f"has dtype object, {JAX_LACKS}"),
    "a record": (lambda: np.zeros(2, [("a", "f4")])[0], JAX_LACKS),
    "another order of bytes": (lambda: np.ones(2, ">f4"), "has dtype >f4, whose byte order JAX does not support"),
    "a mask": (lambda: np.ma.masked_array([1.0, 2.0], [0, 1]), "is a masked array, which JAX does not support"),
    "masked": (lambda: np.ma.masked, "is a masked array"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNSAVEABLE)
def test_what_cannot_be_saved(what: str, tmp_path: Path) -> None:
    make, why = UNSAVEABLE[what]
    with raises("1 leaf cannot be saved", "a.0", why, error=ft.CheckpointError):
        ft.save(tmp_path / "c", {"a": [make()], "w": np.ones(2)})
    with raises(why), ft.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, [make()])
    assert not list(tmp_path.iterdir())


# A value, an equal one, another one; and how they are written.
STATIC: dict[str, tuple[Any, Any, Any, str]] = {
    "a flag for a number": (1, 1, True, "1"),
    "a text like an address": ("0xdeadbeef", "0xdeadbeef", "0xdeadbeee", "'0xdeadbeef'"),
    "many bytes": (b"a" * 9999, b"a" * 9999, b"a" * 9998 + b"b", "sha256"),
    "an element of an enum": (Level.LOW, Level(1), Level.HIGH, "Level.LOW"),
    "flags": (Bits.A | Bits.B, Bits.B | Bits.A, Bits.A, "Bits.A|B"),
    # In a table of eight places 0 and 8 meet, so the order of a set is that in which they came.
    "a set": ({8, 0}, {0, 8}, {0, 1}, "set(0, 8)"),
    "a date": (datetime.date(2020, 1, 1), datetime.date(2020, 1, 1), datetime.date(2021, 1, 1), "2020, 1, 1"),
    "a function": (jnp.tanh, jnp.tanh, jnp.sin, "tanh"),
    "a function with arguments": (
        functools.partial(max, key=abs), functools.partial(max, key=abs), functools.partial(max, key=len), "partial(max",
    ),
    "a data class": (Tokens(frozenset("ab")), Tokens(frozenset("ba")), Tokens(), "Tokens("),
}  # fmt: skip


@pytest.mark.parametrize("what", STATIC)
def test_what_is_static(what: str, tmp_path: Path) -> None:
    value, equal, other, text = STATIC[what]
    w = np.ones(2)
    ft.save(tmp_path / "c", {"w": w, "a": [value]})
    kept = static_texts({"w": w, "a": [value]})
    assert list(kept) == ["a.0"] and text in kept["a.0"] and len(kept["a.0"]) < 300
    assert ft.restore(tmp_path / "c", {"w": w, "a": [equal]})["a"][0] is equal
    with warns("are not restored, but come from `like`: `a.0` was ") as caught:
        assert ft.restore(tmp_path / "c", {"w": w, "a": [other]})["a"][0] is other
    assert len(caught) == 1


LIKES: dict[str, Any] = {"None": {"a": [None]}, "less": {"a": []}, "no such field": {}}


@pytest.mark.parametrize("what", LIKES)
def test_a_static_leaf_that_like_lacks(what: str, tmp_path: Path) -> None:
    w = np.ones(2)
    ft.save(tmp_path / "c", {"w": w, "a": [Level.LOW]})
    with warns("`a.0` was saved as <Level.LOW: 1>, but is missing from `like`"):
        ft.restore(tmp_path / "c", {"w": w, **LIKES[what]})


def test_what_a_warning_says_to_do(tmp_path: Path) -> None:
    ft.save(tmp_path / "c", {"w": np.ones(2), "step": 17, "name": "adam"})
    with pytest.warns(ft.FunctreeWarning) as caught:
        ft.restore(tmp_path / "c", {"w": np.ones(2), "step": 0, "name": "sgd"})
    assert [str(one.message) for one in caught] == [
        "static leaves are not restored, but come from `like`: `name` was saved as 'adam', but is 'sgd' in `like`, "
        "`step` was saved as 17, but is 0 in `like`; build `like` in the same way as the saved tree, save numbers as "
        "arrays (`jnp.asarray(...)`), or save these values in `meta=`"
    ]


@pytest.mark.parametrize("make", [Plain, Angry, lambda: {Plain()}])
def test_what_has_only_an_address_is_not_compared(make: Callable[[], Any], tmp_path: Path) -> None:
    ft.save(tmp_path / "c", {"w": np.ones(2), "a": make()})
    ft.restore(tmp_path / "c", {"w": np.ones(2), "a": make()})
