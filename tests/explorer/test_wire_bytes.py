"""What a device sends over the links, of literal ledgers."""

from typing import Any

import pytest

import functree as ft
from functree.compiled.collective import BytesByPath
from functree.explorer.links import wire_bytes


def ledger(*collectives: ft.Collective) -> ft.Ledger:
    memory = ft.Memory(BytesByPath({}), 0, 0, 0, 0)
    return ft.Ledger(collectives, memory, "cpu", {"data": 2, "model": 4})


def moved(kind: str, axes: Any, group: int | None, size: int, count: int | None = 1) -> Any:
    return ft.Collective(kind, axes, group, size, count, (), (), None, None, "op")


# Each of 800 bytes, in a group of four.
FACTORS = {
    "all-reduce": 1200,
    "all-gather": 600,
    "reduce-scatter": 2400,
    "all-to-all": 600,
    "ragged-all-to-all": 600,
    "collective-permute": 800,
}


@pytest.mark.parametrize("kind", FACTORS)
def test_each_kind(kind: str) -> None:
    assert wire_bytes(ledger(moved(kind, ("model",), 4, 800))) == ({"model": FACTORS[kind]}, 0)


def test_by_mesh_axis_largest_first() -> None:
    found, unknown = wire_bytes(
        ledger(
            moved("all-gather", ("data",), 2, 100, 3),
            moved("all-reduce", ("model",), 4, 400, 2),
            moved("all-gather", ("data", "model"), 8, 800),
            moved("all-gather", ("data",), 2, 100, None),  # in a loop of unknown length
            moved("all-reduce", None, None, 7),
            moved("all-reduce", (), 1, 9),
        )
    )
    assert found == {"model": 1200, ("data", "model"): 700, "data": 200} and unknown == 7
    assert list(found) == ["model", ("data", "model"), "data"]
