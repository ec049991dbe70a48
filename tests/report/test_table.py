"""Numbers of bytes, paths and cells ─► text, in lines of a fixed width."""

import pytest

import functree as ft
from functree.report.table import (
    WIDTH,
    bytes_text,
    columns,
    common_path,
    row_lines,
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
    "no keys": ([ft.Path()], "(the root)"),
}


@pytest.mark.parametrize("case", COMMON)
def test_common_paths(case: str) -> None:
    several, text = COMMON[case]
    assert common_path(several) == text


@pytest.mark.parametrize(
    ("text", "most", "lines"),
    [
        ("", 4, [""]),
        ("abcd", 4, ["abcd"]),
        ("ab cd", 4, ["ab", "cd"]),
        ("abcdef", 4, ["abcd", "ef"]),
        ("[b]x[/b] y", 8, ["[b]x[/b]", "y"]),
    ],
)
def test_texts_are_wrapped(text: str, most: int, lines: list[str]) -> None:
    assert [line.rstrip() for line in wrapped(text, most)] == lines


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
    assert max(map(len, lines)) <= WIDTH
