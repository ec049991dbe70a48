"""GPUs that are not there: what their data sheets say, and the text that XLA's compiler reads."""

import re
from types import SimpleNamespace

import jax
import pytest

from functree.devices.targets import GPUS, device_memory, target_config

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
    assert device_memory(SimpleNamespace(device_kind=GPUS[name].name + " MIG 1g.10gb")) is None


def test_the_memory_of_a_device_that_is_not_known() -> None:
    assert device_memory(jax.devices()[0]) is None
    assert device_memory(SimpleNamespace(device_kind="NVIDIA L40S")) is None


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
