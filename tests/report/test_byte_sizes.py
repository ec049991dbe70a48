"""A number of bytes ─► its text."""

import pytest

from functree.report.byte_sizes import bytes_text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1025, "1.0 KiB"), (1536, "1.5 KiB"),
     (2**20, "1 MiB"), (2**30 * 5, "5 GiB"), (2**30 + 2**29, "1.5 GiB"), (2**40 * 3, "3.0 TiB"),
     (2**52, "4096.0 TiB")],
)  # fmt: skip
def test_sizes(size: int, text: str) -> None:
    assert bytes_text(size) == text
