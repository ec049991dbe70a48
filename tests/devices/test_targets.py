"""Meshes of accelerators that are not there: what is refused. `test_accelerators.py` compiles for
them."""

import importlib.util
from typing import Any

import pytest
from checks import raises

import functree as ft
from functree.devices.targets import target_devices

REFUSED = {
    "v5e:2x4": """target='v5e:2x4' is not a target: write `"tpu:v5e:16x16"` for a slice of TPUs""",
    "gpu:h100:8": "is not a target",
    "": "is not a target",
    "tpu:v5e": "is not a target",
    "tpu:v5:2x4": "`v5` is none of v4, v5e, v5p, v6e, tpu7x; did you mean `v5p`?",
    "cuda:h10:8": "`h10` is none of a100, h100, h200, b200; did you mean `h100`?",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_target(name: str) -> None:
    with raises(REFUSED[name], error=ft.ShardingError):
        ft.make_mesh(data=8, target=name)


@pytest.mark.parametrize(
    ("name", "extra"), [("tpu:v5e:2x4", "functree[tpu]"), ("cuda:h100:8", "functree[cuda]")]
)
def test_a_missing_extra_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    target_devices.cache_clear()
    with pytest.raises(ft.ShardingError) as caught:
        ft.make_mesh(data=8, target=name)
    assert (
        str(caught.value)
        == f'target={name!r} needs the compiler of the target: pip install "{extra}"'
    )


SHAPES = {
    "tpu:v5e:8": "the shape of a slice is written as `16x16`, or `4x4x8`",
    "tpu:v5e:2by4": "the shape of a slice is written as",
    "cuda:h100:2x4": "write the number of GPUs at the end, such as `cuda:h100:8`",
    "cuda:h100:0": "write the number of GPUs at the end",
    "cuda:h100:12": "more than 8 GPUs are hosts of 8",
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found: Any = object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: found)
    with raises(SHAPES[name], error=ft.ShardingError):
        ft.make_mesh(data=8, target=name)


def test_options_that_exclude_each_other() -> None:
    with raises("make_mesh takes `devices` or `target`", error=ft.ShardingError):
        ft.make_mesh(data=8, target="tpu:v5e:2x4", devices=[])
    with raises(
        "make_mesh(target=8): `target` is an option, so it cannot name a mesh axis",
        error=ft.ShardingError,
    ):
        ft.make_mesh(data=8, target=8)  # pyright: ignore[reportArgumentType]
