"""Meshes of accelerators that are not there: what is refused. `test_accelerators.py` compiles for
them."""

import importlib.util
import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

import functree as ft
from functree.devices import targets
from functree.devices.targets import (
    GPUS,
    Target,
    device_memory,
    target_config,
    target_devices,
)
from tests.lib.checks import raises

REFUSED = {
    "v5e:2x4": """target='v5e:2x4' is not a target: write `"tpu:v5e:16x16"` for a TPU slice""",
    "": "is not a target",
    "tpu:v5:2x4": "`v5` is not one of v4, v5e, v5p, v6e, tpu7x; did you mean `v5",
    "cuda:h10:8": "`h10` is not one of a100, h100, h200, b200; did you mean `h100`?",
    "tpu:v5e:02x4": "write the slice's shape, such as `16x16`",
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
    assert str(caught.value) == f'target={name!r} needs a compiler: run `pip install "{extra}"`'


def test_options_that_exclude_each_other() -> None:
    with raises("make_mesh: pass `devices` or `target`, not both", error=ft.ShardingError):
        ft.make_mesh(data=8, target="tpu:v5e:2x4", devices=[])


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What JAX is asked for, with the environment of that moment. It has eight devices of each."""
    asked: list[Any] = []

    def describe(*args: Any, **options: Any) -> Any:
        asked.append((args, options, dict(os.environ)))
        return SimpleNamespace(devices=jax.devices())

    found: Any = object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: found)
    monkeypatch.setattr(targets.topologies, "get_topology_desc", describe)
    target_devices.cache_clear()
    yield asked
    target_devices.cache_clear()


# What the compilers do not survive, or do not answer.
UNASKED = {
    "tpu:v5e:8": "write the slice's shape, such as `16x16` or `4x4x8`, after the last colon",
    "cuda:h100:2x4": "write the number of GPUs, such as `8`",
    "cuda:h100:12": "for more than 8 GPUs, use a multiple of 8",
    "tpu:v5e:0x4": "write the slice's shape, such as `16x16` or `4x4x8`, after the last colon",
    "tpu:v5e:-2x-4": "write the slice's shape",
    "cuda:h100:99999992": "a target has at most 131,072 chips",
    "tpu:v5e:99999x99999": "a target has at most 131,072 chips",
    "tpu:v5e:256x512": "data=8 needs 8 devices, but target='tpu:v5e:256x512' has 131072",
    "tpu:tpu7x:2x4": "data=8 needs 8 devices, but target='tpu:tpu7x:2x4' has 16",
}


@pytest.mark.parametrize("name", UNASKED, ids=lambda name: name[:20])
def test_the_compiler_is_not_asked(described: list[Any], name: str) -> None:
    with raises(UNASKED[name], error=ft.ShardingError):
        ft.make_mesh(data=8, target=name)
    assert not described


@pytest.mark.parametrize("name", ["tpu:v5e:" + 3000 * "1x", "cuda:h100:" + 9999 * "٩"])
def test_of_a_long_text_the_beginning_is_shown(described: list[Any], name: str) -> None:
    with pytest.raises(ft.ShardingError) as caught:
        ft.make_mesh(data=8, target=name)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "args", "options"),
    [
        ("tpu:v5e:2x4", ("v5e:2x4", "tpu"), {}),
        ("tpu:v4:2x2x2", ("v4:2x2x2", "tpu"), {"chip_config_name": "megacore"}),
        ("cuda:a100:4", ("cuda:a100:4", "cuda"), {"topology": "1x1x4"}),
        ("cuda:b200:32", ("cuda:b200:32", "cuda"), {"topology": "4x1x8"}),
    ],
)
def test_what_jax_is_asked_for(described: list[Any], name: str, args: Any, options: Any) -> None:
    assert target_devices(Target.read(name)) == tuple(jax.devices())
    assert target_devices(Target.read(name)) is target_devices(Target.read(name))
    ((given, its, _),) = described
    assert given == args
    config = its.pop("target_config", None)
    assert its == options
    assert (config is None) is name.startswith("tpu")
    assert config is None or GPUS[name.split(":")[1]].name in config


def test_the_environment_is_the_users_again(
    described: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    before = dict(os.environ)
    target_devices(Target.read("tpu:v5e:2x4"))
    (_, _, environment) = described[0]
    assert environment["TPU_WORKER_HOSTNAMES"] == "mine"
    assert environment["TPU_SKIP_MDS_QUERY"] == "1"
    assert dict(os.environ) == before


def test_a_mesh_has_all_devices_of_its_target(described: list[Any]) -> None:
    assert ft.make_mesh(data=8, target="tpu:v5e:2x4").size == 8


def test_a_slice_that_is_not_there(described: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise jax.errors.JaxRuntimeError("3x5 is none")

    monkeypatch.setattr(targets.topologies, "get_topology_desc", refuse)
    with raises(
        "target='tpu:v5e:3x5': the TPU compiler does not support this slice: 3x5 is none",
        error=ft.ShardingError,
    ):
        ft.make_mesh(data=15, target="tpu:v5e:3x5")


def test_a_mesh_that_splits_the_axes_of_a_torus(
    described: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole_axes(*args: Any, **options: Any) -> Any:
        raise NotImplementedError("no such order")

    monkeypatch.setattr(jax, "make_mesh", whole_axes)
    mesh = ft.make_mesh(data=2, model=4, target="tpu:v5e:2x4", explicit=True)
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    assert mesh.axis_types == (AxisType.Explicit,) * 2


# What is known of GPUs: their data sheets, and the text that XLA's compiler reads

# The bytes per second of the data sheets: of the memory, and of NVLink in both directions.
SHEETS = {
    "a100": (2.039e12, 600e9, 80e9),
    "h100": (3.35e12, 900e9, 80e9),
    "h200": (4.8e12, 900e9, 141e9),
    "b200": (8e12, 1.8e12, 180e9),
}


@pytest.mark.parametrize("name", GPUS)
def test_they_are_as_their_data_sheets_say(name: str) -> None:
    gpu, (memory, links, size) = GPUS[name], SHEETS[name]
    assert gpu.memory_bandwidth == pytest.approx(memory, rel=0.05)
    assert 2 * gpu.nvlink_bandwidth == links
    assert gpu.memory == pytest.approx(size, rel=0.08)


@pytest.mark.parametrize("name", GPUS)
def test_the_memory_of_a_device(name: str) -> None:
    device = SimpleNamespace(device_kind=GPUS[name].name)
    assert device_memory(device) == GPUS[name].memory
    for unknown in (GPUS[name].name + " MIG 1g.10gb", "NVIDIA L40S", "cpu"):
        assert device_memory(SimpleNamespace(device_kind=unknown)) is None


@pytest.mark.parametrize(
    ("name", "major", "extension"),
    [("a100", 8, "NONE"), ("h100", 9, "ACCELERATED_FEATURES"), ("h200", 9, "ACCELERATED_FEATURES"),
     ("b200", 10, "ACCELERATED_FEATURES")],
)  # fmt: skip
def test_the_text_for_the_compiler(name: str, major: int, extension: str) -> None:
    gpu, text = GPUS[name], target_config(GPUS[name])
    assert f"{{ major: {major} minor: 0 feature_extension: {extension} }}" in text
    said = dict(re.findall(r"(\w+): (\S+)", text))
    assert int(said["core_count"]) == gpu.processors
    assert int(said["memory_bandwidth"]) == gpu.memory_bandwidth
    assert int(said["shared_memory_per_block_optin"]) == gpu.shared - 1024
    assert int(said["block_dim_limit_x"]) == 2**31 - 1  # without it, XLA divides by zero
    assert text.count("{") == text.count("}")
    assert f'device_description_str: "{gpu.name}"' in text
