"""Globs over the parts of a path, against a matcher over tuples."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import functree as ft
from functree.tree.globs import (
    glob_pattern,
    literal_text,
    match_text,
    meant_glob,
)
from functree.tree.paths import Path, part_text
from tests.lib.patterns import KEYS, PARTS, written


def matches(pattern: str, *keys: Any) -> bool:
    return bool(glob_pattern(pattern).fullmatch(match_text(Path(keys))))


# What the oracle below does not draw, or hardly.
MATCHES = [
    ("", (), True), ("", ("a",), False), ("*", (), False), ("*", ("",), True), ("*", (3,), True),
    ("*", (None,), True), ("*a*", ((1, "a"),), True),
    ("*.*", ("a.b",), False), ("a_b", ("a.b",), False),
    ("*n", ("\n",), False),
    ("a*", ('a"b',), True), ("*_proj", ("q_proj",), True), ("*_proj", ("proj",), False),
    ("a*b*c", ("axxbyyc",), True), ("a*b*c", ("acb",), False),
    ("blocks.*.attn.query", ("blocks", 3, "attn", "query"), True),
    ("blocks.*.attn.query", ("blocks", 3, 4, "attn", "query"), False),
    ("blocks.1*.w", ("blocks", 12, "w"), True), ("blocks.1*.w", ("blocks", "12", "w"), True),
    ("blocks.1*.w", ("blocks", 2, "w"), False), ("1*", (1.5,), False), ("*1", (11,), True),
    ("**", (), True), ("**.**", (), True), ("**", ("a", 0, None), True),
    ("**.bias", ("bias",), True), ("**.bias", ("a", "xbias"), False),
    ("**.mlp.**", ("a", "mlp", "b", "c"), True), ("**.mlp.**", ("a", "mlp2", "b"), False),
    ("a.**.b", ("a", "b"), True), ("a.**.b", ("a", 1), False), ("**.*", (), False),
    ("0", ("0",), False), ('"0"', ("0",), True), ('"0"', (0,), False), ("-1", (-1,), True),
    ('"*"', ("*",), True), ('"*"', ("a",), False), ('"**"', ("a", "b"), False),
    ('a."b.c"', ("a", "b.c"), True), ('a."b.c"', ("a", "b", "c"), False), (r'"\n"', ("\n",), True),
    ("[True]", (True,), True), ("[True]", (1,), False), ("1", (True,), False),
    ("[None].**", (None, "x"), True), ("[(1, 2)].b", ((1, 2), "b"), True),
    ('**."w?"', ("a", "w?"), True), ('"w[qkv]".*', ("w[qkv]", 0), True),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "keys", "expected"), MATCHES)
def test_matches(pattern: str, keys: tuple[Any, ...], expected: bool) -> None:
    assert matches(pattern, *keys) is expected


# What `fnmatch` or a shell would read.
OF_SHELLS = [
    "**.attn.w[qkv]", "?", "**.w?*", "**.[!b]*", "blocks.[^0].w", "blocks.l[0-9][0-9].w", '"a.b?"."c[d]".w?',
]  # fmt: skip


@pytest.mark.parametrize("wildcards", OF_SHELLS)
def test_wildcards_of_shells_are_refused(wildcards: str) -> None:
    with pytest.raises(ft.RuleError):
        glob_pattern(wildcards)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "a.**b",
            "glob 'a.**b': cannot parse '**b': write `*` for any text within one key, write `**`",
        ),
        ("***", "cannot parse '***': write `*` for any text"),
        ("a-*", "quote each key that is not an identifier"),
        ("a*b c", "quote each key that is not an identifier"),
        ("b.{q,k}", "'{q,k}' is not an identifier; write one of the paths that the braces"),
        ('*"x"', "cannot parse it from character 0"),
        ("blocks[3].w", "cannot parse it from character 0; separate keys with single dots"),
        ('m["w?"]', "cannot parse it from character 0"),
        ('"w?".a b', "is not an identifier; quote it"),
        ("[<Color.RED: 1>].w", "is not a Python literal that can be a key"),
    ],
)
def test_what_is_no_glob(pattern: str, message: str) -> None:
    with pytest.raises(ft.RuleError, match=re.escape(message)):
        ft.glob(pattern)


# The oracle: parts against keys, in plain Python.


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def part_fits(part: tuple[str, Any], key: Any) -> bool:
    kind, value = part
    if kind == "key":
        return same(value, key)
    if value == "*":
        return True
    *pieces, last = value.split("*")
    text = key if type(key) is str else part_text(key)
    if (
        len(text) < len(pieces[0]) + len(last)
        or not text.startswith(pieces[0])
        or not text.endswith(last)
    ):
        return False
    return all(piece in text[len(pieces[0]) : len(text) - len(last)] for piece in pieces[1:])


def oracle(parts: list[tuple[str, Any]], keys: tuple[Any, ...]) -> bool:
    if not parts:
        return not keys
    if parts[0][0] == "**":
        return any(oracle(parts[1:], keys[i:]) for i in range(len(keys) + 1))
    return bool(keys) and part_fits(parts[0], keys[0]) and oracle(parts[1:], keys[1:])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[str, Any]], tuple[Any, ...]]:
    """A pattern and a path, often one made to fit it."""
    parts = draw(st.lists(PARTS, max_size=4))
    if draw(st.booleans()):
        return parts, tuple(draw(st.lists(KEYS, max_size=5)))
    keys: list[Any] = []
    for kind, value in parts:
        if kind == "**":
            keys += draw(st.lists(KEYS, max_size=2))
        else:
            keys.append(value if kind == "key" else draw(KEYS | st.just(value.replace("*", "z"))))
    return parts, tuple(keys)


# Paths with keys that are no text, a glob that matches none ─► the suggestion.
MEANT = [
    ([("blocks", 1001, "w")], "blocks.1000.w", "blocks.*.w"),
    ([(1.5, "w"), ("layer", 1.5, "w")], "laeyr.w", "layer.*.w"),
    ([(None, "weight")], "weihgt", "**.weight"),
    ([("layer", None)], "laeyr", "layer.**"),
]


@pytest.mark.parametrize(("paths", "written", "meant"), MEANT)
def test_what_is_meant_beside_keys_that_are_no_text(
    paths: list[tuple[Any, ...]], written: str, meant: str
) -> None:
    assert meant_glob(written, map(Path, paths)) == f"; did you mean `{meant}`?"


@given(cases())
def test_a_glob_is_a_match_of_parts(case: tuple[list[tuple[str, Any]], tuple[Any, ...]]) -> None:
    parts, keys = case
    assert matches(written(parts), *keys) is oracle(parts, keys)


@given(st.lists(KEYS, max_size=4).map(Path))
def test_a_path_is_a_glob_of_itself_alone(path: Path) -> None:
    assert literal_text(str(path)) == match_text(path)
    assert matches(str(path), *path)
    assert not matches(str(path), *path, "more")


@given(st.lists(KEYS, max_size=4), st.lists(KEYS, max_size=4))
def test_no_two_paths_look_alike(one: list[Any], other: list[Any]) -> None:
    assert (match_text(Path(one)) == match_text(Path(other))) == (
        str(Path(one)) == str(Path(other))
    )


def test_many_stars_take_no_time() -> None:
    pattern = ".".join(["**"] * 30 + ["x"])
    assert not matches(pattern, *["y"] * 60)
    assert glob_pattern(pattern) is glob_pattern(pattern)
