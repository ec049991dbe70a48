"""Leaves that are no arrays: what cannot be saved is an error by path; what is static is warned
about where it differs."""

import datetime
import decimal
import enum
import functools
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import functree as ft
from functree.io.checkpoints.static_leaves import static_texts, unsaveable
from tests.lib.checks import raises


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


@dataclass(eq=False)
class Endless:
    again: Any = None


def endless() -> Endless:
    """A value that contains itself."""
    value = Endless()
    value.again = value
    return value


JAX_LACKS = "which JAX does not have"
UNSAVEABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "a reference": (lambda: jax.new_ref(jnp.ones(3)), "has values that can change"),
    "dates": (lambda: np.array(["2020-01-01"], "M8[D]"), f"has the dtype datetime64[D], {JAX_LACKS}"),
    "a date": (lambda: np.datetime64("2020-01-01"), JAX_LACKS),
    "durations": (lambda: np.array([1], "m8[s]"), JAX_LACKS),
    "texts": (lambda: np.array(["a"]), f"has the dtype <U1, {JAX_LACKS}"),
    "texts of any length": (lambda: np.array(["a"], np.dtypes.StringDType()), JAX_LACKS),
    "bytes": (lambda: np.array([b"a"]), JAX_LACKS),
    "objects": (lambda: np.array([None, 1], object), f"has the dtype object, {JAX_LACKS}"),
    "records": (lambda: np.zeros(2, [("a", "f4")]), JAX_LACKS),
    "a record": (lambda: np.zeros(2, [("a", "f4")])[0], JAX_LACKS),
    "bytes without a meaning": (lambda: np.zeros(2, "V4"), JAX_LACKS),
    "long floats": (lambda: np.ones(2, np.longdouble), JAX_LACKS),
    "a long complex number": (lambda: np.clongdouble(1), JAX_LACKS),
    "another order of bytes": (lambda: np.ones(2, ">f4"), "has the dtype >f4, whose byte order JAX does not have"),
    "a mask": (lambda: np.ma.masked_array([1.0, 2.0], [0, 1]), "has a mask, which JAX arrays do not have"),
    "a mask of nothing": (lambda: np.ma.masked_array([1.0, 2.0]), "has a mask"),
    "masked": (lambda: np.ma.masked, "has a mask"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNSAVEABLE)
def test_what_cannot_be_saved(what: str, tmp_path: Path) -> None:
    make, why = UNSAVEABLE[what]
    with raises("1 leaf cannot be saved", "a.0", why, error=ft.CheckpointError):
        ft.save(tmp_path / "c", {"a": [make()], "w": np.ones(2)})
    with raises(why), ft.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, [make()])
    assert not list(tmp_path.iterdir())


def test_the_remedies(tmp_path: Path) -> None:
    ref, dates = jax.new_ref(jnp.ones(3)), np.array(["2020-01-01"], "M8[D]")
    masked = np.ma.masked_array([1.0, 2.0], [0, 1])
    x = np.arange(3).astype(">i4")
    tree = [ref[...], dates.view(np.int64), masked.data, masked.mask, jax.freeze(ref)]
    tree.append(x.astype(x.dtype.newbyteorder("=")))
    ft.save(tmp_path / "c", tree, meta=["a text"])
    found = ft.restore(tmp_path / "c", tree)
    assert (found[1].view("M8[D]") == dates).all() and found[3].tolist() == [False, True]
    assert found[5].tolist() == [0, 1, 2]


