"""The bandwidth along mesh axes, on meshes of described devices: no compiler is asked; and what a device
sends over the links, of literal ledgers."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import functree as ft
from functree.compiled.collective import BytesByPath
from functree.devices.targets import Target
from functree.explorer.hardware import bandwidth, check_links, kind_of, wire_bytes
from tests.lib.checks import raises


def described(target: Target, sizes: dict[str, int]) -> Any:
    """A mesh of the devices of a target, in their order, as far as links are about it."""
    if target.platform == "cuda":
        devices = [SimpleNamespace(process_index=i // 8) for i in range(target.size)]
    else:
        places = itertools.product(*map(range, target.shape))
        cores = range(target.size // math.prod(target.shape))
        devices = [
            SimpleNamespace(coords=[*place, 0][:3], core_on_chip=core)
            for place in places
            for core in cores
        ]
    grid = np.empty(len(devices), object)
    grid[:] = devices
    return SimpleNamespace(axis_names=tuple(sizes), devices=grid.reshape(tuple(sizes.values())))


# Target, mesh, mesh axes, and how many links there are along them.
TPUS: dict[str, tuple[str, dict[str, int], tuple[str, ...], int]] = {
    "a line": ("tpu:v5e:2x4", {"x": 2, "y": 4}, ("y",), 1),
    "two dimensions": ("tpu:v5e:2x4", {"x": 8}, ("x",), 2),
    "a ring": ("tpu:v5e:16x16", {"x": 16, "y": 16}, ("y",), 2),
    "a part of a ring": ("tpu:v5e:16x16", {"x": 64, "y": 4}, ("y",), 1),
    "a torus": ("tpu:v6e:16x16", {"x": 256}, ("x",), 4),
    "two mesh axes": ("tpu:v6e:16x16", {"x": 16, "y": 16}, ("x", "y"), 4),
    "a dimension of a ring and one of a line": ("tpu:v6e:8x16", {"x": 128}, ("x",), 3),
    "no cube": ("tpu:v5p:2x2x4", {"x": 4, "y": 4}, ("y",), 1),
    "a cube": ("tpu:v5p:4x4x8", {"x": 16, "y": 8}, ("y",), 2),
    "three dimensions": ("tpu:v5p:4x4x4", {"x": 64}, ("x",), 6),
    "the two devices of a chip": ("tpu:tpu7x:2x2x1", {"x": 4, "y": 2}, ("y",), 1),
    "chips of two devices": ("tpu:tpu7x:4x4x4", {"x": 64, "y": 2}, ("x", "y"), 6),
}


@pytest.mark.parametrize("name", TPUS)
def test_links_of_tpus(name: str) -> None:
    text, sizes, axes, links = TPUS[name]
    target = Target.read(text)
    kind, mesh = kind_of(target), described(target, sizes)
    kind = kind._replace(hardware=ft.Hardware(1, 1, 10.0))
    assert bandwidth(axes, mesh, target, kind) == 10 * links


# The mesh axes, and the bytes per second: by NVLink, and by the ports of the GPUs that take part.
GPUS: dict[tuple[str, ...], float] = {
    ("model",): 4.5e11,
    ("data",): 5e10,
    ("data", "model"): 4e11,
}


@pytest.mark.parametrize("axes", GPUS)
def test_gpus(axes: tuple[str, ...]) -> None:
    target = Target.read("cuda:h100:64")
    kind, mesh = kind_of(target), described(target, {"data": 8, "model": 8})
    assert bandwidth(axes, mesh, target, kind) == GPUS[axes]


def test_given_links() -> None:
    mesh, given = described(Target.read("tpu:v5e:2x4"), {"x": 2, "y": 4}), {"x": 5.0, "y": 3.0}

    def of(links: Any, *axes: str) -> float:
        return bandwidth(
            axes, mesh, None, kind_of(None)._replace(hardware=ft.Hardware(1, 1, links))
        )

    assert of(given, "x") == 5 and of(given, "x", "y") == 3
    assert of({**given, ("x", "y"): 8.0}, "x", "y") == 8 and of(7.0, "x", "y") == 7
    check_links({"x": 2, "z": 1}, ft.Hardware(1, 1, given))
    with raises("hardware: `links` has no bandwidth for the mesh axis `z`"):
        check_links({"x": 2, "z": 2}, ft.Hardware(1, 1, given))


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
