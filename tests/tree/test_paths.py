"""Paths: plain keys, and a text that reads back as the same keys."""

import copy
import pickle
from typing import Any

import equinox as eqx
import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
from functree.tree.paths import Path
from tests.lib.trees import Keyless, Pair

TEXTS = {
    "blocks.3.attn.query": ("blocks", 3, "attn", "query"),
    'a."0"': ("a", "0"),
    "a.0": ("a", 0),
    '""': ("",),
    r'"say \"hi\""': ('say "hi"',),
    r'"back\\slash"': ("back\\slash",),
    r'"\u001f"': ("\x1f",),
    '"*"': ("*",),
    '"[1]"': ("[1]",),
    "größe.名": ("größe", "名"),
    "[True].[None].[1.5]": (True, None, 1.5),
    "[(1, 'a.]\"')]": ((1, 'a.]"'),),
    "[((1, 2), 3)]": (((1, 2), 3),),
    r"[b'\x00[']": (b"\x00[",),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_keys(text: str) -> None:
    path = Path(TEXTS[text])
    assert str(path) == text
    assert Path.parse(text) == path
    assert list(map(type, Path.parse(text))) == list(map(type, path))
    assert repr(path) == f"Path({text!r})"


ODD = ["b.c", "0", "_", "é", '"', "\\", "\n", "\x1f", "\x1e", "\ud800", "[", "]", "'", "*", "**"]
ATOMS = st.one_of(
    st.text() | st.sampled_from(ODD),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.binary(),
)
KEYS = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)


def exact(key: Any) -> Any:
    """Equal for equal values of equal types, inside tuples too."""
    return tuple(map(exact, key)) if isinstance(key, tuple) else (type(key), repr(key))


@given(st.lists(KEYS, max_size=5).map(Path))
def test_a_path_reads_back(path: Path) -> None:
    again = Path.parse(str(path))
    assert exact(tuple(again)) == exact(tuple(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a.", "cannot parse it from character 2"),
        ('a"b"', "cannot parse it from character 0"),
        ('"a', "cannot parse it from character 0"),
        ("a b", "'a b' is not an identifier; quote it (`\"a b\"`)"),
        ("**.w", "'**' is not an identifier; to match paths with a pattern, use a filter, as in"),
        ("a.{0-3}.b", "is not an identifier; write one of the paths that the braces abbreviate"),
        ("[open]", "[open] is not a Python literal"),
        ("[[1]]", "[[1]] is not a Python literal that can be a key"),
        (f"[{'-' * 10**4}1]", "is not a Python literal that can be a key"),
        (f"[{'9' * 5000}]", "is not a Python literal that can be a key"),
        ("9" * 5000, "is not an identifier"),
        ('"\\q"', "is not a path"),
    ],
)
def test_what_is_no_path(text: str, says: str) -> None:
    with pytest.raises(ft.RuleError) as error:
        Path.parse(text)
    assert repr(text) in str(error.value)
    assert says in str(error.value)


def test_jaxs_keys_become_plain() -> None:
    class M(eqx.Module):
        items: list[Any]
        pair: Pair
        own: Keyless

    tree = M([1, {"k.v": 3}], Pair(4, 5), Keyless(6))
    paths = [str(Path.of(keys)) for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    assert paths == ["items.0", 'items.1."k.v"', "pair.left", "pair.right", "own.0"]


def test_a_path_is_a_tuple_and_a_leaf() -> None:
    path = Path(("a", 0))
    assert path == ("a", 0) and hash(path) == hash(("a", 0))
    assert isinstance(path / "b", Path) and path / "b" == ("a", 0, "b")
    assert jax.tree.leaves({"x": path}) == [path]
    assert pickle.loads(pickle.dumps(path)) == path == copy.deepcopy(path)
