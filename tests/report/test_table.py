"""Numbers of bytes, paths and cells ─► text, in lines of a fixed width, measured in columns of a
terminal."""

from typing import Any

import pytest

import functree as ft
from functree.report.table import (
    WIDTH,
    Bytes,
    but_for_key,
    bytes_text,
    columns,
    common_path,
    common_unit,
    grouped,
    lines_text,
    paragraphs,
    pattern_of,
    row_lines,
    text_in_unit,
    width,
    wrapped,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1025, "1.0 KiB"), (1536, "1.5 KiB"),
     (2**20, "1 MiB"), (2**30 * 5, "5 GiB"), (2**30 + 2**29, "1.5 GiB"), (2**40 * 3, "3.0 TiB"),
     (2**52, "4096.0 TiB")],
)  # fmt: skip
def test_sizes(size: int, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("sizes", "unit", "texts"),
    [([], 0, []), ([5, 1023], 0, ["5 B", "1,023 B"]), ([1024, 1], 1, ["1 KiB", "0.000977 KiB"]),
     ([-(2**20), 2**19], 2, ["-1 MiB", "0.5 MiB"]), ([2**60], 4, ["1,048,576 TiB"])],
)  # fmt: skip
def test_sizes_in_one_unit(sizes: list[int], unit: int, texts: list[str]) -> None:
    assert common_unit(sizes) == unit
    assert [text_in_unit(size, unit) for size in sizes] == texts


def test_bytes_are_numbers_that_print_as_sizes() -> None:
    assert str(Bytes(1536)) == f"{Bytes(1536)}" == "1.5 KiB" and Bytes(1536) == 1536


def paths(*several: str) -> list[ft.Path]:
    return [ft.Path.parse(one) for one in several]


COMMON: dict[str, tuple[list[ft.Path], str]] = {
    "one": (paths("blocks.0.w"), "blocks.0.w"),
    "a run": (paths("b.0.w", "b.1.w", "b.2.w"), "b.{0-2}.w"),
    "single ones": (paths("b.1", "b.3", "b.5"), "b.{1,3,5}"),
    "in any order": (paths("b.10", "b.2", "b.9", "b.1"), "b.{1-2,9-10}"),
    "two indices": (paths("b.0.0", "b.0.1", "b.1.0", "b.1.1"), "b.{0-1}.{0-1}"),
    "one index of two": (paths("b.0.7.w", "b.1.7.w"), "b.{0-1}.7.w"),
    "quoted keys": ([ft.Path(("a.b", 0)), ft.Path(("a.b", 1))], '"a.b".{0-1}'),
    "names and indices": (paths("b.0.q", "b.1.q", "b.0.k", "b.1.k"), "b.{0-1}.{q,k}"),
    "no keys": ([ft.Path()], "(the array)"),
}


@pytest.mark.parametrize("case", COMMON)
def test_common_paths(case: str) -> None:
    several, text = COMMON[case]
    assert common_path(several) == text


# Some paths, other ones, and the position of a key ─► whether they differ in this key alone.
ALIKE: dict[str, tuple[list[ft.Path], list[ft.Path], int, bool]] = {
    "the last": (paths("b.0.q", "b.1.q"), paths("b.0.k", "b.1.k"), 1, True),
    "the last but one": (paths("a.q.w", "a.q.b"), paths("a.k.w", "a.k.b"), 2, True),
    "another key": (paths("a.q"), paths("b.q"), 1, False),
    "other layers": (paths("b.0.q"), paths("b.1.k"), 1, False),
    "fewer of them": (paths("a.q.w", "a.q.b"), paths("a.k.w"), 2, False),
    "longer ones": (paths("a.q"), paths("a.q.w"), 1, False),
}


@pytest.mark.parametrize("case", ALIKE)
def test_paths_that_differ_in_one_key(case: str) -> None:
    some, others, from_end, alike = ALIKE[case]
    assert (but_for_key(some, from_end) == but_for_key(others, from_end)) is alike


