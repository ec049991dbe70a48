"""Cells of text ─► lines of a fixed width, measured in columns of a terminal."""

import pytest

from functree.report.table import (
    WIDTH,
    columns,
    lines_text,
    paragraphs,
    row_lines,
    width,
    wrapped,
)


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