DTYPES = [
    "?",
    "i1",
    "u8",
    "f2",
    "f8",
    "c16",
    ml_dtypes.bfloat16,
    ml_dtypes.int4,
    ml_dtypes.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_that_jax_has(dtype: Any) -> None:
    assert not list(unsaveable([np.ones(2, dtype), np.ones(2, dtype)[0], "text", np.str_("text")]))


# A value, an equal one, another one; and how they are written.
STATIC: dict[str, tuple[Any, Any, Any, str]] = {
    "a number": (1, 1, 2, "1"),
    "a flag for a number": (1, 1, True, "1"),
    "a text": ("adam", "adam", "sgd", "'adam'"),
    "a text like an address": ("0xdeadbeef", "0xdeadbeef", "0xdeadbeee", "'0xdeadbeef'"),
    "bytes": (b"a", b"a", b"b", "b'a'"),
    "many bytes": (b"a" * 9999, b"a" * 9999, b"a" * 9998 + b"b", "sha256"),
    "a decimal": (decimal.Decimal("0.1"), decimal.Decimal("0.1"), decimal.Decimal("0.2"), "Decimal('0.1')"),
    "an element of an enum": (Level.LOW, Level(1), Level.HIGH, "Level.LOW"),
    "flags": (Bits.A | Bits.B, Bits.B | Bits.A, Bits.A, "Bits.A|B"),
    "a set": ({"b", "a"}, {"a", "b"}, {"a", "c"}, "set('a', 'b')"),
    "a frozen set": (frozenset("xyz"), frozenset("zyx"), frozenset("xy"), "frozenset('x', 'y', 'z')"),
    "a date": (datetime.date(2020, 1, 1), datetime.date(2020, 1, 1), datetime.date(2021, 1, 1), "2020, 1, 1"),
    "a uuid": (uuid.UUID(int=1), uuid.UUID(int=1), uuid.UUID(int=2), "UUID"),
    "a path": (Path("a"), Path("a"), Path("b"), "Path('a')"),
    "a dtype": (np.dtype("f4"), np.dtype("f4"), np.dtype("f8"), "dtype('float32')"),
    "a function": (jnp.tanh, jnp.tanh, jnp.sin, "tanh"),
    "a class": (dict, dict, list, "dict"),
    "a function with arguments": (
        functools.partial(max, key=abs), functools.partial(max, key=abs), functools.partial(max, key=len), "partial(max",
    ),
    "a data class": (Tokens(frozenset("ab")), Tokens(frozenset("ba")), Tokens(), "Tokens("),
    "a text of numpy": (np.str_("a"), np.str_("a"), np.str_("b"), "'a'"),
    "another type": (b"a", b"a", "a", "b'a'"),
}  # fmt: skip


@pytest.mark.parametrize("what", STATIC)
def test_what_is_static(what: str, tmp_path: Path) -> None:
    value, equal, other, text = STATIC[what]
    w = np.ones(2)
    ft.save(tmp_path / "c", {"w": w, "a": [value]})
    kept = static_texts({"w": w, "a": [value]})
    assert list(kept) == ["a.0"] and text in kept["a.0"] and len(kept["a.0"]) < 300
    assert ft.restore(tmp_path / "c", {"w": w, "a": [equal]})["a"][0] is equal
    with pytest.warns(
        ft.FunctreeWarning, match=r"are not restored, and come from `like`: `a.0` was "
    ) as caught:
        assert ft.restore(tmp_path / "c", {"w": w, "a": [other]})["a"][0] is other
    assert len(caught) == 1


NOT_IN_LIKE: dict[str, Any] = {"None": {"a": [None]}, "less": {"a": []}, "no such field": {}}


@pytest.mark.parametrize("what", NOT_IN_LIKE)
@pytest.mark.parametrize("value", [3, "adam", Level.LOW])
def test_a_static_leaf_that_like_lacks(value: Any, what: str, tmp_path: Path) -> None:
    w = np.ones(2)
    ft.save(tmp_path / "c", {"w": w, "a": [value]})
    with pytest.warns(
        ft.FunctreeWarning, match="`a.0` was .* and is not in `like`; make `like` as"
    ):
        ft.restore(tmp_path / "c", {"w": w, **NOT_IN_LIKE[what]})
    # As the text says.
    ft.save(tmp_path / "d", {"w": w}, meta={"a": 3})
    assert ft.restore(tmp_path / "d", {"w": w}) and ft.inspect(tmp_path / "d").meta == {"a": 3}


def test_a_text_is_not_told_to_be_an_array(tmp_path: Path) -> None:
    ft.save(tmp_path / "c", ["adam"])
    with pytest.warns(ft.FunctreeWarning, match="static leaves are not restored.* in `meta=`"):
        ft.restore(tmp_path / "c", ["sgd"])


@pytest.mark.parametrize("make", [Plain, Angry, endless, lambda: {Plain()}])
def test_what_has_only_an_address_is_not_compared(make: Callable[[], Any], tmp_path: Path) -> None:
    ft.save(tmp_path / "c", {"w": np.ones(2), "a": make()})
    ft.restore(tmp_path / "c", {"w": np.ones(2), "a": make()})


@pytest.mark.slow
def test_the_text_does_not_depend_on_the_process() -> None:
    """By the randomized hashes of texts, a set has another order in each."""
    code = (
        "from functree.io.checkpoints.static_leaves import static_texts\n"
        "print(static_texts([frozenset('abcdefgh'), {'x', 'y', ('z', frozenset('pqrst'))}]))"
    )
    texts: set[str] = set()
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        texts.add(run.stdout)
    assert len(texts) == 1
