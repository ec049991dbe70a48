"""A number of bytes ─► its text: `1.5 MiB`; several ─► their texts in one unit."""

from collections.abc import Iterable

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Bytes(int):
    """A number of bytes, where others may be numbers of something else."""

    def __str__(self) -> str:
        return bytes_text(self)


def common_unit(sizes: Iterable[int]) -> int:
    """The index in `UNITS` of the unit of the largest of some sizes."""
    largest, unit = max(map(abs, sizes), default=0), 0
    while largest >= 1024 and unit < len(UNITS) - 1:
        largest /= 1024
        unit += 1
    return unit


def text_in_unit(size: int, unit: int) -> str:
    """A number of bytes in a unit, with at least three digits: `0.00391 MiB`.

    >>> (
    ...     text_in_unit(4096, 2),
    ...     text_in_unit(3 * 2**20, 2),
    ...     text_in_unit(5000, 0),
    ... )
    ('0.00391 MiB', '3 MiB', '5,000 B')
    """
    number = size / 1024**unit
    text = f"{number:.3g}"
    if abs(number) >= 100:
        text = f"{number:,.0f}"
    return f"{text} {UNITS[unit]}"


def bytes_text(size: int) -> str:
    """A number of bytes as text: `1.5 MiB`, and `2 MiB` if it is exactly that.

    >>> bytes_text(1023), bytes_text(1536), bytes_text(2**21)
    ('1023 B', '1.5 KiB', '2 MiB')
    """
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            digits = 0 if number.is_integer() else 1
            return f"{number:.{digits}f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