@pytest.mark.parametrize(("path", "from_end"), [("w", 2), ("", 1), ("b.0", 1), ("b.0.w", 2)])
def test_an_index_and_no_key_are_joined_with_nothing(path: str, from_end: int) -> None:
    assert but_for_key([ft.Path.parse(path) if path else ft.Path()], from_end) is None


def test_patterns_are_equal_for_other_indices() -> None:
    one, two, other, deeper = paths("b.0.w", "b.1.w", "b.0.v", "b.0.w.0")
    assert pattern_of(one) == pattern_of(two)
    assert len({pattern_of(one), pattern_of(other), pattern_of(deeper)}) == 3


def test_groups_are_in_the_order_of_their_first() -> None:
    values: Any = ["b1", "a1", "b2", "c1", "a2"]
    assert grouped(values, lambda value: value[0]) == [["b1", "b2"], ["a1", "a2"], ["c1"]]
    assert grouped([], len) == []


@pytest.mark.parametrize(
    ("text", "columns"), [("", 0), ("abc", 3), ("é", 1), ("模型", 4), ("e\u0301", 1), ("P('→')", 6)]
)
def test_the_width_of_a_text(text: str, columns: int) -> None:
    assert width(text) == columns


@pytest.mark.parametrize(
    ("text", "most", "lines"),
    [
        ("", 4, [""]),
        ("abcd", 4, ["abcd"]),
        ("ab cd", 4, ["ab", "cd"]),
        ("abcdef", 4, ["abcd", "ef"]),
        ("模型模型", 4, ["模型", "模型"]),
        ("[b]x[/b] y", 8, ["[b]x[/b]", "y"]),
    ],
)
def test_texts_are_wrapped(text: str, most: int, lines: list[str]) -> None:
    assert [line.rstrip() for line in wrapped(text, most)] == lines


def test_numbers_are_aligned_to_the_right() -> None:
    assert columns(("w", "f32[2]"), (4, 8), "16 B") == ["w     f32[2]          16 B"]
    assert columns(("b", "i8[4096]"), (4, 8), "4 KiB") == ["b     i8[4096]       4 KiB"]


def test_wide_characters_take_two_columns() -> None:
    (wide,) = columns(("模型", "x"), (6, 2), "1 B")
    (plain,) = columns(("abcd", "x"), (6, 2), "1 B")
    assert width(wide) == width(plain) and wide.index("x") == plain.index("x") - 2


def test_a_cell_that_is_too_long_has_several_lines() -> None:
    lines = columns(("w", "one two"), (2, 4), "8 B")
    assert [line.split() for line in lines] == [["w", "one", "8", "B"], ["two"]]
    assert lines[1].startswith("    two")


def test_a_long_name_is_in_one_piece_above_its_row() -> None:
    name = "a_long_name.of_a_leaf"
    assert row_lines((name, "x"), (8, 2), "1 B", "") == [name, *columns(("", "x"), (8, 2), "1 B")]
    assert row_lines(("12345678", "x"), (8, 2), "1 B", "") == columns(
        ("12345678", "x"), (8, 2), "1 B"
    )
    longer = "x" * (WIDTH + 1)
    assert row_lines((longer, ""), (8, 2), "", "")[:2] == ["x" * WIDTH, "x"]


def test_details_are_below_their_row() -> None:
    assert row_lines(("w", "x"), (4, 2), "1 B", "why it is so")[1:] == ["    why it is so"]
    lines = row_lines(("w", "x"), (4, 2), "1 B", "word " * 40)
    assert len(lines) == 4 and all(line.startswith("    word") for line in lines[1:])
    assert max(map(width, lines)) <= WIDTH


def test_paragraphs_and_the_ends_of_lines() -> None:
    assert paragraphs(["a", "b " * 60]) == ["a", *wrapped("b " * 60, WIDTH)]
    assert lines_text(["a  ", "", "  b "]) == "a\n\n  b"
