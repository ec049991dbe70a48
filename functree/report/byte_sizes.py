"""A number of bytes ─► its text: `1.5 MiB`."""


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
