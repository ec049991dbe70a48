"""An array that is cut over a mesh ─► a picture: which blocks, and the devices of each."""

import re
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from functree.report.page import HIGH, MOST, WIDE, Pictures, device_colour

SIZES = {"data": 2, "model": 4}
Cuts = Sequence[tuple[str, ...]]


def blocks(shape: Sequence[int], cuts: Cuts, sizes: dict[str, int] = SIZES) -> list[list[str]]:
    """The colours of the devices of each block, from left to right and from top to bottom."""
    pictures = Pictures(sizes, "p")
    use = pictures.of(shape, cuts)
    drawn = pictures.definitions()
    name = re.findall(r'href="#(\w+)"', use)[0]
    stripes: dict[str, list[str]] = {}
    for key, stops in re.findall(r'<linearGradient id="(\w+)" y2="1">(.*?)</linear', drawn):
        stripes[f"url(#{key})"] = re.findall(r'stop-color="(.*?)"', stops)[::2]
    symbol = re.findall(rf'<symbol id="{name}".*?</symbol>', drawn)[0]
    return [stripes.get(fill, [fill]) for fill in re.findall('fill="(.*?)"', symbol)]


CUTS: dict[str, tuple[tuple[int, ...], Cuts]] = {
    "rows and columns": ((8, 16), [("data",), ("model",)]),
    "columns and rows": ((8, 16), [("model",), ("data",)]),
    "columns": ((8, 16), [(), ("model",)]),
    "rows": ((8, 16), [("data",), ()]),
    "one dimension over both": ((16,), [("data", "model")]),
    "the other order": ((16,), [("model", "data")]),
    "whole": ((8, 16), [(), ()]),
    "a number": ((), []),
    "the cut ones of four": ((2, 8, 4, 6), [(), ("model",), (), ("data",)]),
}


@pytest.mark.parametrize("case", CUTS)
def test_blocks_are_on_the_devices_that_jax_has_them_on(case: str) -> None:
    shape, cuts = CUTS[case]
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in cuts)))
    # JAX's slices in the order of the array, with the devices of each.
    found: dict[tuple[int, ...], list[str]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        start = tuple(one.start or 0 for one in index)
        found.setdefault(start, []).append(device_colour(device.id, SIZES))
    assert blocks(shape, cuts) == [found[start] for start in sorted(found)]


def test_every_device_has_a_colour_of_its_own() -> None:
    for sizes in (SIZES, {"x": 8}, {"a": 2, "b": 2, "c": 2}, {"one": 1, "x": 8}):
        assert len({device_colour(i, sizes) for i in range(8)}) == 8
    assert device_colour(0, {}) == device_colour(0, {"x": 1})


def test_a_large_mesh_is_drawn_in_part() -> None:
    sizes = {"data": 16, "model": 16}
    assert len(blocks((64, 64), [("data",), ("model",)], sizes)) == MOST * MOST
    (whole,) = blocks((64, 64), [(), ()], sizes)
    assert len(set(whole)) == MOST


def test_the_title_tells_copies() -> None:
    pictures = Pictures(SIZES, "p")
    for cuts in ([(), ()], [("model",), ()], [("data",), ("model",)]):
        pictures.of((8, 8), cuts)
    assert re.findall("<title>(.*?)</title>", pictures.definitions()) == [
        "whole, on 8 devices each: copies over data, model",
        "4 blocks, on 2 devices each: copies over data",
        "8 blocks, one on each device",
    ]


def test_arrays_that_are_cut_alike_share_a_picture() -> None:
    pictures = Pictures(SIZES, "p")
    same = [pictures.of(shape, [("model",), ()]) for shape in [(8, 16), (16, 32)]]
    assert same[0] == same[1] != pictures.of((8, 16), [(), ()])
    assert pictures.unknown((8, 16)) not in same
    assert pictures.definitions().count("<symbol") == 3


@pytest.mark.parametrize("shape", [(), (1,), (10**9,), (1, 10**9), (10**9, 1), (0, 4), (3, 5, 7)])
def test_pictures_stay_in_their_frame(shape: tuple[int, ...]) -> None:
    pictures = Pictures(SIZES, "p")
    pictures.of(shape, [()] * len(shape))
    pictures.unknown(shape)
    for rect in re.findall(r"<rect (.*?)/>", pictures.definitions()):
        at = {
            name: float(value)
            for name, value in re.findall(r'\b(x|y|width|height)="([^ "]*)"', rect)
        }
        assert at["x"] >= 0 and at["y"] >= 0 and at["width"] > 0 and at["height"] > 0
        assert at["x"] + at["width"] <= WIDE and at["y"] + at["height"] <= HIGH
