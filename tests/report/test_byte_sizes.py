"""A number of bytes ─► its text; several ─► their texts in one unit."""

import pytest

from functree.report.table import Bytes, bytes_text, common_unit, text_in_unit


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
