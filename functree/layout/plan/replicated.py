"""The rows of a plan ─► what is replicated, and what it costs."""

from collections.abc import Mapping, Sequence

from functree.devices.specs import named_axes
from functree.errors import count
from functree.layout.plan.fold import fold
from functree.layout.plan.row import Row
from functree.report.byte_sizes import bytes_text
from functree.report.path_groups import pattern_of


def saved_by_sharding(row: Row) -> int:
    """The bytes that one device would not have if each byte of an array were on one device."""
    return row.bytes_per_device - row.bytes_per_device // max(row.copies, 1)


def replicated(rows: Sequence[Row], sizes: Mapping[str, int]) -> list[str]:
    """A line for each combination of mesh axes over which arrays are replicated.

    Single numbers are left out, since they cannot be sharded.

    Args:
        rows: the rows of a plan.
        sizes: the sizes of its mesh axes.
    """
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.spec is None or row.mesh is not None or not row.shape:
            continue
        used = named_axes(row.spec)
        axes = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in used)
        if axes:
            found.setdefault(axes, []).append(row)
    texts = {axes: (_saved(alike), _text(axes, alike)) for axes, alike in found.items()}
    # What costs most is first.
    return [text for _, text in sorted(texts.values(), key=lambda one: -one[0])]


def _saved(rows: Sequence[Row]) -> int:
    return sum(map(saved_by_sharding, rows))


def _text(axes: Sequence[str], rows: Sequence[Row]) -> str:
    size = bytes_text(sum(row.bytes_per_device for row in rows))
    one = max(rows, key=lambda row: row.bytes_per_device)
    pattern = pattern_of(one.path)
    # Its name has the indices of all layers.
    largest, *_ = fold([row for row in rows if pattern_of(row.path) == pattern])
    name = f", the largest is {largest.path}" if len(rows) > 1 else f": {largest.path}"
    return (
        f"replicated over {', '.join(axes)}: {count(len(rows), 'array')}, {size} on each device, "
        f"{bytes_text(_saved(rows))} less if sharded{name}"
    )
