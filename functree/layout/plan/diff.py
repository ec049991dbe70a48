"""Two plans ─► what differs between them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from functree.devices.specs import spec_text
from functree.layout.plan.row import Row, rows_by_path
from functree.report.byte_sizes import Bytes
from functree.report.diff import Change, Diff, changes
from functree.tree.arrays import array_text
from functree.tree.paths import Path


def plan_diff(
    before: Sequence[Row],
    after: Sequence[Row],
    sizes: tuple[Mapping[str, int], Mapping[str, int]],
    on_each_device: tuple[int, int],
) -> Diff:
    """What differs between the rows of two plans.

    Args:
        before: the rows of the first plan.
        after: the rows of the second.
        sizes: the sizes of their meshes.
        on_each_device: the bytes on each device of both.
    """
    total = Change(Path(), "on each device", *map(Bytes, on_each_device))
    return Diff(tuple(_changes(before, after, sizes)), (total,))


def _changes(
    before: Sequence[Row], after: Sequence[Row], sizes: tuple[Mapping[str, int], Mapping[str, int]]
) -> Iterator[Change]:
    if dict(sizes[0]) != dict(sizes[1]):
        yield Change(Path(), "mesh", dict(sizes[0]), dict(sizes[1]))
    old, new = rows_by_path(before), rows_by_path(after)
    yield from changes(
        old, new, lambda path: path, _properties, lambda path, row: ("array", _whole(row))
    )


def _whole(row: Row) -> str:
    return f"{array_text(row)} {_spec(row)}"


def _spec(row: Row) -> str:
    return "-" if row.spec is None else spec_text(row.spec)


def _properties(path: Path, row: Row) -> dict[str, Any]:
    return {
        "array": array_text(row),
        "axes": str(row.axes),
        "spec": _spec(row),
        "memory": row.memory_kind or "device",
        "bytes on each device": Bytes(row.bytes_per_device),
    }
