"""Hardware: what it takes, and the table of accelerators."""

from typing import Any

import pytest

import functree as ft
from functree.devices.targets import GPUS, Target
from functree.explorer.hardware import KINDS, kind_of
from tests.lib.checks import raises

GIVEN: dict[str, Any] = {"flops": 1e12, "memory": 2**30, "links": 1e9}


def test_it_is_a_value() -> None:
    one, same = ft.Hardware(**GIVEN), ft.Hardware(1e12, 2**30, 1e9)
    assert one == same and hash(one) == hash(same) and one.efficiency == 1
    links = ft.Hardware(1e12, 2**30, {"data": 1e9, ("data", "model"): 2e9}, 0.5)
    assert links != one and hash(links) != hash(one)
    with pytest.raises(AttributeError):
        one.flops = 2.0  # pyright: ignore


WRONG = {
    "flops": (-1, "it must be a positive number"),
    "memory": ("16 GiB", "it must be a positive number"),
    "links": ({"data": 0}, "a positive number, or a dict of positive numbers by mesh axis"),
    "efficiency": (56, "it must be a number above 0 and at most 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values(name: str) -> None:
    value, message = WRONG[name]
    with raises("invalid Hardware", f"{name}=", message):
        ft.Hardware(**{**GIVEN, name: value})


def test_each_target_has_hardware() -> None:
    targets = ["tpu:v4:2x2x1", "tpu:v5e:2x4", "tpu:v5p:2x2x1", "tpu:v6e:2x4", "tpu:tpu7x:2x2x1"]
    for text in [*targets, *(f"cuda:{name}:8" for name in GPUS)]:
        assert kind_of(Target.read(text)) is KINDS[text.split(":")[1]]
    assert len(KINDS) == len(targets) + len(GPUS)
    assert kind_of(None).name == "TPU v5e"


def test_the_figures_are_those_of_the_sources() -> None:
    found = {
        name: (kind.hardware.flops / 1e12, kind.hardware.links) for name, kind in KINDS.items()
    }
    assert found == {
        "v4": (275, 4.5e10),
        "v5e": (197, 4.5e10),
        "v5p": (459, 9e10),
        "v6e": (920, 9e10),
        "tpu7x": (1153.5, 4.5e10),
        "a100": (312, 3e11),
        "h100": (989, 4.5e11),
        "h200": (989, 4.5e11),
        "b200": (2250, 9e11),
    }
